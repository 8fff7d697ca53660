"""Things that can change, as they were: containers, attributes, closures, global variables, tensors.

Each says whether it is still the same, and can be put back.
"""

from __future__ import annotations

import threading
import types
from collections import deque
from collections.abc import MutableMapping, Sequence
from operator import is_
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

VALUES = (int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device, torch.Size)
MISSING = object()
_SHORT = 1 << 16  # bytes
_COPIED = 1 << 26  # bytes: of larger tensors only torch's count of changes is compared, larger arrays are not looked at


class Kept(Protocol):
    """Something mutable, as it was."""

    label: str

    def same(self) -> bool:
        """Whether nothing has changed."""
        ...

    def restore(self) -> None:
        """Make it what it was."""
        ...


class Container:
    """A dictionary, list, set, deque or byte array: the same entries in the same order."""

    def __init__(self, label: str, now: Any, skipped: Sequence[str] = ()) -> None:
        self.label, self.now, self.skipped = label, now, skipped
        self.before: Any = now.copy()

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
    """Variables that every thread has its own of: those of the thread that asks."""

    def __init__(self, label: str, local: threading.local) -> None:
        self.local = local
        super().__init__(label, vars(local))

    def same(self) -> bool:
        """Whether nothing has changed."""
        self.now = vars(self.local)
        return super().same()


class Cell:
    """A variable that a function has from where it was made."""

    def __init__(self, label: str, cell: types.CellType) -> None:
        self.label, self.cell, self.before = label, cell, contents(cell)

    def same(self) -> bool:
        """Whether nothing has changed."""
        return contents(self.cell) is self.before

    def restore(self) -> None:
        """Make it what it was."""
        if self.before is MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = self.before


class Global:
    """A global variable that a function names."""

    def __init__(self, label: str, namespace: MutableMapping[str, Any], name: str) -> None:
        self.label, self.namespace, self.name = label, namespace, name
        self.before = namespace.get(name, MISSING)

    def same(self) -> bool:
        """Whether nothing has changed."""
        return self.namespace.get(self.name, MISSING) is self.before

    def restore(self) -> None:
        """Make it what it was."""
        if self.before is MISSING:
            self.namespace.pop(self.name, None)
        else:
            self.namespace[self.name] = self.before


class Slot:
    """An attribute of an object without a dictionary."""

    def __init__(self, label: str, owner: Any, slot: types.MemberDescriptorType) -> None:
        self.label, self.owner, self.slot = label, owner, slot
        self.before = self._now()

    def _now(self) -> Any:
        try:
            return self.slot.__get__(self.owner)
        except AttributeError:
            return MISSING

    def same(self) -> bool:
        """Whether nothing has changed."""
        return self._now() is self.before

    def restore(self) -> None:
        """Make it what it was."""
        if self.before is MISSING:
            self.slot.__delete__(self.owner)
        else:
            self.slot.__set__(self.owner, self.before)  # past what a frozen class forbids


class ClassAttributes:
    """The attributes of a class or a module of the caller's."""

    def __init__(self, label: str, cls: type | types.ModuleType) -> None:
        self.label, self.cls, self.before = label, cls, dict(vars(cls))

    def same(self) -> bool:
        """Whether nothing has changed."""
        now = vars(self.cls)
        return len(now) == len(self.before) and all(map(is_, now.values(), self.before.values()))

    def restore(self) -> None:
        """Make it what it was."""
        now = dict(vars(self.cls))
        for name in now.keys() - self.before.keys():
            delattr(self.cls, name)
        for name, entry in self.before.items():
            if now.get(name, MISSING) is not entry:
                setattr(self.cls, name, entry)


class Constant:
    """A tensor or array that training must not change: to the last bit, and without a gradient left behind."""

    def __init__(self, label: str, now: Tensor | NDArray[Any]) -> None:
        self.label, self.now = label, now
        self.version, self.grad = (now._version, now.grad) if isinstance(now, Tensor) and now.is_leaf else (0, None)
        plain = not isinstance(now, Tensor) or (now.layout == torch.strided and now.device.type != "meta")
        self.before = _copied(now) if plain and now.nbytes <= _COPIED else None
        # Looked at after every user: what is short, and lies where looking costs nothing.
        self._short = plain and now.nbytes <= _SHORT and (isinstance(now, np.ndarray) or now.device.type == "cpu")

    def touched(self) -> bool:
        """Whether it was changed, as far as is seen at once; `same` looks at everything."""
        if isinstance(self.now, Tensor) and self.now.is_leaf:
            if self.now.grad is not self.grad:
                return True
            if self.now._version == self.version and not self._short:
                return False
        elif not self._short:
            return False
        return not self.same()

    def same(self) -> bool:
        """Whether nothing has changed."""
        now, before = self.now, self.before
        if isinstance(now, Tensor):
            if torch._C._functorch.is_functorch_wrapped_tensor(now):  # left by a stack of users
                return False
            if now.is_leaf and now.grad is not self.grad:
                return False
        if before is None:
            return not isinstance(now, Tensor) or not now.is_leaf or now._version == self.version
        if now.shape != before.shape or now.dtype != before.dtype:
            return False
        if isinstance(now, np.ndarray):
            return now.dtype.hasobject or now.tobytes() == before.tobytes()
        return torch.equal(_bits(now), _bits(before))

    def restore(self) -> None:
        """Make it what it was."""
        if isinstance(self.now, np.ndarray):
            if self.before is not None and self.now.flags.writeable:
                self.now[...] = self.before
            return
        if self.now.is_leaf:
            self.now.grad = self.grad
        if self.before is not None and not self.same():
            self.now.data = self.before.clone()
            self.version = self.now._version


def _bits(values: Tensor) -> Tensor:
    """As bytes: NaN is like itself, and 0 is not -0."""
    return values.detach().contiguous().reshape(-1).view(torch.uint8)


def _copied(values: Any) -> Any:
    return values.copy() if isinstance(values, np.ndarray) else values.detach().clone()


def contents(cell: types.CellType) -> Any:
    """What is in it; `MISSING` where nothing is yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def only_equal_values(kept: Kept) -> bool:
    """Whether all that differs are numbers and text, and those are equal: a module may well set the same size again."""
    if not isinstance(kept, Container) or not isinstance(kept.now, dict) or kept.now.keys() != kept.before.keys():
        return False
    pairs = ((kept.now[key], entry) for key, entry in kept.before.items() if kept.now[key] is not entry)
    return all(isinstance(now, VALUES) and type(now) is type(then) and now == then for now, then in pairs)
