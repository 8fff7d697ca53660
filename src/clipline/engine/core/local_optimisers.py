"""Local optimisers beyond plain SGD, for one user or for a stack of users: the arithmetic of `torch.optim`.

Parameters, gradients and state have the users as their first axis. A user's step uses that user's slice alone. Plain
SGD never comes here: the trainers do it themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...federated.local_sgd import LocalAdam, LocalSGD, LocalTraining

_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class LocalOptimiser:
    """What one step does to users' parameters, for these settings.

    Order: the gradient of the proximal term is added, the whole is clipped, then comes the optimiser with its weight
    decay. A parameter that the loss does not use (gradient None) is not changed, as in torch.optim.
    """

    def __init__(self, local: LocalTraining) -> None:
        self._local = local
        self._momentum = local.momentum if isinstance(local, LocalSGD) else 0.0
        self._adam = local if isinstance(local, LocalAdam) else None

    def init(self, params: Sequence[Tensor]) -> list[Tensor]:
        """The state before the first step, all zeros, of parameters (users, *shape): some tensors for each."""
        return [piece for param in params for piece in self._zeros(param)]

    def step(
        self,
        params: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        state: Sequence[Tensor],
        reference: Sequence[Tensor],
        rates: Tensor,
        working: Tensor | None = None,
    ) -> None:
        """One step in place, of parameters and state. `rates` (users,) are the learning rates.

        `reference` are the round's parameters for the first of `params`; those without one have no proximal term. Users
        for whom `working` (users,) is false change nothing.
        """
        named = [None if own is None else own.to(param.dtype) for own, param in zip(gradients, params, strict=True)]
        if self._local.proximal:
            pull = [self._local.proximal * (param - start) for param, start in zip(params, reference, strict=False)]
            named[: len(pull)] = [
                None if own is None else own + back for own, back in zip(named[: len(pull)], pull, strict=True)
            ]
        if self._local.clip_norm is not None:
            named = _clipped(named, self._local.clip_norm)
        each = len(state) // len(params)
        for number, (param, gradient) in enumerate(zip(params, named, strict=True)):
            if gradient is not None:
                own_state = state[number * each : (number + 1) * each]
                change = self._change(param, gradient, own_state, rates, working)
                param.sub_(change if working is None else torch.where(_along(working, param), change, 0.0))

    def _zeros(self, param: Tensor) -> list[Tensor]:
        if self._adam is not None:  # moments, and how many steps each user has taken
            counts = torch.zeros(len(param), dtype=torch.float64, device=param.device)
            return [torch.zeros_like(param), torch.zeros_like(param), counts]
        return [torch.zeros_like(param)] if self._momentum else []

    def _change(
        self, param: Tensor, gradient: Tensor, state: Sequence[Tensor], rates: Tensor, working: Tensor | None
    ) -> Tensor:
        """What is subtracted from the parameter. The state moves on."""
        decay = self._local.weight_decay
        if self._adam is not None:
            first, second, counts = state
            beta1, beta2 = self._adam.betas
            _move(first, beta1 * first + (1 - beta1) * gradient, working)
            _move(second, beta2 * second + (1 - beta2) * gradient.square(), working)
            _move(counts, counts + 1, working)
            steps = counts.clamp(min=1)
            # In float64: in float32 1 - 0.999 keeps five digits.
            size = (rates.double() / (1 - _power(beta1, steps))).to(param.dtype)
            spread = (1 - _power(beta2, steps)).sqrt().to(param.dtype)
            change = _along(size, param) * first / (second.sqrt() / _along(spread, param) + self._adam.eps)
            return change + _along(rates, param) * decay * param if decay else change
        direction = gradient + decay * param if decay else gradient
        if self._momentum:
            (velocity,) = state
            _move(velocity, self._momentum * velocity + direction, working)
            direction = velocity
        return _along(rates, param) * direction


class SingleUser:
    """The optimiser of one user in one round, for parameters without an axis of users. They change in place."""

    def __init__(self, local: LocalTraining, params: Sequence[Tensor], lr: float, shared: int | None = None) -> None:
        """The first `shared` parameters are the round's and may be pulled back to it; all, if left out."""
        self._optimiser = LocalOptimiser(local)
        self._params = [param.detach().unsqueeze(0) for param in params]  # views
        self._reference = [param.clone() for param in self._params[:shared]] if local.proximal else []
        self._state = self._optimiser.init(self._params)
        self._rates = torch.full((1,), lr, dtype=self._params[0].dtype, device=self._params[0].device)

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """One step along these gradients, of the parameters' own shapes."""
        with_axis = [None if gradient is None else gradient.detach().unsqueeze(0) for gradient in gradients]
        self._optimiser.step(self._params, with_axis, self._state, self._reference, self._rates)


def _clipped(gradients: Sequence[Tensor | None], clip_norm: float) -> list[Tensor | None]:
    """Each user's gradient over all parameters, scaled down to a norm of at most `clip_norm`."""
    norms = [torch.linalg.vector_norm(own.reshape(len(own), -1), dim=1) for own in gradients if own is not None]
    if not norms:
        return list(gradients)
    whole = torch.linalg.vector_norm(torch.stack(norms, dim=1), dim=1)  # users first in memory: rounded alike
    factor = (clip_norm / (whole + _CLIP_EPS)).clamp(max=1.0)
    return [None if own is None else own * _along(factor, own) for own in gradients]


def _power(base: float, exponents: Tensor) -> Tensor:
    """Base ** exponents, for each user alike: `torch.pow` rounds the last users of a stack by another routine."""
    return (exponents * math.log(base)).exp() if base > 0 else torch.zeros_like(exponents)


def _along(of_users: Tensor, piece: Tensor) -> Tensor:
    """(users,) -> (users, 1, ...), to go with a piece (users, *shape)."""
    return of_users.view(-1, *[1] * (piece.ndim - 1))


def _move(piece: Tensor, value: Tensor, working: Tensor | None) -> None:
    """Write the value in place, for the users whose `working` is true, or for all."""
    piece.copy_(value if working is None else torch.where(_along(working, piece), value, piece))
