"""Snapshots of mutable state: containers, attributes, closures, global variables, tensors.

Each can tell whether the state has changed, and restore it.
"""

from __future__ import annotations

import threading
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, MutableMapping, Sequence
from functools import partial
from operator import is_
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

VALUES = (int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device, torch.Size)
MISSING = object()
SHORT = 1 << 16  # bytes: compared after every user; longer ones once a block
_CHUNK = 1 << 22  # bytes at a time in a checksum
_COPIED = 1 << 26  # of larger tensors only torch's version counter is compared, larger arrays not at all


class Snapshot(Protocol):
    """A piece of mutable state, as it was when this was made."""

    label: str

    @property
    def read(self) -> partial[Any] | None:
        """Gives the value, if the state is a single one: it has changed if that is another object."""
        ...

    def live_views(self) -> Sequence[Iterable[Any]]:
        """Views that show the state as it is now: it is unchanged if their entries are. None: ask `same`."""
        ...

    def same(self) -> bool:
        """Whether nothing has changed."""
        ...

    def restore(self) -> None:
        """Make it what it was."""
        ...


class Container:
    """A dictionary, list, set, deque or byte array: the same entries in the same order."""

    read = None

    def __init__(self, label: str, now: Any, skipped: Sequence[str] = ()) -> None:
        self.label, self.now, self.skipped = label, now, skipped
        self.before: Any = now.copy()

    def live_views(self) -> Sequence[Iterable[Any]]:
        """Keys and values, or entries. None for classes of the caller's, which may show other entries."""
        if type(self.now) in (dict, OrderedDict) and not self.skipped:
            return self.now.keys(), self.now.values()
        return (self.now,) if type(self.now) in (list, set, deque) else ()

    def same(self) -> bool:
        """Whether nothing has changed."""
        now, before = self.now, self.before
        if len(now) != len(before):
            return False
        if isinstance(now, dict):
            if not self.skipped:
                return all(map(is_, now.values(), before.values())) and all(map(is_, now, before))
            return all(now.get(key, MISSING) is entry or key in self.skipped for key, entry in before.items())
        if isinstance(now, set):
            return set(map(id, now)) == set(map(id, before))
        if isinstance(now, bytearray):
            return bool(now == before)
        return all(map(is_, now, before))

    def restore(self) -> None:
        """Make it what it was."""
        skipped = {name: self.now[name] for name in self.skipped if name in self.now}
        self.now.clear()
        (self.now.extend if isinstance(self.now, list | deque | bytearray) else self.now.update)(self.before)
        if skipped:
            self.now.update(skipped)


class ThreadLocal(Container):
    """A `threading.local`: the variables of the thread that asks."""

    def __init__(self, label: str, local: threading.local) -> None:
        self.local = local
        super().__init__(label, vars(local))

    def live_views(self) -> Sequence[Iterable[Any]]:
        """None: every thread has other variables."""
        return ()

    def same(self) -> bool:
        """Whether nothing has changed."""
        self.now = vars(self.local)
        return super().same()


class _Single:
    """A single value, which `read` gives."""

    def __init__(self, label: str, read: partial[Any]) -> None:
        self.label, self.read, self.before = label, read, read()

    def live_views(self) -> Sequence[Iterable[Any]]:
        """None: there are no entries."""
        return ()

    def same(self) -> bool:
        """Whether nothing has changed."""
        return self.read() is self.before


class Cell(_Single):
    """A closure variable of a function."""

    def __init__(self, label: str, cell: types.CellType) -> None:
        self.cell = cell
        super().__init__(label, partial(contents, cell))

    def restore(self) -> None:
        """Make it what it was."""
        if self.before is MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = self.before


class Global(_Single):
    """A global variable that a function names."""

    def __init__(self, label: str, namespace: MutableMapping[str, Any], name: str) -> None:
        self.namespace, self.name = namespace, name
        super().__init__(label, partial(namespace.get, name, MISSING))

    def restore(self) -> None:
        """Make it what it was."""
        if self.before is MISSING:
            self.namespace.pop(self.name, None)
        else:
            self.namespace[self.name] = self.before


class Slot(_Single):
    """An attribute in a slot (`__slots__`)."""

    def __init__(self, label: str, owner: Any, slot: types.MemberDescriptorType) -> None:
        self.owner, self.slot = owner, slot
        super().__init__(label, partial(_slot_value, owner, slot))

    def restore(self) -> None:
        """Make it what it was."""
        if self.before is MISSING:
            self.slot.__delete__(self.owner)
        else:
            self.slot.__set__(self.owner, self.before)  # also where the class is frozen


