"""A user's update depends on nobody else: whatever a model or loss could remember is restored or refused.

Begin with `guard.py`. `reachable.py` finds the state, in all that `packages.py` takes for the caller's own;
`snapshots.py` holds its single kinds and `constants.py` those of tensors and arrays; `quick_check.py` compares all of
them at once. `generators.py` holds the random generators and `made_up_data.py` the synthetic examples on which a model
is tried before any user is looked at. `user_sums.py` adds up a user's numbers in an order that nobody else decides.
"""
