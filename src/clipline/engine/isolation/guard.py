"""Keeps users apart: state that a model and its loss could carry from one user to the next is restored or refused.

The accounting needs every user's update to be a function of the round's parameters and that user's own examples. A
module can break this in many ways: it may replace a parameter by another tensor, append to a list, count its calls,
keep the last batch in an attribute, a closure or a global variable, or hold a generator that users share.
"""

from __future__ import annotations

import copy
import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import GO_ON, CliplineError, ModuleError, RunError
from .generators import seed_global_generators
from .state import MISSING, Constant, Container, Snapshot, find_mutable_state

_FILES = "file descriptors", "close files or raise the limit (ulimit -n)"
_RAN_OUT = {  # number of an OSError -> what a machine runs out of, and what helps
    errno.ENOMEM: ("memory", "free some, take fewer workers or a smaller cohort or batch"),
    errno.EAGAIN: ("threads or processes", "end others, raise the limit (ulimit -u) or take fewer workers"),
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOSPC: (
        "room on a disk or in shared memory", "make some (/dev/shm is shared memory) or take fewer workers",
    ),
}  # fmt: skip
_SAID = {  # how torch's and Python's own messages begin
    errno.ENOMEM: r"(\[enforce fail at \S*alloc_cpu\.cpp:\d+\] .*)?DefaultCPUAllocator: (can't allocate|not enough) "
    r"memory|(std::bad_alloc|bad allocation|could not create a primitive|could not create a memory object)$"
    r"|(CUDA|cuDNN|cusolver|cuFFT) error: CU[A-Z]+_\w*ALLOC(ATION)?_FAILED\b|(MPS backend|XPU) out of memory\b",
    errno.EAGAIN: r"can't start new thread$",
}
_OF_A_SHARED_FILE = r"unable to [\w ()]+ <[^<>]*>[a-z -]*: "  # how torch begins, before libc's words and number


class IsolationError(ModuleError):
    """State of one user would have reached the next. The run ends before anything of the round is released."""


class Isolation:
    """A snapshot of all mutable state that `module` (a working copy) and `loss` can reach.

    `after_user` restores plain attributes, containers, closures and global variables, so that every user finds the
    model as the caller gave it, and refuses other changes. `seed` reseeds NumPy's and Python's global generators, and
    those that the model holds, with a user's own key. state.py says what is found. `shared` are tensors whose
    memory is the caller's: a change of a long one is refused, and stays. `seeded` are layers that the engine seeds.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[..., Any],
        trainable: Mapping[str, nn.Parameter],
        shared: Sequence[Tensor] = (),
        seeded: Sequence[nn.Module] = (),
    ) -> None:
        self._module, self._loss, self._shared, self._seeded = module, loss, shared, seeded
        self._trainable = dict(trainable)
        self._spoilt = ""  # what a user has changed for good, in words
        self._snapshot_all()

    def _snapshot_all(self) -> None:
        self._layouts = [_layout(param) for param in self._trainable.values()]
        self._data = [param.data for param in self._trainable.values()]  # keeps the memory alive
        self._dtype = torch.get_default_dtype()
        trainable = self._trainable.values()
        self._state = find_mutable_state(self._module, self._loss, trainable, self._shared, self._seeded)

    def before_block(self) -> None:
        """Take a new snapshot if the caller changed something since the last users, a temperature for instance."""
        if self._spoilt:
            raise IsolationError(self._spoilt)
        self._reset_draws()
        state = self._state
        if (
            any(state.empty_containers)
            or not all(snapshot.same() for snapshot in state.large_containers)
            or not all(snapshot.same() for snapshot in state.restorable)
        ):
            self._snapshot_all()

    def _reset_draws(self) -> None:
        for part in self._seeded:
            part.draws = 0  # type: ignore[assignment]  # of `UserRandom`: the engine counts them

    def seed(self, key: int) -> None:
        """Reseed every generator that users would otherwise share with this key."""
        seed_global_generators(key)
        for reseed in self._state.reseeders:
            reseed(key)

    def after_user(self) -> str:
        """Restore the state and name something that had changed, or give ""; refuse changed parameters or parts."""
        state, leftover = self._state, ""
        self._reset_draws()
        for cache in state.caches:
            cache.cache_clear()
        refused = self._replaced()
        for snapshot in state.restorable:
            if not snapshot.same():
                equal = isinstance(snapshot, Container) and snapshot.only_equal_values()
                leftover = leftover or ("" if equal else _where(snapshot))
                snapshot.restore()
        if any(state.empty_containers):
            for label, container in zip(state.empty_labels, state.empty_containers, strict=True):
                leftover = leftover or (label if container else "")
                container.clear()
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        if touched := [one for one in state.constants if one.touched()]:
            refused = refused or self._changed(touched[0])
        if refused:
            self._restore_all()
            raise IsolationError(refused)
        return leftover

    def after_block(self) -> None:
        """Refuse changes that are too costly to check after every user: of buffers, frozen parameters, large lists."""
        for snapshot in self._state.large_containers:
            if not snapshot.same():
                snapshot.restore()
                raise IsolationError(_remembered(snapshot.label))
        for constant in self._state.constants:
            if not constant.same():
                for one in self._state.constants:  # another may hold a copy of the same memory
                    one.restore()
                raise IsolationError(self._changed(constant))

    def after_step(self) -> None:
        """After a step of stacked users, which others' may follow. Any change is refused: it is nobody's alone."""
        if leftover := self.after_user():
            raise IsolationError(_remembered(leftover, together=True))

    def after_stack(self) -> None:
        """After a block of stacked users: as after a step, and what is too costly to check there."""
        self.after_step()
        self.after_block()

    def after_failure(self) -> None:
        """After stacked users who failed, and whose updates are lost: what they left is restored, as one by one."""
        self.after_user()
        self.after_block()

    def _changed(self, constant: Constant) -> str:
        """The message for a tensor that changed. What stays changed in the engine's own copy is never used again."""
        message = _changed(constant, self._module)
        if constant.lost and not constant.shared:
            self._spoilt = message
        return message

    def __deepcopy__(self, memo: dict[int, Any]) -> Isolation:
        module, loss = copy.deepcopy(self._module, memo), copy.deepcopy(self._loss, memo)
        trainable, shared = copy.deepcopy(self._trainable, memo), copy.deepcopy(self._shared, memo)
        return Isolation(module, loss, trainable, shared, copy.deepcopy(self._seeded, memo))

    def _replaced(self) -> str:
        """An error message if a parameter has other memory, or the model other parts; else ""."""
        for (name, param), layout in zip(self._trainable.items(), self._layouts, strict=True):
            if (now := _layout(param)) == layout:
                continue
            if now[:-2] != layout[:-2]:
                return (
                    f"parameter {name!r} of the model was replaced, or given other memory, while a user trained, and "
                    "would carry that user's weights to the next: write into it in place under torch.no_grad(), or "
                    "compute from it without assigning"
                )
            what = "has a gradient left behind" if param.grad is not None else "no longer requires a gradient"
            return (
                f"parameter {name!r} of the model {what} after a user trained, and would carry it to the next: "
                "return the loss and leave the backward pass and requires_grad alone"
            )
        for snapshot in self._state.structure:
            if not snapshot.same():
                return _changed_structure(snapshot)
        return ""

    def _restore_all(self) -> None:
        """Undo the refused changes, so that the caller's next attempt starts with the model as given."""
        for snapshot in self._state.structure:
            snapshot.restore()
        for constant in self._state.constants:
            constant.restore()
        for param, data in zip(self._trainable.values(), self._data, strict=True):
            param.grad = None
            param.data = data
            param.requires_grad_()
            param._backward_hooks = None
            param._post_accumulate_grad_hooks = None  # type: ignore[assignment]


