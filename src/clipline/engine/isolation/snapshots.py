"""Snapshots of mutable state: containers, attributes, closures, global variables. `constants` has those of tensors.

Each can tell whether the state has changed, and restore it.
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Iterable, MutableMapping, Sequence
from functools import partial
from operator import is_
from typing import Any, Protocol

import torch

VALUES = (int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device, torch.Size)
MISSING = object()


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


_KINDS = (OrderedDict, dict, list, set, deque, bytearray)


class Container:
    """A dictionary, list, set, deque or byte array: the same entries in the same order.

    Read and written by the methods of these types themselves: a class derived from one may show something else than it
    holds, as a dictionary of classes that hands out instances does.
    """

    read = None

    def __init__(self, label: str, now: Any, skipped: Sequence[str] = ()) -> None:
        self.label, self.now, self.skipped = label, now, skipped
        self.kind: Any = next(kind for kind in _KINDS if isinstance(now, kind))
        self.before: Any = self.kind(self.entries())

    def entries(self) -> Iterable[Any]:
        """What it holds, of a dictionary pairs."""
        entries: Any = self.kind.items if issubclass(self.kind, dict) else self.kind.__iter__
        return list(entries(self.now))

    def live_views(self) -> Sequence[Iterable[Any]]:
        """Keys and values, or entries. None for classes of the caller's, which may show other entries."""
        if type(self.now) in (dict, OrderedDict) and not self.skipped:
            return self.now.keys(), self.now.values()
        return (self.now,) if type(self.now) in (list, set, deque) else ()

    def same(self) -> bool:
        """Whether nothing has changed."""
        now, before, kind = self.now, self.before, self.kind
        if kind.__len__(now) != len(before):
            return False
        if issubclass(kind, dict):
            if not self.skipped:
                return all(map(is_, kind.values(now), before.values())) and all(map(is_, kind.__iter__(now), before))
            return all(kind.get(now, key, MISSING) is entry or key in self.skipped for key, entry in before.items())
        if kind is set:
            return set(map(id, kind.__iter__(now))) == set(map(id, before))
        if kind is bytearray:
            return bool(kind.__eq__(now, before))
        return all(map(is_, kind.__iter__(now), before))

    def restore(self) -> None:
        """Make it what it was."""
        now, kind = self.now, self.kind
        skipped = {name: kind.__getitem__(now, name) for name in self.skipped if kind.__contains__(now, name)}
        kind.clear(now)
        (kind.extend if kind in (list, deque, bytearray) else kind.update)(now, self.before)
        if skipped:
            kind.update(now, skipped)


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


class ClosureCell(_Single):
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


def contents(cell: types.CellType) -> Any:
    """The value of a closure cell; `MISSING` if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def only_equal_values(snapshot: Snapshot) -> bool:
    """Whether only numbers and strings were replaced, by equal ones, as when a module sets the same size again."""
    if not isinstance(snapshot, Container) or not issubclass(snapshot.kind, dict):
        return False
    now, before = dict(snapshot.entries()), snapshot.before
    if now.keys() != before.keys():
        return False
    pairs = ((now[key], entry) for key, entry in before.items() if now[key] is not entry)
    return all(isinstance(one, VALUES) and type(one) is type(then) and one == then for one, then in pairs)
