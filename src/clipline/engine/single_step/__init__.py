"""Users with one example and one plain SGD step, as in example-level privacy: all share the round's weights.

Begin with `trainer.py`. No user moves before the gradient is taken, so the weight of a layer needs no copies: one
product serves all users (`shared_weights.py`, run by `step.py`), and a user's change of it stays in factors that are
measured and summed as they are (`updates.py`). `trial.py` finds out on made-up examples for which weights this works;
`aligned.py` has products that round a user's numbers alike at every place.
"""
