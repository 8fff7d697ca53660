"""All randomness: streams from one seed or from the system, each named by its purpose, and what is drawn from them.

Begin with `streams.py`.
"""

from .streams import Streams, counter_bits

__all__ = ["Streams", "counter_bits"]
