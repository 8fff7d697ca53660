"""Many users as one program: `torch.func.vmap` over stacked parameters, on a GPU compiled and replayed as CUDA graphs.

Begin with `trainer.py`, then `step.py` (one SGD step of all users of a block). Plain twin: `engine/one_by_one.py`.
"""
