"""A user leaves nothing behind: whatever a model and its loss could remember is put back, or refused, after each user.

The accounting needs every user's update to be a function of the round's parameters and that user's own examples. A
module can break this in many ways: it may put another tensor in a parameter's place, grow a list, count its calls, keep
the last batch in an attribute, a closure or a global variable, or hold a generator that the next user goes on with.
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
    Kept,
    Slot,
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
_LARGE = 4096  # entries: larger containers are compared once a block and not after every user
_STRUCTURE = ("_parameters", "_buffers", "_modules")  # of a module: what it consists of


class IsolationError(ModuleError):
    """Something of one user would have reached the next: the run ends before anything of the round is released."""


class Isolation:
    """What `module` (a working copy) and `loss` hold, as it was when this was made.

    `after_user` puts plain attributes, containers, closures and global variables back, so that every user finds the
    model as the caller gave it, and refuses other changes. `seed` gives a user the user's own numbers from the random
    generators that NumPy and Python share and that the model holds. Found are: attributes of modules and of objects of
    the caller's own classes, class attributes, hooks, functions with their closures, defaults and the global variables
    that they name. Not found is what lies behind objects of libraries, in files or in other processes.
    """

    def __init__(self, module: nn.Module, loss: Callable[..., Any], trainable: Mapping[str, nn.Parameter]) -> None:
        self._module, self._loss = module, loss
        self._trainable = dict(trainable)
        self._note_all()

    def _note_all(self) -> None:
        self._places = [_place(param) for param in self._trainable.values()]
        self._data = [param.data for param in self._trainable.values()]  # keeps that memory theirs
        self._structure: list[Kept] = []  # a change of these is refused
        self._kept: list[Kept] = []  # these are put back
        self._large: list[Kept] = []
        self._empty: list[Any] = []  # containers with nothing in them: most hooks of most modules
        self._names: list[str] = []  # of these
        self._constants: list[Constant] = []
        self._dtype = torch.get_default_dtype()
        self._caches: list[Any] = []
        self._generators: list[Callable[[int], object]] = []
        self._seen: dict[int, object] = {}
        own = {id(param) for param in self._trainable.values()}
        self._keys = {id(part.key) for part in self._module.modules() if isinstance(part, UserRandom)}
        try:
            self._walk(self._module, "model", own)
            self._walk(self._loss, "loss", own)
        except RecursionError:
            raise ModuleError(
                "model or loss holds lists or objects nested too deeply to look into: flatten them"
            ) from None
        self._seen.clear()

    def before_block(self) -> None:
        """Take what the caller may have set since the last block, a temperature say, as it is now."""
        if any(self._empty) or not all(kept.same() for kept in (*self._kept, *self._large)):
            self._note_all()

    def seed(self, key: int) -> None:
        """Every generator that users would share begins anew, with this key."""
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 (the model's choice, not ours)
        for begin in self._generators:
            begin(key)

    def after_user(self) -> str:
        """Put back what the last user left, and say what that was; refuse a change of what the model consists of."""
        refused, left = self._replaced(), ""
        for kept in self._kept:
            if not kept.same():
                left = left or ("" if only_equal_values(kept) else kept.label)
                kept.restore()
        if any(self._empty):
            left = left or next(label for label, container in zip(self._names, self._empty, strict=True) if container)
            for container in self._empty:
                container.clear()
        for cache in self._caches:
            cache.cache_clear()
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        refused = refused or next((_changed(one, self._module) for one in self._constants if one.touched()), "")
        if refused:
            self._put_back()
            raise IsolationError(refused)
        return left

    def after_block(self) -> None:
        """Refuse what is too long to look at after every user: changed buffers, frozen parameters, large containers."""
        for kept in self._large:
            if not kept.same():
                kept.restore()
                raise IsolationError(_remembered(kept.label))
        for constant in self._constants:
            if not constant.same():
                constant.restore()
                raise IsolationError(_changed(constant, self._module))

    def after_stack(self) -> None:
        """After users who trained together: there no change at all can be told apart by user, and all are refused."""
        left = self.after_user()
        self.after_block()
        if left:
            raise IsolationError(_remembered(left, together=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> Isolation:
        """Of the copied module, as it is."""
        module, loss = copy.deepcopy(self._module, memo), copy.deepcopy(self._loss, memo)
        return Isolation(module, loss, copy.deepcopy(self._trainable, memo))

    def _replaced(self) -> str:
        """A sentence if a parameter is not where it was, or the model has other parts; else nothing."""
        for (name, param), place in zip(self._trainable.items(), self._places, strict=True):
            if _place(param) != place:
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
        for kept in self._structure:
            if not kept.same():
                assert isinstance(kept, Container)
                return _changed_structure(kept)
        return ""

    def _put_back(self) -> None:
        """Undo what is refused, so that the caller's next attempt begins with the model as given."""
        for kept in self._structure:
            kept.restore()
        for constant in self._constants:
            constant.restore()
        for param, data in zip(self._trainable.values(), self._data, strict=True):
            param.grad = None
            param.data = data
            param.requires_grad_()
            param._backward_hooks = None

    def _walk(self, value: Any, label: str, own: set[int]) -> None:
        """Note everything mutable that `value` leads to."""
        own_class = not _installed(type(value))
        if (isinstance(value, VALUES) and not own_class) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # kept alive, so that no other object gets its number
        if own_class and isinstance(value, (*VALUES, dict, list, set, tuple, deque)):
            self._note_object(value, label, own)  # a class of the caller's may have attributes beside
        if isinstance(value, Tensor):
            self._note_tensor(value, label, own)
        elif isinstance(value, nn.Module):
            self._note_module(value, label, own)
        elif isinstance(value, np.ndarray):
            self._constants.append(Constant(label, value))
            for entry in value.ravel().tolist() if value.dtype.hasobject else ():
                self._walk(entry, label, own)
        elif isinstance(value, weakref.ref):
            self._walk(value(), label, own)
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            if not isinstance(value.__self__, types.ModuleType):
                self._walk(value.__self__, label, own)
        elif isinstance(value, functools.cached_property | functools.partialmethod):
            self._walk(value.func, label, own)
        elif (begin := beginning(value)) is not None:
            self._generators.append(begin)
        elif isinstance(value, dict | list | set | deque | bytearray | types.SimpleNamespace):
            inside = vars(value) if isinstance(value, types.SimpleNamespace) else value
            self._note(Container(label, inside))
            named = inside.items() if isinstance(inside, dict) else enumerate(inside)
            for key, entry in list(named):
                self._walk(entry, f"{label}[{key!r}]" if isinstance(inside, dict) else label, own)
        elif isinstance(value, threading.local):
            self._kept.append(ThreadLocal(label, value))
            for name, entry in list(vars(value).items()):
                self._walk(entry, f"{label}.{name}", own)
        elif isinstance(value, tuple | frozenset):
            for entry in value:
                self._walk(entry, label, own)
        elif isinstance(value, functools.partial):
            for entry in (value.func, value.args, value.keywords):
                self._walk(entry, label, own)
        elif isinstance(value, types.MethodType):
            self._walk(value.__self__, label, own)
            self._walk(value.__func__, label, own)
        elif isinstance(value, staticmethod | classmethod):
            self._walk(value.__func__, label, own)
        elif isinstance(value, property):
            for function in (value.fget, value.fset):
                self._walk(function, label, own)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._caches.append(value)
            self._walk(value.__wrapped__, label, own)
        elif isinstance(value, types.FunctionType):
            self._note_function(value, label, own)
        elif isinstance(value, type):
            self._note_class(value, own)
        elif isinstance(value, types.ModuleType):
            if not _from_installed(value.__name__):
                self._kept.append(ClassAttributes(label, value))
                for name, entry in list(vars(value).items()):
                    if name not in _NOT_STATE:
                        self._walk(entry, f"{value.__name__}.{name}", own)
        elif hasattr(type(value), "__next__"):
            raise ModuleError(
                f"{label} is {_article(type(value).__name__)}, which cannot begin anew for every user: keep a list and "
                "an index, or a random generator"
            )
        elif not _installed(type(value)):
            self._note_object(value, label, own)

    def _note(self, kept: Container) -> None:
        """Where it will be looked for."""
        if kept.label.rpartition(".")[2] in _STRUCTURE:
            self._structure.append(kept)
        elif len(kept.now) == 0 and type(kept.now) is not types.MappingProxyType:
            self._empty.append(kept.now)
            self._names.append(kept.label)
        else:
            (self._large if len(kept.now) > _LARGE else self._kept).append(kept)

    def _note_tensor(self, value: Tensor, label: str, own: set[int]) -> None:
        if id(value) not in own and id(value) not in self._keys:
            self._constants.append(Constant(label, value))
        self._note(Container(label, vars(value)))
        self._walk(value._backward_hooks, f"a hook on {label}", own)

    def _note_module(self, module: nn.Module, label: str, own: set[int]) -> None:
        skipped = ("draws",) if isinstance(module, UserRandom) else ()  # which the engine sets
        self._note(Container(label, vars(module), skipped))
        for name, entry in list(vars(module).items()):
            if name in _STRUCTURE:
                self._note(Container(f"{label}.{name}", entry))
                for key, part in entry.items():
                    self._walk(part, f"{label}.{key}", own)
            elif name not in skipped:
                self._walk(entry, f"{label}.{name}", own)
        self._note_slots(module, label, own)
        self._walk(type(module), label, own)

    def _note_function(self, function: types.FunctionType, label: str, own: set[int]) -> None:
        if _installed(function):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._kept.append(Cell(f"{name!r} in {function.__qualname__}", cell))
            self._walk(contents(cell), f"{name!r} in {function.__qualname__}", own)
        self._note(Container(f"attributes of {function.__qualname__}", function.__dict__))
        for entry in (function.__defaults__, function.__kwdefaults__, function.__dict__):
            self._walk(entry, f"{function.__qualname__}", own)
        for name in _global_names(function.__code__):
            entry = function.__globals__.get(name, MISSING)
            if entry is MISSING and hasattr(builtins, name):
                continue
            self._kept.append(Global(f"global variable {name!r}", function.__globals__, name))
            if entry is not MISSING:
                self._walk(entry, f"global variable {name!r}", own)
        for name in _imported_names(function.__code__):
            self._walk(sys.modules.get(name), f"module {name}", own)

    def _note_class(self, kind: type, own: set[int]) -> None:
        metaclass: type = type(kind)
        for cls in (*kind.__mro__, *metaclass.__mro__):
            if not _installed(cls) and (cls is kind or id(cls) not in self._seen):
                self._seen[id(cls)] = cls
                self._kept.append(ClassAttributes(f"class {cls.__qualname__}", cls))
                for name, entry in list(vars(cls).items()):
                    if name not in _NOT_STATE:
                        self._walk(entry, f"{cls.__qualname__}.{name}", own)

    def _note_object(self, value: Any, label: str, own: set[int]) -> None:
        if hasattr(value, "__dict__"):
            self._note(Container(label, vars(value)))
            for name, entry in list(vars(value).items()):
                self._walk(entry, f"{label}.{name}", own)
        self._note_slots(value, label, own)
        self._walk(type(value), label, own)

    def _note_slots(self, value: Any, label: str, own: set[int]) -> None:
        for cls in type(value).__mro__:
            for name, slot in vars(cls).items() if not _installed(cls) else ():
                if isinstance(slot, types.MemberDescriptorType):
                    self._kept.append(Slot(f"{label}.{name}", value, slot))
                    self._walk(self._kept[-1].before, f"{label}.{name}", own)  # type: ignore[attr-defined]


