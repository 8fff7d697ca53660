"""The arithmetic of local training: its precision, and whether kernels of our own compute it.

Parameters, sums and clip norms are float32 or better in all settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch

Precision = Literal["float32", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")
_CUBLAS: Any = torch.backends.cuda.matmul
_CUDNN: Any = torch.backends.cudnn
_CORES: Any = torch.backends.mkldnn
_OLDER, _NEWER = [_CUBLAS, _CUDNN], [_CUBLAS, _CUDNN.conv, _CUDNN.rnn]
_ON_CORES = [_CORES.matmul, _CORES.conv, _CORES.rnn]


_kernels = True  # not a context variable: the backward pass runs in a thread of torch's own


def kernels_in_use() -> bool:
    """Whether kernels of our own may compute here; if not, their plain twins do."""
    return _kernels


@contextmanager
def kernels_switched(on: bool) -> Iterator[None]:
    """Within, kernels of our own are used or not, by `FastParts.kernels`; on leaving, as before."""
    global _kernels
    before, _kernels = _kernels, on
    try:
        yield
    finally:
        _kernels = before


@contextmanager
def precision_context(precision: Precision, device: torch.device) -> Iterator[None]:
    """Within, torch computes in this precision; on leaving, its settings are restored.

    "tf32" lets matrix products round their inputs to 10 bits, on a GPU that can, and is float32 elsewhere. "bf16" is
    autocast to bfloat16: products and convolutions in bfloat16, sums that need it in float32.
    """
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)
    with tf32_switched(precision), autocast:
        yield


@contextmanager
def tf32_switched(precision: Precision) -> Iterator[None]:
    """Within, products of float32 are rounded to tf32 unless `precision` is float32; on leaving, as before.

    These settings belong to the process: what another thread computes meanwhile follows them too.
    """
    before = _Tf32Settings()
    before.use(precision != "float32")
    try:
        yield
    finally:
        before.restore()


class _Tf32Settings:
    """Torch's settings of tf32 as they were found: the older names (allow_tf32) and the newer (fp32_precision).

    Torch refuses to read an older name where the two disagree, as they do once a caller has used the newer ones.
    """

    def __init__(self) -> None:
        self._newer = [(one, one.fp32_precision) for one in [*_NEWER, *_ON_CORES]]
        self._older = []
        self._medium = False  # which the older names do not tell from tf32
        for one in _OLDER:
            with suppress(RuntimeError):
                self._older.append((one, one.allow_tf32))
        with suppress(RuntimeError):
            self._medium = torch.get_float32_matmul_precision() == "medium"

    def use(self, tf32: bool) -> None:
        """Set all of them."""
        for one in _OLDER:
            one.allow_tf32 = tf32
        for one in _NEWER:
            one.fp32_precision = "tf32" if tf32 else "ieee"
        for one in _ON_CORES:  # else a caller's "medium" would round products of float32
            one.fp32_precision = "ieee"

    def restore(self) -> None:
        """Set all of them as they were found."""
        for one, allowed in self._older:
            one.allow_tf32 = allowed
        if self._medium:
            torch.set_float32_matmul_precision("medium")
        for one, value in self._newer:
            one.fp32_precision = value