def _layout(param: Tensor) -> tuple[object, ...]:
    """Address, shape and strides of a parameter, its hooks, and last whether it has a gradient and whether it asks."""
    hooks = len(param._backward_hooks or ()), len(param._post_accumulate_grad_hooks or ())
    return param.data_ptr(), param.shape, param.stride(), hooks, param.grad is None, param.requires_grad


def _changed(constant: Constant, module: nn.Module) -> str:
    name = constant.label.removeprefix("model.")
    kind = "buffer" if name in dict(module.named_buffers()) else "tensor"
    kind = "frozen parameter" if name in dict(module.named_parameters()) else kind
    lost = ""
    if constant.lost:
        whose = "is shared with the model that you gave" if constant.shared else "is too long to be kept twice"
        lost = f" (it {whose}, and stays changed{' there' if constant.shared else ': make the training anew'})"
    return (
        f"{kind} {name!r} {'' if kind == 'tensor' else 'of the model '}changed while a user trained{lost}, and would "
        "carry private statistics past the clip: freeze it, or use a layer that keeps none (GroupNorm, not batch norm)"
    )


def _where(snapshot: Snapshot) -> str:
    """What has changed, with the attribute of a module or object."""
    if not isinstance(snapshot, Container) or not issubclass(snapshot.kind, dict):
        return snapshot.label
    key = _changed_key(dict(snapshot.entries()), snapshot.before)
    return f"{snapshot.label}.{key}" if isinstance(key, str) and key.isidentifier() else snapshot.label


def _changed_key(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> Any:
    return next((key for key in {**now, **before} if now.get(key, MISSING) is not before.get(key, MISSING)), "")


def _changed_structure(snapshot: Container) -> str:
    owner, _, what = snapshot.label.rpartition(".")
    key = _changed_key(snapshot.now, snapshot.before)
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


def users_own(error: Exception) -> bool:
    """Whether an error may come from one user's data, as for a label out of range.

    Not if memory, threads or files ran out, or after a CUDA error, which no user of the process can survive.
    """
    if isinstance(error, torch.cuda.OutOfMemoryError) or exhausted(error) is not None:
        return False
    return not (isinstance(error, RuntimeError) and "CUDA" in str(error))


def exhausted(error: BaseException) -> RunError | None:
    """The sentence that ends a run on cores if this error, or one behind it, is for want of memory, threads or files.

    Without the words of the error, which may tell how much a user's data needed. None for other errors.
    """
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, CliplineError | torch.cuda.OutOfMemoryError):
        if (number := _ran_out(behind)) is not None:
            what, way_out = _RAN_OUT[number]
            return RunError(
                f"{what} ran out while users trained, which may be one user's data or the machine: {way_out}, then "
                f"{GO_ON}; after a resume the same users come"
            )
        behind = behind.__cause__ or (None if behind.__suppress_context__ else behind.__context__)
    return None


def _ran_out(error: BaseException) -> int | None:
    """The number of what ran out. A RuntimeError has libc's words alone (C++), torch's of a shared file, or `_SAID`."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, OSError):
        return error.errno if error.errno in _RAN_OUT else None
    told = str(error).partition("\n")[0] if isinstance(error, RuntimeError) else ""
    for number in _RAN_OUT:
        words = re.escape(os.strerror(number))
        said = _SAID.get(number, "$")
        if told and re.match(rf"({words}|{_OF_A_SHARED_FILE}{words} \({number}\))$|{said}", told):
            return number
    return None


@contextmanager
def enough_resources() -> Iterator[None]:
    """Errors for want of memory, threads or files end in a sentence; others pass."""
    try:
        yield
    except Exception as error:
        if (told := exhausted(error)) is not None:
            raise told from None
        raise
