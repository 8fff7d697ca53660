"""Algorithm 1 of the paper and nothing else: what a privacy reviewer reads, together with `privacy/`.

Begin with `round.py`, which reads like the algorithm; then `clipping.py` (the only clip-and-sum) and `mechanism.py`
(the only way from a private sum to a release). Who trains is a protocol, `backend.py`; `engine/` implements it.
"""
