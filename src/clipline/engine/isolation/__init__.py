"""A user's update depends on nobody else: whatever a model or loss could remember is restored or refused.

Begin with `guard.py`. `state.py` finds the state and keeps it as it was.
`generators.py` holds the random generators and `made_up_data.py` the synthetic examples on which a model
is tried before any user is looked at.
"""
