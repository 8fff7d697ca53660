"""The arithmetic of local training. Parameters, sums and clip norms are float32 or better in all settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["float32", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")


@contextmanager
def precision_context(precision: Precision, device: torch.device) -> Iterator[None]:
    """Within, torch computes in this precision; on leaving, its settings are restored.

    "tf32" lets matrix products round their inputs to 10 bits, on a GPU that can, and is float32 elsewhere. "bf16" is
    autocast to bfloat16: products and convolutions in bfloat16, sums that need it in float32.
    """
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
