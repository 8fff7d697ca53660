"""Single operations: the custom op with its plain version, and the Triton kernels for NVIDIA GPUs beside it.

Begin with `convolution.py` or `lstm.py` (the operations), then their `*_triton.py`. `noise.py` draws the noise of a
round.
"""
