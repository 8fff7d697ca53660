"""A user's update depends on nobody else: whatever a model or loss could remember is restored or refused.

Begin with `guard.py`; `snapshots.py` holds the single kinds of state, `generators.py` the random generators and
`made_up_data.py` the synthetic examples on which a model is tried before any user is looked at.
"""