def _place(param: Tensor) -> tuple[object, ...]:
    """Where a parameter lies, how, and how many hooks wait for its gradient."""
    return param.data_ptr(), param.shape, param.stride(), len(param._backward_hooks or ())


def _names(code: types.CodeType, *kinds: str) -> Iterator[str]:
    """The names that instructions of these kinds have, in a function and those made inside it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in kinds:
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant, *kinds)


def _global_names(code: types.CodeType) -> set[str]:
    return set(_names(code, "LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME"))


def _imported_names(code: types.CodeType) -> set[str]:
    return set(_names(code, "IMPORT_NAME"))


@functools.cache
def _from_installed(module_name: str) -> bool:
    if module_name.partition(".")[0] in _TRUSTED:
        return True
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return isinstance(file, str) and file.startswith(_INSTALLED)


def _installed(thing: Any) -> bool:
    """Whether a class or function is a library's: those are not looked into. A wrapper may carry another's name."""
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


def _changed_structure(kept: Container) -> str:
    owner, _, what = kept.label.rpartition(".")
    names = {**kept.now, **kept.before}
    key = next((key for key in names if kept.now.get(key, MISSING) is not kept.before.get(key, MISSING)), "")
    name = f"{owner}.{key}".removeprefix("model.")
    kind = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}[what]
    done = "was made" if key not in kept.before else "was taken away" if key not in kept.now else "changed"
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
