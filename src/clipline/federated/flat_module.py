"""A module whose trainable parameters live in one flat vector, checked for what must not leave a user."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import ModuleError
from .chance import Chance
from .factors import Factors
from .stackable import Linear, stackable


class FlatModule:
    """A working copy of `module` on `device`; the caller's module is left alone.

    `vector` holds all trainable parameters end to end: the module's own parameters are views of it, so that setting the
    vector sets the model, and a step of the model moves the vector.
    """

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        check_module(module)
        self._original = module
        self.module = stackable(copy.deepcopy(module)).to(device)
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        self.vector = torch.cat([p.detach().reshape(-1) for p in trainable]).clone()
        self.initial = self.vector.clone()  # what a run starts from; the vector itself moves
        start = 0
        for param in trainable:
            stop = start + param.numel()
            param.data = self.vector[start:stop].view_as(param)
            start = stop
        self._trainable = trainable
        self.named_shapes = {  # in the order of the vector; a shared parameter stands once
            name: param.shape for name, param in self.module.named_parameters() if param.requires_grad
        }
        names = {id(param): name for name, param in zip(self.named_shapes, trainable, strict=True)}
        self._homes = [
            (part._parameters, key, names[id(param)], param)  # a shared one has several
            for part in self.module.modules()
            for key, param in part._parameters.items()
            if param is not None and id(param) in names
        ]
        self._factors = Factors(trainable)
        for layer in self.module.modules():
            if isinstance(layer, Linear):
                layer.factors = self._factors
        self.chances = {name: part for name, part in self.module.named_modules() if isinstance(part, Chance)}
        self._keys = {f"{name}.key".lstrip(".") for name in self.chances}  # set by the engine, and no user's statistic
        self._buffers = {name: buffer.clone() for name, buffer in self._named_buffers().items()}

    @property
    def dim(self) -> int:
        """Number of trainable parameters."""
        return len(self.vector)

    def load(self, params: Tensor) -> nn.Module:
        """The module with these parameters."""
        self.vector.copy_(params)
        return self.module

    def export(self, params: Tensor) -> nn.Module:
        """A new module like the original one, with these parameters, on the CPU."""
        module = copy.deepcopy(self._original).cpu()
        trainable = [p for p in module.parameters() if p.requires_grad]
        pieces = torch.split(params.cpu(), [p.numel() for p in trainable])
        for param, values in zip(trainable, pieces, strict=True):
            param.data.copy_(values.view_as(param))
        return module

    def same_apart_from_training(self, other: FlatModule) -> bool:
        """Whether the two differ in what is trained alone: layers, types, buffers and frozen parameters agree."""
        return (
            self.vector.dtype == other.vector.dtype
            and str(self.module) == str(other.module)
            and self._buffers.keys() == other._buffers.keys()
            and all(_same(other._buffers[name], buffer) for name, buffer in self._buffers.items())
        )

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Within, the module has these in the place of its trainable parameters, one for each of `named_shapes`."""
        try:
            for parameters, key, name, _ in self._homes:
                parameters[key] = tensors[name]  # type: ignore[assignment]  # as torch.func.functional_call does
            yield
        finally:
            for parameters, key, _, own in self._homes:
                parameters[key] = own

    def set_keys(self, keys: Tensor) -> None:
        """Hand each `Chance` of the module its key: (chances, 2) int32."""
        if not self.chances:
            return
        for chance, key in zip(self.chances.values(), keys, strict=True):
            chance.key.copy_(key)
            chance.draws = 0

    def _named_buffers(self) -> dict[str, Tensor]:
        """What must stay as it is while users train: buffers, and parameters that are not trained."""
        buffers = {name: buffer for name, buffer in self.module.named_buffers() if name not in self._keys}
        frozen = {name: param.data for name, param in self.module.named_parameters() if not param.requires_grad}
        return buffers | frozen

    def check_buffers(self) -> None:
        """Refuse, and undo, a change of a buffer during local training: it would carry a user's data unclipped."""
        now = self._named_buffers()  # read anew: a module may also put another tensor in a buffer's place
        changed = [name for name, before in self._buffers.items() if not _same(now.get(name), before)]
        changed += [name for name in now if name not in self._buffers]
        if changed:
            for name, before in self._buffers.items():
                owner, own = self.module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
                if own in owner._parameters:
                    owner.get_parameter(own).data = before.clone()
                else:
                    owner._buffers[own] = before.clone()
            kind = "buffer" if changed[0] in dict(self.module.named_buffers()) else "frozen parameter"
            raise ModuleError(
                f"{kind} {changed[0]!r} of the model changed while a user trained, and would carry private statistics "
                "past the clip: freeze it, or use a layer that keeps none (GroupNorm or LayerNorm, not batch norm)"
            )

    def descend(self, loss: Tensor, lr: float) -> None:
        """One step of SGD. A parameter that the loss does not use stays where it is."""
        if not loss.requires_grad:
            raise ModuleError("the loss does not depend on the model's trainable parameters: return what it computed")
        with self._factors.collecting(loss), torch.no_grad():
            gradients = torch.autograd.grad(loss, self._trainable, allow_unused=True)
            for param, gradient in zip(self._trainable, gradients, strict=True):
                if gradient is not None:
                    param.sub_(gradient, alpha=lr)
            self._factors.subtract(lr)


def _same(now: Tensor | None, before: Tensor) -> bool:
    """Equal to the last bit, NaN to NaN."""
    if now is None or torch._C._functorch.is_functorch_wrapped_tensor(now):  # the latter was left by a stack of users
        return False
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    return bool(((now == before) | ((now != now) & (before != before))).all())


def check_module(module: nn.Module) -> None:
    """Refuse what cannot be trained privately: running statistics, nothing to train, or mixed parameter types."""
    if not isinstance(module, nn.Module):
        raise ModuleError(f"model is a {type(module).__name__} but must be a torch.nn.Module: wrap it in one")
    for name, layer in module.named_modules():
        if getattr(layer, "track_running_stats", False):
            raise ModuleError(
                f"layer {name or 'model'!r} ({type(layer).__name__}) keeps running statistics of users' data, which "
                "would pass the clip and the noise: use torch.nn.GroupNorm or LayerNorm, or track_running_stats=False"
            )
    dtypes = {p.dtype for p in module.parameters() if p.requires_grad}
    if not dtypes:
        raise ModuleError("model has 0 trainable parameters but needs at least 1: set requires_grad on some")
    if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ModuleError(f"trainable parameters are {names} but must share one type: call model.float()")
