"""Keeps users apart: state that a model and its loss could carry from one user to the next is restored or refused.

The accounting needs every user's update to be a function of the round's parameters and that user's own examples. A
module can break this in many ways: it may replace a parameter by another tensor, append to a list, count its calls,
keep the last batch in an attribute, a closure or a global variable, or hold a generator that users share.
"""

from __future__ import annotations

import builtins
import copy
import dis
import functools
import random
import sys
import sysconfig
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ModuleError
from ..user_random import UserRandom
from .generators import beginning
from .snapshots import (
    MISSING,
    VALUES,
    Cell,
    ClassAttributes,
    Constant,
    Container,
    Global,
    Slot,
    Snapshot,
    ThreadLocal,
    contents,
    only_equal_values,
)  # fmt: skip

_TRUSTED = {"clipline", "torch", "numpy", "triton", *sys.stdlib_module_names} - {"__main__"}
_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
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
_MAX_PER_USER = 4096  # entries: larger containers are compared once a block, not after every user
_STRUCTURE = ("_parameters", "_buffers", "_modules")  # the dictionaries of a module whose change is refused


class IsolationError(ModuleError):
    """State of one user would have reached the next. The run ends before anything of the round is released."""


class Isolation:
    """A snapshot of all mutable state that `module` (a working copy) and `loss` can reach.

    `after_user` restores plain attributes, containers, closures and global variables, so that every user finds the
    model as the caller gave it, and refuses other changes. `seed` reseeds NumPy's and Python's global generators, and
    those that the model holds, with a user's own key. Found are: attributes of modules and of objects of the caller's
    own classes, class attributes, hooks, functions with their closures, defaults and the global variables that they
    name. Not found is state inside library objects, in files or in other processes.
    """

    def __init__(self, module: nn.Module, loss: Callable[..., Any], trainable: Mapping[str, nn.Parameter]) -> None:
        self._module, self._loss = module, loss
        self._trainable = dict(trainable)
        self._snapshot_all()

    def _snapshot_all(self) -> None:
        self._layouts = [_layout(param) for param in self._trainable.values()]
        self._data = [param.data for param in self._trainable.values()]  # keeps the memory alive
        self._structure: list[Snapshot] = []  # changes are refused
        self._restorable: list[Snapshot] = []  # restored after each user
        self._large_containers: list[Snapshot] = []
        self._empty_containers: list[Any] = []  # most are hook dictionaries: a quick check for all at once
        self._empty_labels: list[str] = []  # of these
        self._constants: list[Constant] = []
        self._dtype = torch.get_default_dtype()
        self._caches: list[Any] = []
        self._reseeders: list[Callable[[int], object]] = []
        self._seen: dict[int, object] = {}
        trainable_ids = {id(param) for param in self._trainable.values()}
        self._key_ids = {id(part.key) for part in self._module.modules() if isinstance(part, UserRandom)}
        try:
            self._visit(self._module, "model", trainable_ids)
            self._visit(self._loss, "loss", trainable_ids)
        except RecursionError:
            raise ModuleError(
                "model or loss holds lists or objects nested too deeply to look into: flatten them"
            ) from None
        self._seen.clear()

    def before_block(self) -> None:
        """Take a new snapshot if the caller changed something since the last block, a temperature for instance."""
        if any(self._empty_containers) or not all(
            snapshot.same() for snapshot in (*self._restorable, *self._large_containers)
        ):
            self._snapshot_all()

    def seed(self, key: int) -> None:
        """Reseed every generator that users would otherwise share with this key."""
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 (the model's choice, not ours)
        for reseed in self._reseeders:
            reseed(key)

    def after_user(self) -> str:
        """Restore the state and name something that had changed, or give ""; refuse changed parameters or parts."""
        refused, leftover = self._replaced(), ""
        for snapshot in self._restorable:
            if not snapshot.same():
                leftover = leftover or ("" if only_equal_values(snapshot) else snapshot.label)
                snapshot.restore()
        if any(self._empty_containers):
            leftover = leftover or next(
                label for label, container in zip(self._empty_labels, self._empty_containers, strict=True) if container
            )
            for container in self._empty_containers:
                container.clear()
        for cache in self._caches:
            cache.cache_clear()
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        refused = refused or next((_changed(one, self._module) for one in self._constants if one.touched()), "")
        if refused:
            self._restore_all()
            raise IsolationError(refused)
        return leftover

    def after_block(self) -> None:
        """Refuse changes that are too costly to check after every user: of buffers, frozen parameters, large lists."""
        for snapshot in self._large_containers:
            if not snapshot.same():
                snapshot.restore()
                raise IsolationError(_remembered(snapshot.label))
        for constant in self._constants:
            if not constant.same():
                constant.restore()
                raise IsolationError(_changed(constant, self._module))

    def after_stack(self) -> None:
        """After a block of stacked users. Any change is refused, as it cannot be attributed to one user."""
        leftover = self.after_user()
        self.after_block()
        if leftover:
            raise IsolationError(_remembered(leftover, together=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> Isolation:
        """A snapshot of the copied module."""
        module, loss = copy.deepcopy(self._module, memo), copy.deepcopy(self._loss, memo)
        return Isolation(module, loss, copy.deepcopy(self._trainable, memo))

    def _replaced(self) -> str:
        """An error message if a parameter has other memory, or the model other parts; else ""."""
        for (name, param), layout in zip(self._trainable.items(), self._layouts, strict=True):
            if _layout(param) != layout:
                return (
                    f"parameter {name!r} of the model was replaced, or given other memory, while a user trained, and "
                    "would carry that user's weights to the next: write into it in place under torch.no_grad(), or "
                    "compute from it without assigning"
                )
            if param.grad is not None or not param.requires_grad:
                what = "has a gradient left behind" if param.grad is not None else "no longer requires a gradient"
                return (
                    f"parameter {name!r} of the model {what} after a user trained, and would carry it to the next: "
                    "return the loss and leave the backward pass and requires_grad alone"
                )
        for snapshot in self._structure:
            if not snapshot.same():
                assert isinstance(snapshot, Container)
                return _changed_structure(snapshot)
        return ""

    def _restore_all(self) -> None:
        """Undo the refused changes, so that the caller's next attempt starts with the model as given."""
        for snapshot in self._structure:
            snapshot.restore()
        for constant in self._constants:
            constant.restore()
        for param, data in zip(self._trainable.values(), self._data, strict=True):
            param.grad = None
            param.data = data
            param.requires_grad_()
            param._backward_hooks = None

    def _visit(self, value: Any, label: str, trainable_ids: set[int]) -> None:
        """Snapshot everything mutable that can be reached from `value`."""
        callers_class = not _installed(type(value))
        if (isinstance(value, VALUES) and not callers_class) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # kept alive, so that no other object gets its id
        if callers_class and isinstance(value, (*VALUES, dict, list, set, tuple, deque)):
            self._visit_object(value, label, trainable_ids)  # a class of the caller's may add attributes
        if isinstance(value, Tensor):
            self._visit_tensor(value, label, trainable_ids)
        elif isinstance(value, nn.Module):
            self._visit_module(value, label, trainable_ids)
        elif isinstance(value, np.ndarray):
            self._constants.append(Constant(label, value))
            for entry in value.ravel().tolist() if value.dtype.hasobject else ():
                self._visit(entry, label, trainable_ids)
        elif isinstance(value, weakref.ref):
            self._visit(value(), label, trainable_ids)
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            if not isinstance(value.__self__, types.ModuleType):
                self._visit(value.__self__, label, trainable_ids)
        elif isinstance(value, functools.cached_property | functools.partialmethod):
            self._visit(value.func, label, trainable_ids)
        elif (reseed := beginning(value)) is not None:
            self._reseeders.append(reseed)
        elif isinstance(value, dict | list | set | deque | bytearray | types.SimpleNamespace):
            inside = vars(value) if isinstance(value, types.SimpleNamespace) else value
            self._add(Container(label, inside))
            named = inside.items() if isinstance(inside, dict) else enumerate(inside)
            for key, entry in list(named):
                self._visit(entry, f"{label}[{key!r}]" if isinstance(inside, dict) else label, trainable_ids)
        elif isinstance(value, threading.local):
            self._restorable.append(ThreadLocal(label, value))
            for name, entry in list(vars(value).items()):
                self._visit(entry, f"{label}.{name}", trainable_ids)
        elif isinstance(value, tuple | frozenset):
            for entry in value:
                self._visit(entry, label, trainable_ids)
        elif isinstance(value, functools.partial):
            for entry in (value.func, value.args, value.keywords):
                self._visit(entry, label, trainable_ids)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, label, trainable_ids)
            self._visit(value.__func__, label, trainable_ids)
        elif isinstance(value, staticmethod | classmethod):
            self._visit(value.__func__, label, trainable_ids)
        elif isinstance(value, property):
            for function in (value.fget, value.fset):
                self._visit(function, label, trainable_ids)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._caches.append(value)
            self._visit(value.__wrapped__, label, trainable_ids)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, label, trainable_ids)
        elif isinstance(value, type):
            self._visit_class(value, trainable_ids)
        elif isinstance(value, types.ModuleType):
            if not _from_installed(value.__name__):
                self._restorable.append(ClassAttributes(label, value))
                for name, entry in list(vars(value).items()):
                    if name not in _NOT_STATE:
                        self._visit(entry, f"{value.__name__}.{name}", trainable_ids)
        elif hasattr(type(value), "__next__"):
            raise ModuleError(
                f"{label} is {_article(type(value).__name__)}, which cannot begin anew for every user: keep a list and "
                "an index, or a random generator"
            )
        elif not _installed(type(value)):
            self._visit_object(value, label, trainable_ids)

    def _add(self, snapshot: Container) -> None:
        """Put a container into the list by which it is checked."""
        if snapshot.label.rpartition(".")[2] in _STRUCTURE:
            self._structure.append(snapshot)
        elif len(snapshot.now) == 0 and type(snapshot.now) is not types.MappingProxyType:
            self._empty_containers.append(snapshot.now)
            self._empty_labels.append(snapshot.label)
        else:
            (self._large_containers if len(snapshot.now) > _MAX_PER_USER else self._restorable).append(snapshot)

    def _visit_tensor(self, value: Tensor, label: str, trainable_ids: set[int]) -> None:
        if id(value) not in trainable_ids and id(value) not in self._key_ids:
            self._constants.append(Constant(label, value))
        self._add(Container(label, vars(value)))
        self._visit(value._backward_hooks, f"a hook on {label}", trainable_ids)

    def _visit_module(self, module: nn.Module, label: str, trainable_ids: set[int]) -> None:
        skipped = ("draws",) if isinstance(module, UserRandom) else ()  # set by the engine
        self._add(Container(label, vars(module), skipped))
        for name, entry in list(vars(module).items()):
            if name in _STRUCTURE:
                self._add(Container(f"{label}.{name}", entry))
                for key, part in entry.items():
                    self._visit(part, f"{label}.{key}", trainable_ids)
            elif name not in skipped:
                self._visit(entry, f"{label}.{name}", trainable_ids)
        self._visit_slots(module, label, trainable_ids)
        self._visit(type(module), label, trainable_ids)

    def _visit_function(self, function: types.FunctionType, label: str, trainable_ids: set[int]) -> None:
        if _installed(function):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._restorable.append(Cell(f"{name!r} in {function.__qualname__}", cell))
            self._visit(contents(cell), f"{name!r} in {function.__qualname__}", trainable_ids)
        self._add(Container(f"attributes of {function.__qualname__}", function.__dict__))
        for entry in (function.__defaults__, function.__kwdefaults__, function.__dict__):
            self._visit(entry, f"{function.__qualname__}", trainable_ids)
        for name in _global_names(function.__code__):
            entry = function.__globals__.get(name, MISSING)
            if entry is MISSING and hasattr(builtins, name):
                continue
            self._restorable.append(Global(f"global variable {name!r}", function.__globals__, name))
            if entry is not MISSING:
                self._visit(entry, f"global variable {name!r}", trainable_ids)
        for name in _imported_names(function.__code__):
            self._visit(sys.modules.get(name), f"module {name}", trainable_ids)

    def _visit_class(self, kind: type, trainable_ids: set[int]) -> None:
        metaclass: type = type(kind)
        for cls in (*kind.__mro__, *metaclass.__mro__):
            if not _installed(cls) and (cls is kind or id(cls) not in self._seen):
                self._seen[id(cls)] = cls
                self._restorable.append(ClassAttributes(f"class {cls.__qualname__}", cls))
                for name, entry in list(vars(cls).items()):
                    if name not in _NOT_STATE:
                        self._visit(entry, f"{cls.__qualname__}.{name}", trainable_ids)

    def _visit_object(self, value: Any, label: str, trainable_ids: set[int]) -> None:
        if hasattr(value, "__dict__"):
            self._add(Container(label, vars(value)))
            for name, entry in list(vars(value).items()):
                self._visit(entry, f"{label}.{name}", trainable_ids)
        self._visit_slots(value, label, trainable_ids)
        self._visit(type(value), label, trainable_ids)

    def _visit_slots(self, value: Any, label: str, trainable_ids: set[int]) -> None:
        for cls in type(value).__mro__:
            for name, slot in vars(cls).items() if not _installed(cls) else ():
                if isinstance(slot, types.MemberDescriptorType):
                    self._restorable.append(Slot(f"{label}.{name}", value, slot))
                    self._visit(self._restorable[-1].before, f"{label}.{name}", trainable_ids)  # type: ignore[attr-defined]


def _layout(param: Tensor) -> tuple[object, ...]:
    """Address, shape and strides of a parameter, and the number of hooks on its gradient."""
    return param.data_ptr(), param.shape, param.stride(), len(param._backward_hooks or ())


def _instruction_names(code: types.CodeType, *kinds: str) -> Iterator[str]:
    """The names in instructions of these kinds, of a function and of functions defined inside it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in kinds:
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instruction_names(constant, *kinds)


def _global_names(code: types.CodeType) -> set[str]:
    return set(_instruction_names(code, "LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME"))


def _imported_names(code: types.CodeType) -> set[str]:
    return set(_instruction_names(code, "IMPORT_NAME"))


@functools.cache
def _from_installed(module_name: str) -> bool:
    if module_name.partition(".")[0] in _TRUSTED:
        return True
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return isinstance(file, str) and file.startswith(_INSTALLED)


def _installed(thing: Any) -> bool:
    """Whether a class or function belongs to a library: those are not inspected.

    For a function its globals decide: `functools.wraps` copies another function's `__module__`.
    """
    if isinstance(thing, types.FunctionType):
        return _from_installed(str(thing.__globals__.get("__name__", "")))
    return _from_installed(getattr(thing, "__module__", None) or "builtins")


def _changed(constant: Constant, module: nn.Module) -> str:
    name = constant.label.removeprefix("model.")
    kind = "buffer" if name in dict(module.named_buffers()) else "tensor"
    kind = "frozen parameter" if name in dict(module.named_parameters()) else kind
    return (
        f"{kind} {name!r} {'' if kind == 'tensor' else 'of the model '}changed while a user trained, and would carry "
        "private statistics past the clip: freeze it, or use a layer that keeps none (GroupNorm, not batch norm)"
    )


def _changed_structure(snapshot: Container) -> str:
    owner, _, what = snapshot.label.rpartition(".")
    names = {**snapshot.now, **snapshot.before}
    key = next((key for key in names if snapshot.now.get(key, MISSING) is not snapshot.before.get(key, MISSING)), "")
    name = f"{owner}.{key}".removeprefix("model.")
    kind = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}[what]
    done = "was made" if key not in snapshot.before else "was taken away" if key not in snapshot.now else "changed"
    return (
        f"{kind} {name!r} of the model {done} while a user trained, and would carry private statistics to the next: "
        "make all parts in __init__, and write into parameters in place under torch.no_grad()"
    )


def _remembered(label: str, *, together: bool = False) -> str:
    way_out = 'use engine="one-by-one", which puts it back after each' if together else "keep nothing between calls"
    who = "users trained together" if together else "a user trained"
    return f"{label} changed while {who}, and what one user leaves there the next would find: {way_out}"


def _article(word: str) -> str:
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"
