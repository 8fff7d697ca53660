"""Tensors and arrays that training must not change: compared bit by bit or by a checksum, and put back."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SHORT = 1 << 16  # bytes: compared after every user; longer ones once a block
_CHUNK, _CHUNK_ON_DEVICE = 1 << 20, 1 << 24  # bytes at a time in a checksum: what a processor's cache holds
_ODD = -0x61C8864680B583EB  # 2^64 over the golden ratio: places are spread evenly
_ODDS = (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85, 0x5851F42D4C957F2D)  # multipliers of a checksum
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_COPIED = 1 << 26  # bytes: of longer tensors and arrays a checksum is kept, and no copy


class Constant:
    """A tensor or array that training must not change: compared bit by bit, and no gradient may be left on it.

    Of a tensor the whole memory is compared, also what lies beside a view, and shape, strides, `requires_grad` and
    `is_shared()`. Of a long one that is `shared` with the caller, and of any of more than 64 MiB, a checksum is kept,
    not a copy: a change is refused, but not undone. A checksum is computed once a block, 0.5 GB a second on one core.
    """

    def __init__(self, label: str, now: Tensor | NDArray[Any], *, shared: bool = False) -> None:
        self.label, self.now, self.shared = label, now, shared
        self.before: Any = None  # a copy of the array, or of the tensor's memory
        self.checksum: list[int] | None = None
        if isinstance(now, np.ndarray):
            self.writeable = now.flags.writeable
            self.before = _plain(now).copy() if now.nbytes <= _COPIED else None
            self.checksum = _array_checksum(now) if self.before is None and not now.dtype.hasobject else None
            self._checked_per_user = now.nbytes <= SHORT
            return
        self.data = now.data  # its memory, for `restore`
        self.grad = now.grad if now.is_leaf else None
        self.version = now._version if now.is_leaf and not now.is_inference() else 0
        self.form = _form(now)
        self.requires_grad, self._address = now.requires_grad, _address(now)
        memory = _memory(now)
        size = sum(len(piece) for piece in memory)
        if size > (SHORT if shared else _COPIED):
            self.checksum = [checksum(piece) for piece in memory]
        elif memory:
            self.before = [piece.clone() for piece in memory]
        # Compared after every user: short values in CPU memory, where that costs next to nothing.
        self._checked_per_user = bool(memory) and size <= SHORT and now.device.type == "cpu"

    @property
    def lost(self) -> bool:
        """Whether a change cannot be undone, as there is no copy."""
        return self.checksum is not None

    def written(self) -> bool:
        """Whether torch has counted a change, whatever the values are."""
        now = self.now
        return isinstance(now, Tensor) and now.is_leaf and not now.is_inference() and now._version != self.version

    def touched(self) -> bool:
        """Whether a quick check shows a change (version counter, gradient, short values); `same` compares all."""
        now = self.now
        if not isinstance(now, Tensor) or self._checked_per_user:
            return self._checked_per_user and not self.same()
        if now.requires_grad != self.requires_grad:
            return True
        if not now.is_leaf:
            return False
        if now.grad is self.grad and now._version == self.version and _address(now) == self._address:
            return False
        return not self.same()

    def same(self) -> bool:
        """Whether nothing has changed."""
        now, before = self.now, self.before
        if isinstance(now, np.ndarray):
            if now.flags.writeable != self.writeable:
                return False
            if before is None:
                return self.checksum is None or _array_checksum(now) == self.checksum
            if now.shape != before.shape or now.dtype != before.dtype:
                return False
            if now.dtype.kind == "T":  # texts of any length, which lie elsewhere in a copy
                return bool(np.array_equal(_plain(now), before))
            return bool(_plain(now).tobytes() == before.tobytes())  # of objects: that they are the same ones
        if torch._C._functorch.is_functorch_wrapped_tensor(now):  # left behind by vmap
            return False
        if (now.is_leaf and now.grad is not self.grad) or _form(now) != self.form:
            return False
        if before is None and now.is_leaf and now._version != self.version:
            return False
        if self.checksum is not None:
            return _address(now) == _address(self.data) and [*map(checksum, _memory(now))] == self.checksum
        if before is None:
            return True
        memory = _memory(now)
        return len(memory) == len(before) and all(map(torch.equal, memory, before))

    def restore(self) -> None:
        """Make it what it was; what is shared, in the caller's memory."""
        now = self.now
        if isinstance(now, np.ndarray):
            with suppress(ValueError):  # of memory that cannot be written to, or is no longer the array's own
                now.setflags(write=self.writeable)
                if self.before is not None and self.writeable:
                    if now.shape != self.before.shape:
                        now.resize(self.before.shape, refcheck=False)
                    _plain(now)[...] = self.before
            return
        if now.is_leaf:
            now.grad = self.grad
        if not self.shared and self.same():
            return
        for piece, kept in zip(_memory(self.data), self.before or (), strict=False):
            piece.copy_(kept)
        with suppress(RuntimeError):  # of a view that torch made part of a computation
            if now.requires_grad != self.requires_grad:
                now.detach_() if not now.is_leaf else now.requires_grad_(self.requires_grad)
        if not self.shared and _form(self.data)[1:] != self.form[1:]:  # moved to memory for other processes
            self.data = self.data.clone()
        now.data = self.data
        self._address = _address(now)
        if now.is_leaf and not now.is_inference():
            set_version_counters((now,), (self.version,))


