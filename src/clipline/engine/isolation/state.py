"""Finds the mutable state that a model and its loss can reach, and keeps it as it was, to be compared and put back.

Found are: attributes of modules and of objects of the caller's own classes, class attributes, hooks, functions with
their closures, defaults and the global variables that they name; also functions that a library has wrapped, as
`torch.no_grad()` does. That is where people keep state by mistake. What only code does that means to hide it is not
looked for: see docs/explanation/threat_model.md. Tensors and arrays are compared bit by bit or by a
checksum.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import sys
import sysconfig
import types
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import is_
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...errors import ModuleError
from .generators import beginning

VALUES = (int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device, torch.Size)
MISSING = object()
_NOT_STATE = frozenset(
    ["__dict__", "__weakref__", "__doc__", "__module__", "__slots__", "__annotations__", "__builtins__", "__loader__",
     "__spec__", "__file__", "__cached__", "__name__", "__package__", "__path__", "__qualname__", "__abstractmethods__",
     "_abc_impl", "__orig_bases__"]
)  # fmt: skip
# Containers written in Python: what they hold is in their attributes.
_IN_PYTHON = (UserDict, UserList, ChainMap, types.SimpleNamespace, torch.optim.Optimizer, torch.quasirandom.SobolEngine)
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, functools.partialmethod)
_MAX_PER_USER = 4096  # entries: larger containers are compared once a block, not after every user
_GLOBAL = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL")
_STRUCTURE = ("_parameters", "_buffers", "_modules")  # the dictionaries of a module whose change is refused
_LIBRARIES = ("clipline", "torch", "numpy", "triton")
_PYTHON = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_callers: set[str] = set()  # installed packages that a loss came from


class Container:
    """A dictionary, list, set or deque: the same entries in the same order.

    Read and written by the methods of these types themselves: a class derived from one may show something else than it
    holds, as a dictionary of classes that hands out instances does.
    """

    def __init__(self, label: str, now: Any) -> None:
        self.label, self.now = label, now
        self.kind: Any = next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(now, kind))
        self.before: Any = self.kind(self.entries())

    def entries(self) -> Iterable[Any]:
        """What it holds, of a dictionary pairs."""
        entries: Any = self.kind.items if issubclass(self.kind, dict) else self.kind.__iter__
        return list(entries(self.now))

    def same(self) -> bool:
        """Whether nothing has changed."""
        now, before, kind = self.now, self.before, self.kind
        if kind.__len__(now) != len(before):
            return False
        if not issubclass(kind, dict):
            return (
                set(map(id, now)) == set(map(id, before)) if kind is set else all(map(is_, kind.__iter__(now), before))
            )
        return all(map(is_, kind.values(now), before.values())) and all(map(is_, kind.__iter__(now), before))

    def restore(self) -> None:
        """Make it what it was."""
        now, kind = self.now, self.kind
        kind.clear(now)
        (kind.extend if kind in (list, deque) else kind.update)(now, self.before)

    def only_equal_values(self) -> bool:
        """Whether only numbers and strings were replaced, by equal ones, as when a module sets the same size again."""
        if not issubclass(self.kind, dict):
            return False
        now, before = dict(self.entries()), self.before
        if now.keys() != before.keys():
            return False
        pairs = ((now[key], entry) for key, entry in before.items() if now[key] is not entry)
        return all(isinstance(one, VALUES) and type(one) is type(then) and one == then for one, then in pairs)


class ClosureCell:
    """A closure variable of a function."""

    def __init__(self, label: str, cell: types.CellType) -> None:
        self.label, self._cell, self._before = label, cell, contents(cell)

    def same(self) -> bool:
        """Whether nothing has changed."""
        return contents(self._cell) is self._before

    def restore(self) -> None:
        """Make it what it was."""
        if self._before is MISSING:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = self._before


class Global:
    """A global variable that a function names."""

    def __init__(self, label: str, namespace: MutableMapping[str, Any], name: str) -> None:
        self.label, self._namespace, self._name = label, namespace, name
        self._before = namespace.get(name, MISSING)

    def same(self) -> bool:
        """Whether nothing has changed."""
        return self._namespace.get(self._name, MISSING) is self._before

    def restore(self) -> None:
        """Make it what it was."""
        if self._before is MISSING:
            self._namespace.pop(self._name, None)
        else:
            self._namespace[self._name] = self._before


class ClassAttributes:
    """The attributes of one of the caller's classes or Python modules."""

    def __init__(self, label: str, cls: type | types.ModuleType) -> None:
        self.label, self.cls, self.before = label, cls, dict(vars(cls))

    def same(self) -> bool:
        """Whether nothing has changed."""
        now, before = vars(self.cls), self.before
        return len(now) == len(before) and all(map(is_, now.values(), before.values())) and all(map(is_, now, before))

    def restore(self) -> None:
        """Make it what it was."""
        now = dict(vars(self.cls))
        for name in now.keys() - self.before.keys():
            delattr(self.cls, name)
        for name, entry in self.before.items():
            if now.get(name, MISSING) is not entry:
                setattr(self.cls, name, entry)


