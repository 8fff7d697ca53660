"""Real federations: vectors that clients encode, and sums that no server sees the parts of.

Begin with `encoders.py`; then `secure_sum.py` and `flower.py`, which need the extra `federation`. `simulated.py` lets a
`Training` use the encoders without a network. What each of them promises is in docs/howto/federation.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import lazily

if TYPE_CHECKING:
    from .flower import AdaptiveClippingStrategy
    from .flower_client import InProcessGrid, clipped

__all__ = ["AdaptiveClippingStrategy", "InProcessGrid", "clipped"]
__getattr__, __dir__ = lazily(
    __name__,
    {".flower": "AdaptiveClippingStrategy", ".flower_client": "clipped InProcessGrid"},
)
