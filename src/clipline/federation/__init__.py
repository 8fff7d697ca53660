"""Real federations: vectors that clients encode, and sums that no server sees the parts of.

Begin with `encoders.py`; then `secure_sum.py`, which needs the extra `federation`. `simulated.py` lets a `Training` use
the encoders without a network. What each of them promises is in docs/federation.md.
"""