Snapshot = Container | ClosureCell | Global | ClassAttributes


def contents(cell: types.CellType) -> Any:
    """The value of a closure cell; `MISSING` if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


@dataclass(eq=False)
class MutableState:
    """Snapshots of what was found, by how they are checked."""

    structure: list[Container] = field(default_factory=list)  # the parts of modules: changes are refused
    restorable: list[Snapshot] = field(default_factory=list)  # restored after each user
    large_containers: list[Snapshot] = field(default_factory=list)  # compared once a block
    empty_containers: list[Any] = field(default_factory=list)  # most are hook dictionaries: a quick check for all
    empty_labels: list[str] = field(default_factory=list)  # of these
    constants: list[Constant] = field(default_factory=list)  # tensors and arrays that must not change
    caches: list[Any] = field(default_factory=list)  # of `functools.lru_cache`: emptied after each user
    reseeders: list[Callable[[int], object]] = field(default_factory=list)  # of generators that the model holds


def find_mutable_state(
    module: nn.Module,
    loss: Callable[..., Any],
    trainable: Iterable[Tensor],
    shared: Iterable[Tensor] = (),
    seeded: Iterable[nn.Module] = (),
) -> MutableState:
    """A snapshot of all that can be reached; the values of `trainable` parameters are left out.

    Of long tensors that are `shared` with the caller no copy is made. The `key` of `seeded` modules is the engine's.
    """
    _add_caller(loss)
    walk = _Walk(trainable, shared, seeded)
    try:
        walk.visit(module, "model")
        walk.visit(loss, "loss")
    except RecursionError:
        raise ModuleError("model or loss holds lists or objects nested too deeply to look into: flatten them") from None
    return walk.found


class _Walk:
    def __init__(self, trainable: Iterable[Tensor], shared: Iterable[Tensor], seeded: Iterable[nn.Module]) -> None:
        self.found = MutableState()
        self._seen: dict[int, object] = {}
        self._shared_ids = {id(tensor) for tensor in shared}
        self._moving_ids = {*map(id, trainable), *(id(part.key) for part in seeded)}

    def visit(self, value: Any, label: str) -> None:
        """Snapshot everything mutable that can be reached from `value`."""
        callers_class = not all(map(from_library, type(value).__mro__))
        if (isinstance(value, VALUES) and not callers_class) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # kept alive, so that no other object gets its id
        if isinstance(value, _IN_PYTHON) or (callers_class and not isinstance(value, Tensor | nn.Module | type)):
            self._visit_object(value, label)  # a class of the caller's may add attributes, whatever it derives from
        if isinstance(value, Tensor):
            self._visit_tensor(value, label)
        elif isinstance(value, nn.Module):
            self._visit_module(value, label)
        elif isinstance(value, np.ndarray):
            self.found.constants.append(Constant(label, value))
            self._visit_all(value.ravel().tolist() if value.dtype.hasobject else (), label)
        elif (reseed := beginning(value)) is not None:
            self.found.reseeders.append(reseed)
        elif isinstance(value, dict | list | set | deque):
            self._visit_container(value, label)
        elif isinstance(value, tuple | frozenset):
            self._visit_all(value, label)
        elif isinstance(value, functools.partial):
            self._visit_all((value.func, value.args, value.keywords, vars(value)), label)
        elif isinstance(value, types.MethodType):
            self._visit_all((value.__self__, value.__func__), label)
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType) and not isinstance(
            value.__self__, types.ModuleType
        ):
            self.visit(value.__self__, label)
        elif isinstance(value, _WRAPPERS):
            self._visit_all((getattr(value, name, None) for name in ("__func__", "func", "fget", "fset")), label)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.found.caches.append(value)
            self.visit(vars(value), label)  # the function in it too
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, label)
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, types.ModuleType):
            if not _is_library(value.__name__):
                self._visit_namespace(ClassAttributes(label, value), value.__name__)
        elif hasattr(type(value), "__next__"):
            name = type(value).__name__
            raise ModuleError(
                f"{label} is {'an' if name[:1].lower() in 'aeiou' else 'a'} {name}, which cannot begin anew for every "
                "user: keep a list and an index, or a random generator"
            )
        elif not callers_class:
            self._visit_all(_callables(list(getattr(value, "__dict__", {}).values())), label)

    def _visit_all(self, values: Iterable[Any], label: str) -> None:
        for value in values:
            self.visit(value, label)

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

    def _visit_container(self, value: Any, label: str) -> None:
        held = Container(label, value)
        self._add(held)
        if isinstance(value, defaultdict):
            self.visit(value.default_factory, f"{label}.default_factory")
        # What it holds: a class derived from these may show other entries, or import them one by one and fail.
        for one in held.entries():
            key, entry = one if isinstance(value, dict) else (None, one)
            self.visit(key, label)
            self.visit(entry, f"{label}[{key!r}]" if isinstance(value, dict) else label)

    def _visit_tensor(self, value: Tensor, label: str) -> None:
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            return  # left behind by vmap, and of no use to anybody: torch refuses whatever is done with it
        shared = id(value) in self._shared_ids
        if id(value) not in self._moving_ids:
            self.found.constants.append(Constant(label, value, shared=shared))
        if shared:  # what a quantised tensor is made of
            self._shared_ids |= {id(entry) for entry in vars(value).values() if isinstance(entry, Tensor)}
        self._visit_object(value, label)
        for hooks in (value._backward_hooks, value._post_accumulate_grad_hooks):
            self.visit(hooks, f"a hook on {label}")

    def _visit_module(self, module: nn.Module, label: str) -> None:
        self._add(Container(label, vars(module)))
        for name, entry in list(vars(module).items()):
            if name in _STRUCTURE:
                self._add(Container(f"{label}.{name}", entry))
                for key, part in entry.items():
                    self.visit(part, f"{label}.{key}")
            else:
                self.visit(entry, f"{label}.{name}")
        self.visit(type(module), label)

    def _visit_function(self, function: types.FunctionType, label: str) -> None:
        if from_library(function):  # it may be what a library made of the caller's, as `torch.no_grad()` does
            held = [*map(contents, function.__closure__ or ()), *vars(function).values()]
            self._visit_all(_callables(held), label)
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.found.restorable.append(ClosureCell(f"{name!r} in {function.__qualname__}", cell))
            self.visit(contents(cell), f"{name!r} in {function.__qualname__}")
        self._add(Container(f"attributes of {function.__qualname__}", function.__dict__))
        self._visit_all((function.__defaults__, function.__kwdefaults__, function.__dict__), function.__qualname__)
        for name in _names(function.__code__):
            entry = function.__globals__.get(name, MISSING)
            if entry is MISSING and hasattr(builtins, name):
                continue
            self.found.restorable.append(Global(f"global variable {name!r}", function.__globals__, name))
            if entry is not MISSING:
                self.visit(entry, f"global variable {name!r}")

    def _visit_class(self, kind: type) -> None:
        for cls in kind.__mro__:
            if not from_library(cls) and (cls is kind or id(cls) not in self._seen):
                self._seen[id(cls)] = cls
                self._visit_namespace(ClassAttributes(f"class {cls.__qualname__}", cls), cls.__qualname__)

    def _visit_namespace(self, attributes: ClassAttributes, label: str) -> None:
        self.found.restorable.append(attributes)
        for name, entry in attributes.before.items():
            if name not in _NOT_STATE:
                self.visit(entry, f"{label}.{name}")

    def _visit_object(self, value: Any, label: str) -> None:
        if hasattr(value, "__dict__"):
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
        yield from (entry for entry in inside if isinstance(entry, kinds) or not from_library(type(entry)))


def from_library(thing: Any) -> bool:
    """Whether a class or function belongs to a library: those are not looked into.

    For a function its globals decide: `functools.wraps` copies another function's `__module__`.
    """
    if isinstance(thing, types.FunctionType):
        return _is_library(str(thing.__globals__.get("__name__", "")))
    name = getattr(thing, "__module__", None)
    return _is_library(name if isinstance(name, str) and name else "builtins")  # of Cython's classes it is no text


@functools.cache
def _is_library(module_name: str) -> bool:
    """Whether a Python module is Python's, torch's, or of an installed package that no loss came from."""
    top = module_name.partition(".")[0]
    if top in _LIBRARIES:
        return True
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if top in sys.stdlib_module_names and top != "__main__":  # a file of the caller's may have such a name: profile.py
        return not isinstance(file, str) or file.startswith(_PYTHON)
    folders = PurePath(file).parts if isinstance(file, str) else ()
    return top not in _callers and ("site-packages" in folders or "dist-packages" in folders)


def _add_caller(loss: Callable[..., Any]) -> None:
    """From now on the package of this loss is the caller's, although it is installed: only a caller writes losses."""
    while isinstance(loss, functools.partial | types.MethodType):
        loss = loss.func if isinstance(loss, functools.partial) else loss.__func__
    where = loss.__globals__.get("__name__") if isinstance(loss, types.FunctionType) else type(loss).__module__
    if (package := str(where).partition(".")[0]) not in _callers:
        _callers.add(package)
        _is_library.cache_clear()


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
        return all(torch.equal(bits(one), bits(kept)) for one, kept in zip(_pieces(now), self.before, strict=True))

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
    whole = bits(values)
    chunk = _CHUNK if whole.device.type == "cpu" else _CHUNK_ON_DEVICE
    total = torch.full((), len(whole), dtype=torch.int64, device=whole.device)
    places = torch.arange(1, chunk // 4, 2, device=whole.device) * _ODD
    for start in range(0, len(whole), chunk):
        words = torch.nn.functional.pad(whole[start : start + chunk], (0, -len(whole[start : start + chunk]) % 8))
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


def bits(values: Tensor) -> Tensor:
    """The values as bytes, so that NaN equals itself and 0 differs from -0."""
    return values.detach().contiguous().reshape(-1).view(torch.uint8)
