"""The engine's copy of a module, with all trainable parameters in one flat vector."""

from __future__ import annotations

import copy
import fnmatch
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...errors import ModuleError, first_line, nearest, refuse
from ...federated.local_sgd import Batch, Loss, Reference, takes_reference
from ..isolation.state import SHORT, has_own_memory
from .user_random import UserRandom

_OF_EVERY_MODULE = {*vars(nn.Module()), "draws", "_flat_weights", "_flat_weight_refs"}
_LEGACY_HOOKS = ("WeightNorm", "SpectralNorm")  # of torch.nn.utils


class WorkingModel:
    """A working copy of `module` on `device`; the caller's module is not changed.

    `vector` holds all trainable parameters, concatenated. The copy's parameters are views of it: writing the vector
    sets the model, and an SGD step on the model changes the vector.

    Parameters whose names match one of the patterns in `personal` ("user_vector.*") come last in the vector. They stay
    with their user: `named_shapes`, `dim` and `initial` are of the others, which are released.

    Frozen parameters are not copied: on the caller's device they are the caller's own memory, read and never written.
    `shared` has those tensors, for the checks that they stay as they are. Views of larger memory and sparse ones are
    copied. Adapters of PEFT train in float32, whatever the type of the base.

    `make_stackable` replaces layers of the copy by forms that also run for many users; what it says is `attention`.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str = "cpu",
        personal: Sequence[str] = (),
        make_stackable: Callable[[nn.Module], str] | None = None,
    ) -> None:
        module = uncompiled(module)
        check_module(module)
        self._original = module
        frozen = _frozen(module)
        copied = _copied(module, _aliases(frozen))
        if hasattr(module, "peft_config"):  # its layers cast their inputs; others need those of their weights' type
            for param in copied.parameters():
                if param.requires_grad and param.dtype in (torch.bfloat16, torch.float16):
                    param.data = param.data.float()
        self.attention = "" if make_stackable is None else make_stackable(copied)
        self.module = copied.to(device)
        self.shared = [tensor for name, tensor in _tensors(self.module).items() if name in frozen]
        names_in_order = [name for name, p in self.module.named_parameters() if p.requires_grad]
        stays = _matching(names_in_order, personal)
        self.released = [name not in stays for name in names_in_order]  # by place among the module's own parameters
        by_name = dict(self.module.named_parameters())
        ordered = sorted(names_in_order, key=stays.__contains__)  # stable: released ones first
        trainable = [by_name[name] for name in ordered]
        self.vector = torch.cat([p.detach().reshape(-1) for p in trainable]).clone()
        self.personal_shapes = {name: by_name[name].shape for name in ordered if name in stays}
        self.personal_dim = sum(shape.numel() for shape in self.personal_shapes.values())
        # What a run starts from; the vector changes in training.
        self.initial, self.initial_personal = (part.clone() for part in self.parts())
        start = 0
        for param in trainable:
            stop = start + param.numel()
            param.data = self.vector[start:stop].view_as(param)
            start = stop
        self._trainable = trainable
        self.named_shapes = {  # in the order of the vector; a shared parameter appears once
            name: by_name[name].shape for name in ordered if name not in stays
        }
        names = {id(param): name for name, param in zip(ordered, trainable, strict=True)}
        self._names = ordered
        self._owners = [
            (part._parameters, key, names[id(param)], param)  # several for a shared parameter
            for part in self.module.modules()
            for key, param in part._parameters.items()
            if param is not None and id(param) in names
        ]
        self.random_layers = {name: part for name, part in self.module.named_modules() if isinstance(part, UserRandom)}
        for random_layer in self.random_layers.values():
            random_layer.draws = (
                0  # set now: an attribute added in training would look like state that a user left behind
            )
        self._keys = {
            f"{name}.key".lstrip(".") for name in self.random_layers
        }  # set by the engine, not statistics of users
        self.module.train()

    @property
    def dim(self) -> int:
        """Number of trainable parameters that are released."""
        return len(self.vector) - self.personal_dim

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that train, in the order of the vector."""
        return dict(zip(self._names, self._trainable, strict=True))

    def parts(self) -> tuple[Tensor, Tensor]:
        """Views of the vector: what is released, and what is personal."""
        return self.vector[: self.dim], self.vector[self.dim :]

    def load(self, params: Tensor, personal: Tensor | None = None) -> nn.Module:
        """The module with these parameters; personal ones as given, or as they are at first."""
        released, own = self.parts()
        released.copy_(params)
        own.copy_(self.initial_personal if personal is None else personal)
        return self.module

    def personal_pieces(self, rows: Tensor) -> dict[str, Tensor]:
        """Personal parameters (users, personal) by name, (users, *shape) each."""
        if not self.personal_shapes:
            return {}
        pieces = torch.split(rows, [shape.numel() for shape in self.personal_shapes.values()], dim=1)
        shapes = self.personal_shapes.items()
        return {name: piece.reshape(-1, *shape) for (name, shape), piece in zip(shapes, pieces, strict=True)}

    def released_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Of a module like the original one: the parameters that are released, in the order of the vector."""
        trainable = (p for p in module.parameters() if p.requires_grad)
        return [param for param, released in zip(trainable, self.released, strict=True) if released]

    def export(self, params: Tensor) -> nn.Module:
        """A new module like the original one, with these parameters, on the CPU; personal ones are as at first.

        It shares no memory with the original.
        """
        return self._with_values(copy.deepcopy(self._original).cpu(), params)

    def evaluated(self, params: Tensor) -> nn.Module:
        """Like `export`, but on the device, and with the frozen parameters of the working copy: for reading only."""
        memo = _aliases(_frozen(self._original), _tensors(self.module))
        return self._with_values(_copied(self._original, memo).to(self.vector.device), params)

    def _with_values(self, module: nn.Module, params: Tensor) -> nn.Module:
        """A copy of the original module itself, with these parameters written into it."""
        trainable = self.released_parameters(module)
        pieces = torch.split(params.to(next(module.parameters()).device), [p.numel() for p in trainable])
        for param, values in zip(trainable, pieces, strict=True):
            param.data.copy_(values.view_as(param))
        return module

    def same_apart_from_training(self, other: WorkingModel) -> bool:
        """Whether the two differ at most in trained values: layers, types, buffers and frozen parameters agree.

        So do numbers, texts, functions and arrays among the attributes; of other objects their class is compared.
        """
        return (
            self.vector.dtype == other.vector.dtype
            and str(self.module) == str(other.module)
            and all(map(_alike, *(map(_attributes, model.module.modules()) for model in (self, other))))
            and (ours := self._constants()).keys() == (theirs := other._constants()).keys()
            and all(_same(theirs[name], tensor) for name, tensor in ours.items())
        )

    @contextmanager
    def substituting(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Within, the module uses these tensors, one for each trainable parameter, personal ones too."""
        try:
            for parameters, key, name, _ in self._owners:
                parameters[key] = tensors[name]  # type: ignore[assignment]  # as torch.func.functional_call does
            yield
        finally:
            for parameters, key, _, own in self._owners:
                parameters[key] = own

    @contextmanager
    def unreadable(self) -> Iterator[None]:
        """Within, the module's own parameters are NaN: a stack that uses them beside its users' shows it."""
        kept = self.vector.clone()
        try:
            self.vector.fill_(math.nan)
            yield
        finally:
            self.vector.copy_(kept)

    def set_keys(self, keys: Tensor) -> None:
        """Set the key of each `UserRandom` of the module, from (random_layers, 2) int32."""
        if not self.random_layers:
            return
        for random_layer, key in zip(self.random_layers.values(), keys, strict=True):
            random_layer.key.copy_(key)
            random_layer.draws = 0

    def _constants(self) -> dict[str, Tensor]:
        """What training must not change: buffers and frozen parameters."""
        buffers = {name: buffer for name, buffer in self.module.named_buffers() if name not in self._keys}
        frozen = {name: param.data for name, param in self.module.named_parameters() if not param.requires_grad}
        return buffers | frozen


