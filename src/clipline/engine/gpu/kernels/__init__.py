"""Single operations: the custom op with its plain version, and the Triton kernels for NVIDIA GPUs beside it.

Begin with `convolution.py`, `group_norm.py` or `lstm.py` (the operations), then their `*_triton.py`;
`block_sums_triton.py` measures and sums a block of updates; `noise.py` draws the noise of a round.
"""
