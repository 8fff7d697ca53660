"""What saves memory traffic when one user trains on a CPU core.

Begin with `autograd_ops.py` (operations with cheaper gradients), then `allocator.py`.
"""
