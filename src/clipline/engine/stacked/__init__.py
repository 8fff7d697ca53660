"""Many users as one program: `torch.func.vmap` over stacked parameters.

Begin with `trainer.py`, then `step.py` (one SGD step of all users of a block). Plain twin: `engine/core/one_by_one.py`.
Users with one example and one plain SGD step share the round's weights instead (`single_step.py`): no user moves before
the gradient is taken, so one product serves all users (`single_step.py`), and a user's change of a weight stays in
factors that are measured and summed as they are (`FactoredUpdates` of `core/updates.py`).
"""
