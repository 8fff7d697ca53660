"""Finds all mutable state that a model and its loss can reach, and takes a snapshot of it.

Found are: attributes of modules and of objects of the caller's own classes, class attributes, hooks, functions with
their closures, defaults and the global variables that they name; also functions that a library has wrapped, as
`torch.no_grad()` does. That is where people keep state by mistake. What only code does that means to hide it is not
looked for: see "The premise" in docs/guarantees.md.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
import weakref
from collections import ChainMap, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ModuleError
from ..core.user_random import UserRandom
from .constants import Constant
from .generators import beginning
from .packages import add_caller, from_installed, installed
from .snapshots import (
    MISSING,
    VALUES,
    Attribute,
    ClassAttributes,
    ClosureCell,
    Container,
    Global,
    Snapshot,
    contents,
)  # fmt: skip

_NOT_STATE = frozenset(
    [
        "__dict__",
        "__weakref__",
        "__doc__",
        "__module__",
        "__slots__",
        "__annotations__",
        "__builtins__",
        "__loader__",
        "__spec__",
        "__file__",
        "__cached__",
        "__name__",
        "__package__",
        "__path__",
        "__qualname__",
        "__abstractmethods__",
        "_abc_impl",
        "__orig_bases__",
    ]
)
# Containers written in Python: what they hold is in their attributes.
_IN_PYTHON = (
    *(UserDict, UserList, ChainMap, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
    *(torch.optim.Optimizer, torch.quasirandom.SobolEngine),
)
_MAX_PER_USER = 4096  # entries: larger containers are compared once a block, not after every user
_GLOBAL = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL")
_STRUCTURE = ("_parameters", "_buffers", "_modules")  # the dictionaries of a module whose change is refused


@dataclass(eq=False)
class MutableState:
    """Snapshots of what was found, by how they are checked."""

    structure: list[Container] = field(default_factory=list)  # the parts of modules: changes are refused
    restorable: list[Snapshot] = field(default_factory=list)  # restored after each user
    large_containers: list[Snapshot] = field(default_factory=list)  # compared once a block
    empty_containers: list[Any] = field(default_factory=list)  # most are hook dictionaries: a quick check for all
    empty_labels: list[str] = field(default_factory=list)  # of these
    constants: list[Constant] = field(default_factory=list)  # tensors and arrays that must not change
    counted: list[Tensor] = field(default_factory=list)  # all tensors whose changes torch counts, trainable ones too
    caches: list[Any] = field(default_factory=list)  # of `functools.lru_cache`: emptied after each user
    reseeders: list[Callable[[int], object]] = field(default_factory=list)  # of generators that the model holds


def find_mutable_state(
    module: nn.Module, loss: Callable[..., Any], trainable: Iterable[Tensor], shared: Iterable[Tensor] = ()
) -> MutableState:
    """A snapshot of all that can be reached; the values of `trainable` parameters are left out.

    Of long tensors that are `shared` with the caller no copy is made.
    """
    add_caller(loss)
    walk = _Walk(module, trainable, shared)
    try:
        walk.visit(module, "model")
        walk.visit(loss, "loss")
    except RecursionError:
        raise ModuleError("model or loss holds lists or objects nested too deeply to look into: flatten them") from None
    return walk.found


class _Walk:
    def __init__(self, module: nn.Module, trainable: Iterable[Tensor], shared: Iterable[Tensor]) -> None:
        self.found = MutableState()
        self._seen: dict[int, object] = {}
        self._trainable_ids = {id(param) for param in trainable}
        self._shared_ids = {id(tensor) for tensor in shared}
        self._key_ids = {id(part.key) for part in module.modules() if isinstance(part, UserRandom)}

    def visit(self, value: Any, label: str) -> None:
        """Snapshot everything mutable that can be reached from `value`."""
        callers_class = _has_callers_class(value)
        if (isinstance(value, VALUES) and not callers_class) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # kept alive, so that no other object gets its id
        looked_into = (Tensor, nn.Module, type)  # below, with all attributes
        if isinstance(value, _IN_PYTHON) or (callers_class and not isinstance(value, looked_into)):
            self._visit_object(value, label)  # a class of the caller's may add attributes, whatever it derives from
        if isinstance(value, Tensor):
            self._visit_tensor(value, label)
        elif isinstance(value, nn.Module):
            self._visit_module(value, label)
        elif isinstance(value, np.ndarray):
            self.found.constants.append(Constant(label, value))
            for entry in value.ravel().tolist() if value.dtype.hasobject else ():
                self.visit(entry, label)
            if not callers_class and hasattr(value, "__dict__"):  # the mask of a masked array
                self._visit_object(value, label)
        elif isinstance(value, weakref.ref):
            self.visit(value(), label)
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            if not isinstance(value.__self__, types.ModuleType):
                self.visit(value.__self__, label)
        elif isinstance(value, functools.cached_property | functools.partialmethod):
            self.visit(value.func, label)
        elif (reseed := beginning(value)) is not None:
            self.found.reseeders.append(reseed)
        elif isinstance(value, dict | list | set | deque | bytearray | types.SimpleNamespace):
            inside = vars(value) if isinstance(value, types.SimpleNamespace) else value
            held = Container(label, inside)
            self._add(held)
            if isinstance(value, defaultdict):
                self.visit(value.default_factory, f"{label}.default_factory")
            # What it holds: a class derived from these may show other entries, or import them one by one and fail.
            for one in held.entries():
                key, entry = one if isinstance(inside, dict) else (None, one)
                self.visit(key, label)
                self.visit(entry, f"{label}[{key!r}]" if isinstance(inside, dict) else label)
        elif isinstance(value, tuple | frozenset):
            for entry in value:
                self.visit(entry, label)
        elif isinstance(value, functools.partial):
            for entry in (value.func, value.args, value.keywords, vars(value)):
                self.visit(entry, label)
        elif isinstance(value, types.MethodType):
            self.visit(value.__self__, label)
            self.visit(value.__func__, label)
        elif isinstance(value, staticmethod | classmethod):
            self.visit(value.__func__, label)
        elif isinstance(value, property):
            for function in (value.fget, value.fset, value.fdel):
                self.visit(function, label)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.found.caches.append(value)
            self.visit(vars(value), label)  # the function in it too
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, label)
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, types.ModuleType):
            if not from_installed(value.__name__):
                self.found.restorable.append(ClassAttributes(label, value))
                for name, entry in list(vars(value).items()):
                    if name not in _NOT_STATE:
                        self.visit(entry, f"{value.__name__}.{name}")
        elif hasattr(type(value), "__next__"):
            raise ModuleError(
                f"{label} is {_article(type(value).__name__)}, which cannot begin anew for every user: keep a list and "
                "an index, or a random generator"
            )
        elif not callers_class:
            for entry in _callables(list(getattr(value, "__dict__", {}).values())):
                self.visit(entry, label)

    def _add(self, snapshot: Container) -> None:
        """Put a container into the list by which it is checked."""
        size = len(snapshot.before)
        if snapshot.label.rpartition(".")[2] in _STRUCTURE:
            self.found.structure.append(snapshot)
        elif size == 0 and type(snapshot.now) is snapshot.kind:  # a class derived from it may say that it is empty
            self.found.empty_containers.append(snapshot.now)
            self.found.empty_labels.append(snapshot.label)
        else:
            (self.found.large_containers if size > _MAX_PER_USER else self.found.restorable).append(snapshot)

    def _add_special(self, label: str, owner: Any, *names: str) -> None:
        """Before the contents of a `__dict__`, so that these are restored in the right one."""
        self.found.restorable += [Attribute(label, owner, name) for name in names]

    def _visit_tensor(self, value: Tensor, label: str) -> None:
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            return  # left behind by vmap, and of no use to anybody: torch refuses whatever is done with it
        shared = id(value) in self._shared_ids
        if not value.is_inference():
            self.found.counted.append(value)
        if id(value) not in self._trainable_ids and id(value) not in self._key_ids:
            self.found.constants.append(Constant(label, value, shared=shared))
        self._add_special(label, value, "__class__", "__dict__")
        self._add(Container(label, vars(value)))
        for name, entry in list(vars(value).items()):
            if shared and isinstance(entry, Tensor):  # what a quantised tensor is made of
                self._shared_ids.add(id(entry))
            self.visit(entry, f"{label}.{name}")
        self.visit(type(value), label)
        for hooks in (value._backward_hooks, value._post_accumulate_grad_hooks):
            self.visit(hooks, f"a hook on {label}")

    def _visit_module(self, module: nn.Module, label: str) -> None:
        skipped = ("draws",) if isinstance(module, UserRandom) else ()  # set by the engine
        self._add_special(label, module, "__class__", "__dict__")
        self._add(Container(label, vars(module), skipped))
        for name, entry in list(vars(module).items()):
            if name in _STRUCTURE:
                self._add(Container(f"{label}.{name}", entry))
                for key, part in entry.items():
                    self.visit(part, f"{label}.{key}")
            elif name not in skipped:
                self.visit(entry, f"{label}.{name}")
        self.visit(type(module), label)

    def _visit_function(self, function: types.FunctionType, label: str) -> None:
        if installed(function):  # it may be what a library made of the caller's, as `torch.no_grad()` does
            for entry in _callables([*map(contents, function.__closure__ or ()), *vars(function).values()]):
                self.visit(entry, label)
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.found.restorable.append(ClosureCell(f"{name!r} in {function.__qualname__}", cell))
            self.visit(contents(cell), f"{name!r} in {function.__qualname__}")
        self._add_special(label, function, "__dict__", "__code__", "__defaults__", "__kwdefaults__")
        self._add(Container(f"attributes of {function.__qualname__}", function.__dict__))
        for entry in (function.__defaults__, function.__kwdefaults__, function.__dict__):
            self.visit(entry, f"{function.__qualname__}")
        for name in _names(function.__code__):
            entry = function.__globals__.get(name, MISSING)
            if entry is MISSING and hasattr(builtins, name):
                continue
            self.found.restorable.append(Global(f"global variable {name!r}", function.__globals__, name))
            if entry is not MISSING:
                self.visit(entry, f"global variable {name!r}")

    def _visit_class(self, kind: type) -> None:
        for cls in kind.__mro__:
            if not installed(cls) and (cls is kind or id(cls) not in self._seen):
                self._seen[id(cls)] = cls
                self.found.restorable.append(ClassAttributes(f"class {cls.__qualname__}", cls))
                for name, entry in list(vars(cls).items()):
                    if name not in _NOT_STATE:
                        self.visit(entry, f"{cls.__qualname__}.{name}")

    def _visit_object(self, value: Any, label: str) -> None:
        self._add_special(label, value, "__class__")
        if hasattr(value, "__dict__"):
            self._add_special(label, value, "__dict__")
            self._add(Container(label, vars(value)))
            for name, entry in list(vars(value).items()):
                self.visit(entry, f"{label}.{name}")
        self.visit(type(value), label)


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    """Of global variables in a function and in functions defined inside it."""
    own = {str(one.argval) for one in dis.get_instructions(code) if one.opname in _GLOBAL}
    inside = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(own).union(*inside)


def _callables(held: Iterable[Any]) -> Iterator[Any]:
    """The functions among what an object of a library holds, also in a dictionary, as that of `singledispatch`."""
    kinds = (types.FunctionType, types.MethodType, functools.partial, functools._lru_cache_wrapper)
    for one in held:
        inside = list(one.values()) if isinstance(one, dict | types.MappingProxyType) else [one]
        yield from (entry for entry in inside if isinstance(entry, kinds) or not installed(type(entry)))


def _has_callers_class(value: Any) -> bool:
    """Whether the value's class, or one that it derives from, is the caller's."""
    return not all(map(installed, type(value).__mro__))


def _article(word: str) -> str:
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"