def set_version_counters(tensors: tuple[Tensor, ...], counts: tuple[int, ...]) -> None:
    """Let torch's counts of changes be these. Between users nothing is differentiated that could depend on them."""
    torch._C._autograd._unsafe_set_version_counter(tensors, counts)


def has_own_memory(values: Tensor) -> bool:
    """Whether the tensor is dense and has its memory for itself: it is no view of something larger."""
    if values.layout != torch.strided or values.device.type == "meta":
        return False
    whole = values.untyped_storage().nbytes() == values.nbytes
    return whole and bool(torch.ops.aten.is_non_overlapping_and_dense(values))


def _memory(values: Tensor) -> list[Tensor]:
    """The bytes of a tensor, not copied, so that NaN equals itself and 0 differs from -0; of a sparse one, its parts'.

    None of what cannot be read: on the device "meta", or of a class that keeps its values elsewhere. Of a view of more
    than `_COPIED` bytes the view alone.
    """
    if values.layout in _SPARSE:
        return [piece for part in _SPARSE[values.layout] for piece in _memory(getattr(values, part)())]
    try:
        storage = values.untyped_storage()
        if (
            values.layout != torch.strided
            or values.device.type == "meta"
            or (storage.nbytes() and not storage.data_ptr())
        ):
            return []
        if storage.nbytes() > max(_COPIED, values.nbytes):
            return [_bits(values)]
        return [torch.empty(0, dtype=torch.uint8, device=values.device).set_(storage)]
    except (RuntimeError, NotImplementedError):
        return []


def _form(values: Tensor) -> tuple[object, ...]:
    """What a tensor is besides its bytes; `requires_grad` comes first."""
    basic = values.requires_grad, values.shape, values.dtype, values.device, values.layout
    if values.layout == torch.sparse_coo:
        return *basic, values.is_coalesced()
    if values.layout != torch.strided:
        return basic
    try:
        shared = values.device.type == "cpu" and values.untyped_storage().is_shared()
    except (RuntimeError, NotImplementedError):  # a class that keeps its values elsewhere
        shared = False
    return *basic, values.stride(), values.storage_offset(), values.is_conj(), values.is_neg(), shared


def _address(values: Tensor) -> int:
    """Where the values are; 0 if they are at no single place."""
    try:
        return values.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def checksum(values: Tensor) -> int:
    """64 bits of the values: a sum over their bytes, eight at a time, each number mixed with its place.

    The mixing is not linear. In a plain weighted sum, changes of two numbers' highest bits would cancel.
    """
    bits = _bits(values)
    chunk = _CHUNK if bits.device.type == "cpu" else _CHUNK_ON_DEVICE
    total = torch.full((), len(bits), dtype=torch.int64, device=bits.device)
    places = torch.arange(1, chunk // 4, 2, device=bits.device) * _ODD
    for start in range(0, len(bits), chunk):
        words = torch.nn.functional.pad(bits[start : start + chunk], (0, -len(bits[start : start + chunk]) % 8))
        words = words.clone().view(torch.int64) if words.storage_offset() % 8 else words.view(torch.int64)
        mixed = torch.add(places[: len(words)], words, alpha=_ODDS[0])
        halves = mixed.view(torch.int32).view(-1, 2)
        for odd in _ODDS[1:]:
            halves[:, 0] ^= halves[:, 1]  # the high bits, which a multiplication spreads no further, into the low ones
            mixed *= odd
        halves[:, 0] ^= halves[:, 1]
        total += mixed.sum()
        places += torch.full_like(places[0], chunk // 4) * _ODD
    return int(total)


def _plain(values: NDArray[Any]) -> NDArray[Any]:
    """The array itself: a class derived from it may show something else, as a masked one hides what is masked."""
    return values if type(values) is np.ndarray else values.view(np.ndarray)


def _array_checksum(values: NDArray[Any]) -> list[int]:
    """Checksums of the parts of an array, which may be read-only."""
    flat = np.ascontiguousarray(_plain(values)).reshape(-1).view(np.uint8)
    parts = (flat[start : start + _CHUNK_ON_DEVICE].copy() for start in range(0, len(flat), _CHUNK_ON_DEVICE))
    return [*values.shape, *(checksum(torch.from_numpy(part)) for part in parts)]


def _bits(values: Tensor) -> Tensor:
    """The values as bytes, so that NaN equals itself and 0 differs from -0."""
    return values.detach().contiguous().reshape(-1).view(torch.uint8)
