"""What saves memory traffic when one user trains on a CPU core.

Begin with `fused_linear.py` (SGD steps of dense layers without forming gradients); then `autograd_ops.py` and
`huge_pages.py`.
"""
