"""Tensors and arrays that training must not change: compared bit by bit or by a checksum, and put back."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SHORT = 1 << 16  # bytes: compared after every user; longer ones once a block
_COPIED = 1 << 26  # bytes: of longer tensors and arrays a checksum is kept, and no copy
_CHUNK, _CHUNK_ON_DEVICE = 1 << 20, 1 << 24  # bytes at a time in a checksum: what a processor's cache holds
_ODD = -0x61C8864680B583EB  # 2^64 over the golden ratio: places are spread evenly
_ODDS = (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85, 0x5851F42D4C957F2D)  # multipliers of a checksum


class Constant:
    """A tensor or array that training must not change: compared bit by bit, and no gradient may be left on it.

    Of a long one that is `shared` with the caller, and of any of more than 64 MiB, a checksum is kept, not a copy: a
    change is refused, but not undone. A checksum is computed once a block, 0.5 GB a second on one core.
    """

    def __init__(self, label: str, now: Tensor | NDArray[Any], *, shared: bool = False) -> None:
        self.label, self.now, self.shared = label, now, shared
        size = now.nbytes if isinstance(now, np.ndarray) else sum(piece.nbytes for piece in _pieces(now))
        self.lost = size > (SHORT if shared else _COPIED)  # there is no copy: a change cannot be undone
        # Compared after every user: short values in a processor's memory, where that costs next to nothing.
        self._short = 0 < size <= SHORT and (isinstance(now, np.ndarray) or now.device.type == "cpu")
        self._data: Any = None if isinstance(now, np.ndarray) else now.data  # the memory, for `restore`
        self._noticed, self._form = _noticed(now), _form(now)
        self.before: list[Any]
        if isinstance(now, np.ndarray):
            self.before = [_digest(now) if self.lost else now.copy()]
        else:
            self.before = [checksum(piece) if self.lost else piece.clone() for piece in _pieces(now)]

    def touched(self) -> bool:
        """Whether a quick check shows a change (version counter, gradient, short values); `same` compares all."""
        if not self._short and _noticed(self.now) == self._noticed:
            return False
        if self.same():
            self._noticed = _noticed(self.now)  # written to with what was there already
            return False
        return True

    def same(self) -> bool:
        """Whether nothing has changed."""
        now = self.now
        if isinstance(now, np.ndarray):
            if _form(now) != self._form:
                return False
            if now.dtype.kind == "T":  # texts of any length, which lie elsewhere in a copy
                return bool(np.array_equal(now, self.before[0]))
            if self.lost:
                return bool(_digest(now) == self.before[0])
            return bool(now.tobytes() == self.before[0].tobytes())  # of objects: that they are the same ones
        if torch._C._functorch.is_functorch_wrapped_tensor(now):  # left behind by vmap
            return False
        if (now.is_leaf and now.grad is not self._noticed[0]) or _form(now) != self._form:
            return False
        if self.lost:
            return _address(now) == _address(self._data) and [*map(checksum, _pieces(now))] == self.before
        return all(torch.equal(_bits(one), _bits(kept)) for one, kept in zip(_pieces(now), self.before, strict=True))

    def restore(self) -> None:
        """Make it what it was; what is shared, in the caller's memory."""
        now = self.now
        if isinstance(now, np.ndarray):
            if now.flags.writeable and not self.lost and now.shape == self.before[0].shape:
                now[...] = self.before[0]
            return
        for piece, kept in zip(_pieces(self._data), () if self.lost else self.before, strict=False):
            piece.copy_(kept)
        with suppress(RuntimeError):  # of a view that torch made part of a computation
            if now.requires_grad != self._form[0]:
                now.detach_() if not now.is_leaf else now.requires_grad_(bool(self._form[0]))
        now.data = self._data
        if now.is_leaf:
            now.grad = self._noticed[0]
        self._noticed = _noticed(now)


def has_own_memory(values: Tensor) -> bool:
    """Whether the tensor is dense and has its memory for itself: it is no view of something larger."""
    if values.layout != torch.strided or values.device.type == "meta":
        return False
    whole = values.untyped_storage().nbytes() == values.nbytes
    return whole and bool(torch.ops.aten.is_non_overlapping_and_dense(values))


def _pieces(values: Tensor) -> list[Tensor]:
    """What holds the values; of a sparse tensor its parts. None on the device "meta"."""
    if values.layout == torch.sparse_coo:
        return [values._indices(), values._values()]
    if values.layout != torch.strided:
        return [values.values()]
    return [] if values.device.type == "meta" or not _address(values) else [values.detach()]


def _noticed(values: Tensor | NDArray[Any]) -> tuple[Any, ...]:
    """What is quickly seen of a tensor: the gradient on it, torch's count of changes, and where its values are."""
    if not isinstance(values, Tensor) or not values.is_leaf or values.is_inference():
        return None, getattr(values, "requires_grad", None)
    return values.grad, values._version, values.requires_grad, _address(values)


def _form(values: Tensor | NDArray[Any]) -> tuple[object, ...]:
    """What a tensor or array is besides its values; of a tensor `requires_grad` comes first."""
    if isinstance(values, np.ndarray):
        return values.shape, values.dtype
    strides = values.stride() if values.layout == torch.strided else ()
    return values.requires_grad, values.shape, values.dtype, values.device, values.layout, strides


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


def _digest(values: NDArray[Any]) -> bytes:
    flat: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return hashlib.blake2b(flat).digest()


def _bits(values: Tensor) -> Tensor:
    """The values as bytes, so that NaN equals itself and 0 differs from -0."""
    return values.detach().contiguous().reshape(-1).view(torch.uint8)