def _matching(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """The names that match a pattern. A pattern that matches none is refused, and so are patterns that match all."""
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise refuse("personal", patterns, "a list of names or patterns", 'give ["user_vector.*"], say')
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ModuleError(
                f"personal names {pattern!r}, and no trainable parameter is called so: {nearest(pattern, names)}"
            )
    found = {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
    if found and len(found) == len(names):
        raise ModuleError(
            f"personal={list(patterns)!r} matches all {len(names)} trainable parameters, so that nothing would be "
            "released: leave some out"
        )
    return found


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether all values are equal; NaN equals NaN."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())


def _attributes(layer: nn.Module) -> dict[str, Any]:
    """The class of a layer, and the attributes that its class and its user gave it."""
    own = {name: entry for name, entry in vars(layer).items() if name not in _OF_EVERY_MODULE}
    return {"class": type(layer), **own}


def _alike(ours: Any, theirs: Any) -> bool:
    """Whether two attributes of modules hold the same."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, Tensor):
        return ours is theirs or ours.requires_grad or _same(ours, theirs.to(ours.device))
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_alike(entry, theirs[key]) for key, entry in ours.items())
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(_alike, ours, theirs))
    if isinstance(ours, np.ndarray):
        return np.array_equal(ours, theirs)
    if isinstance(ours, int | float | complex | str | bytes | type | types.FunctionType):
        return bool(ours == theirs or ours != ours)
    return True


def uncompiled(module: nn.Module) -> nn.Module:
    """The original of a module that `torch.compile` wrapped: the engine compiles by itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


def _frozen(module: nn.Module) -> dict[str, Tensor]:
    """What a copy of the module may share with it, by name: frozen parameters, and long buffers of whole numbers.

    Such buffers are quantised weights. Others may be statistics, which a module writes.
    """
    return {
        name: tensor
        for name, tensor in _tensors(module).items()
        if (not tensor.requires_grad if isinstance(tensor, nn.Parameter) else _quantised(tensor))
        and (type(tensor) not in (Tensor, nn.Parameter) or has_own_memory(tensor))
    }


def _quantised(buffer: Tensor) -> bool:
    return (
        buffer.layout == torch.strided
        and buffer.nbytes > SHORT
        and not buffer.is_floating_point()
        and not buffer.is_complex()
    )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; one that several modules share stands once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _aliases(frozen: Mapping[str, Tensor], own: Mapping[str, Tensor] | None = None) -> dict[int, Any]:
    """A memo for `copy.deepcopy`: objects with the memory of these tensors, or of those of the same name in `own`.

    New objects, so that moving the copy to a device or setting an attribute leaves the caller's alone. Where a
    quantisation library has a class of its own, the object itself.
    """
    memo: dict[int, Any] = {}
    for name, tensor in frozen.items():
        source = tensor if own is None else own[name]
        alias = source.detach() if type(source) in (Tensor, nn.Parameter) else source
        memo[id(tensor)] = nn.Parameter(alias, requires_grad=False) if type(source) is nn.Parameter else alias
    return memo


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy; `ModuleError` where the module cannot be copied."""
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        reason = first_line(error)
        raise ModuleError(
            f"model {type(module).__name__} cannot be copied ({reason}), and every engine works on a copy: keep what "
            "cannot be copied out of the module"
        ) from None
    for part in copied.modules():
        for name, inner in part._modules.items():
            if inner is not None:
                part._modules[name] = uncompiled(inner)
        part._compiled_call_impl = None  # set by `module.compile()`
    for tensor in _tensors(copied).values():
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not has_own_memory(tensor):
            tensor.data = tensor.data.clone()  # what lies beside a view could carry state
    return copied


def check_module(module: nn.Module) -> None:
    """Refuse what cannot be trained privately: running statistics, nothing to train, or mixed parameter types."""
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise ModuleError(f"model is the class {module.__name__} but must be a module: give {module.__name__}(...)")
    if not isinstance(module, nn.Module):
        raise ModuleError(f"model is a {type(module).__name__} but must be a torch.nn.Module: wrap it in one")
    for name, layer in module.named_modules():
        where = f"layer {name or 'model'!r} ({type(layer).__name__})"
        if isinstance(layer, torch.jit.ScriptModule):
            raise ModuleError(f"{where} is scripted, and users cannot train on it: give the module it was made from")
        if any(is_lazy(param) for param in layer._parameters.values()):
            raise ModuleError(f"{where} has no shape yet: run one made-up batch through the model first")
        if any(type(hook).__name__ in _LEGACY_HOOKS for hook in layer._forward_pre_hooks.values()):
            raise ModuleError(
                f"{where} has torch's older weight_norm or spectral_norm, which keeps a computed weight between calls: "
                "use the one of torch.nn.utils.parametrizations"
            )
        if getattr(layer, "track_running_stats", False):
            raise ModuleError(
                f"{where} keeps running statistics of users' data, which would pass the clip and the noise: use "
                "torch.nn.GroupNorm or LayerNorm, or track_running_stats=False"
            )
    dtypes = {p.dtype for p in module.parameters() if p.requires_grad}
    if not dtypes:
        raise ModuleError("model has 0 trainable parameters but needs at least 1: set requires_grad on some")
    if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ModuleError(f"trainable parameters are {names} but must share one type: call model.float()")


class LossOf(nn.Module):
    """A loss as a module, so that `torch.func.functional_call` can replace the parameters of its model."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self._takes_reference = takes_reference(loss)

    def forward(self, batch: Batch, reference: Reference | None = None) -> Tensor:
        """The loss of the model on this batch."""
        return self.loss(self.model, batch, reference) if self._takes_reference else self.loss(self.model, batch)
