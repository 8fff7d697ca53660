"""Algorithm 1 of the paper and nothing else: what a privacy reviewer reads, together with `privacy/`.

Begin with `round.py`, which reads like the algorithm; then `clipping.py` (the only clip-and-sum) and `mechanism.py`
(the only way from a private sum to a release). Who trains is a protocol, `backend.py`; `engine/` implements it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import lazily

if TYPE_CHECKING:
    from .clip_controllers import ClipController, ClipState
    from .clipping import ClippedSum, clip_rows, join_bit
    from .mechanism import GaussianMechanism

__all__ = [
    "ClipController", "ClipState", "ClippedSum", "GaussianMechanism", "clip_rows", "join_bit",
]  # fmt: skip
__getattr__, __dir__ = lazily(
    __name__,
    {
        ".clip_controllers": "ClipController ClipState",
        ".clipping": "ClippedSum clip_rows join_bit",
        ".mechanism": "GaussianMechanism",
    },
)