class Attribute(_Single):
    """A special attribute: the `__dict__` or `__class__` of an object, the `__code__` of a function."""

    def __init__(self, label: str, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        direct: dict[str, partial[Any]] = {"__class__": partial(type, owner), "__dict__": partial(vars, owner)}
        super().__init__(label, direct.get(name, partial(object.__getattribute__, owner, name)))

    def restore(self) -> None:
        """Make it what it was."""
        object.__setattr__(self.owner, self.name, self.before)  # also where the class is frozen


class ClassAttributes:
    """The attributes of one of the caller's classes or Python modules."""

    read = None

    def __init__(self, label: str, cls: type | types.ModuleType) -> None:
        self.label, self.cls, self.before = label, cls, dict(vars(cls))

    def live_views(self) -> Sequence[Iterable[Any]]:
        """Names and values."""
        return vars(self.cls).keys(), vars(self.cls).values()

    def same(self) -> bool:
        """Whether nothing has changed."""
        now, before = vars(self.cls), self.before
        if len(now) != len(before):
            return False
        return all(map(is_, now.values(), before.values())) and all(map(is_, now, before))

    def restore(self) -> None:
        """Make it what it was."""
        now = dict(vars(self.cls))
        for name in now.keys() - self.before.keys():
            delattr(self.cls, name)
        for name, entry in self.before.items():
            if now.get(name, MISSING) is not entry:
                setattr(self.cls, name, entry)


class Constant:
    """A tensor or array that training must not change: compared bit by bit, and no gradient may be left on it.

    Of a long one that is `shared` with the caller a checksum is kept, not a copy: it is refused, but not restored.
    """

    def __init__(self, label: str, now: Tensor | NDArray[Any], *, shared: bool = False) -> None:
        self.label, self.now = label, now
        self.data = now.data if shared and isinstance(now, Tensor) else None  # the caller's memory
        self.version, self.grad = (now._version, now.grad) if isinstance(now, Tensor) and now.is_leaf else (0, None)
        plain = not isinstance(now, Tensor) or (now.layout == torch.strided and now.device.type != "meta")
        # Quantised weights may be of a class that hides its bytes: only their version is compared.
        plain = plain and (not shared or type(now) in (Tensor, torch.nn.Parameter))
        long = shared and now.nbytes > SHORT
        self.before = _copy(now) if plain and not long and now.nbytes <= _COPIED else None
        self.checksum = checksum(now) if plain and long and isinstance(now, Tensor) else None
        # Compared after every user: short values in CPU memory, where that costs next to nothing.
        self._checked_per_user = (
            plain and now.nbytes <= SHORT and (isinstance(now, np.ndarray) or now.device.type == "cpu")
        )

    @property
    def lost(self) -> bool:
        """Whether a change cannot be undone."""
        return self.checksum is not None

    def touched(self) -> bool:
        """Whether a quick check shows a change (version counter, gradient, short values); `same` compares all."""
        if isinstance(self.now, Tensor) and self.now.is_leaf:
            if self.now.grad is not self.grad:
                return True
            if self.now._version == self.version and not self._checked_per_user:
                return False
        elif not self._checked_per_user:
            return False
        return not self.same()

    def same(self) -> bool:
        """Whether nothing has changed."""
        now, before = self.now, self.before
        if isinstance(now, Tensor):
            if torch._C._functorch.is_functorch_wrapped_tensor(now):  # left behind by vmap
                return False
            if now.is_leaf and now.grad is not self.grad:
                return False
        if before is None:
            same_version = not isinstance(now, Tensor) or not now.is_leaf or now._version == self.version
            return same_version and (self.checksum is None or self._same_checksum())
        if now.shape != before.shape or now.dtype != before.dtype:
            return False
        if isinstance(now, np.ndarray):
            return now.dtype.hasobject or now.tobytes() == before.tobytes()
        return torch.equal(_bits(now), _bits(before))

    def _same_checksum(self) -> bool:
        assert isinstance(self.now, Tensor)
        assert self.data is not None
        here = self.now.data_ptr() == self.data.data_ptr()
        same_form = self.now.shape == self.data.shape and self.now.dtype == self.data.dtype
        return here and same_form and checksum(self.now) == self.checksum

    def restore(self) -> None:
        """Make it what it was; what is shared, in the caller's memory."""
        if isinstance(self.now, np.ndarray):
            if self.before is not None and self.now.flags.writeable:
                self.now[...] = self.before
            return
        if self.now.is_leaf:
            self.now.grad = self.grad
        if self.data is not None:
            if self.before is not None:
                self.data.copy_(self.before)
            self.now.data = self.data
            self.version = self.now._version
        elif self.before is not None and not self.same():
            self.now.data = self.before.clone()
            self.version = self.now._version


def checksum(values: Tensor) -> int:
    """64 bits of the values: a sum of their bytes as whole numbers, each times an odd number of its place."""
    bits = _bits(values)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    weights = torch.arange(1, _CHUNK, 4, device=bits.device) * -0x61C8864680B583EB
    for number, start in enumerate(range(0, len(bits), _CHUNK)):
        words = torch.nn.functional.pad(bits[start : start + _CHUNK], (0, -len(bits[start : start + _CHUNK]) % 8))
        words = words.clone().view(torch.int64) if words.storage_offset() % 8 else words.view(torch.int64)
        total += (words * weights[: len(words)]).sum() * (2 * number + 1)
    return int(total)


def _bits(values: Tensor) -> Tensor:
    """The values as bytes, so that NaN equals itself and 0 differs from -0."""
    return values.detach().contiguous().reshape(-1).view(torch.uint8)


def _copy(values: Any) -> Any:
    return values.copy() if isinstance(values, np.ndarray) else values.detach().clone()


def contents(cell: types.CellType) -> Any:
    """The value of a closure cell; `MISSING` if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _slot_value(owner: Any, slot: types.MemberDescriptorType) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:
        return MISSING


def only_equal_values(snapshot: Snapshot) -> bool:
    """Whether only numbers and strings were replaced, by equal ones, as when a module sets the same size again."""
    if (
        not isinstance(snapshot, Container)
        or not isinstance(snapshot.now, dict)
        or snapshot.now.keys() != snapshot.before.keys()
    ):
        return False
    pairs = ((snapshot.now[key], entry) for key, entry in snapshot.before.items() if snapshot.now[key] is not entry)
    return all(isinstance(now, VALUES) and type(now) is type(then) and now == then for now, then in pairs)
