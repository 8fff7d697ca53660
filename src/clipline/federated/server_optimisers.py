"""Server optimisers. They see released means only, so their state is public too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from sys import float_info
from typing import Protocol

import torch
from torch import Tensor, nn

from ..errors import SettingError, check_number, refuse
from ..lr_schedules import FactorTable, LrSchedule, lr_factor, tabulated
from ..settings import check, check_declared, declared
from ..synonyms import refuses_unknown_keywords
from .mechanism import MeanNoise, Release

ServerState = Mapping[str, Tensor]
AVERAGE = "average of models"  # the name of that tensor in a server's state
_HIGHEST_RATE = 1e30  # that of the setting server_lr
_LENGTH = 0.37  # of all steps of `ServerNormalised`, in units of sqrt(rounds * parameters), if all went one way
_LARGEST_CHANGE = 5.0  # of a unit's input by those steps, in units of what comes in: noise drowned models beyond
_KEPT_OF_SQUARES = 0.99  # of their running mean, from round to round
_KEPT_OF_AVERAGE = 0.9  # of the average of models, from round to round
_LARGEST_FACTOR = 1e38  # finite in float32: where no user moved the model, its product with no momentum is no step


class ServerOptimiser(Protocol):
    """Turns a released mean update into the next parameters."""

    def init(self, params: Tensor) -> ServerState:
        """The state before the first round."""
        ...

    def update(self, params: Tensor, state: ServerState, release: Release) -> tuple[Tensor, ServerState]:
        """The next parameters and state; neither argument is altered."""
        ...


@refuses_unknown_keywords
@dataclass(frozen=True)
class ServerSGD:
    """SGD with momentum on the released mean, as in Algorithm 1.

    A round does `momentum = beta * momentum + mean` and `params += lr * momentum`, without Nesterov.

    Args:
      lr: Learning rate of the server.
      momentum: Share of the momentum that a round keeps. The paper has 0.9.
      lr_schedule: Changes the rate from round to round.

    Raises:
      SettingError: If `lr` is not above 0, or `momentum` is outside [0, 1).

    Example:
      >>> cl.Training(model, loss, people, server=cl.ServerSGD(lr=0.5), ...)
    """

    lr: float = declared("server_lr", default=1.0)
    momentum: float = declared("server_momentum")
    lr_schedule: LrSchedule | None = declared("server_lr_schedule")

    def __post_init__(self) -> None:
        check_declared(self)

    def init(self, params: Tensor) -> ServerState:
        """No momentum yet."""
        return {"momentum": torch.zeros_like(params)}

    def update(self, params: Tensor, state: ServerState, release: Release) -> tuple[Tensor, ServerState]:
        """One step of SGD with momentum along the released mean."""
        momentum = (self.momentum * state["momentum"]).add_(release.mean.to(params))
        return (self.lr * momentum).add_(params), {"momentum": momentum}


@dataclass(frozen=True)
class _Adaptive:
    """What Adam and Yogi have in common: one step along the mean over the root of a second moment."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3
    lr_schedule: LrSchedule | None = declared("server_lr_schedule")

    def __post_init__(self) -> None:
        check_declared(self)
        check("server_lr", self.lr)
        check_number("server_beta1", self.beta1, at_least=0, below=1, way_out="0.9 is usual")
        check_number("server_beta2", self.beta2, at_least=0, below=1, way_out="0.99 is usual")
        way_out = "1e-3 is usual for federated Adam and Yogi"
        check_number("server_epsilon", self.epsilon, above=0, way_out=way_out)

    def init(self, params: Tensor) -> ServerState:
        """No moments yet, no step taken."""
        zeros = torch.zeros_like(params)
        return {"first": zeros, "second": zeros, "steps": torch.zeros((), dtype=torch.int64)}

    def update(self, params: Tensor, state: ServerState, release: Release) -> tuple[Tensor, ServerState]:
        """One step, with bias correction."""
        mean = release.mean.to(params)
        first = self.beta1 * state["first"] + (1 - self.beta1) * mean
        second = self._second(state["second"], mean.square())
        steps = state["steps"] + 1
        first_unbiased = first / (1 - self.beta1 ** int(steps))
        second_unbiased = second / (1 - self.beta2 ** int(steps))
        params = params + self.lr * first_unbiased / (second_unbiased.sqrt() + self.epsilon)
        return params, {"first": first, "second": second, "steps": steps}

    def _second(self, second: Tensor, square: Tensor) -> Tensor:
        raise NotImplementedError


@refuses_unknown_keywords
@dataclass(frozen=True)
class ServerAdam(_Adaptive):
    """Adam on the released mean, with bias correction. For study: the paper found it weaker under noise.

    Args:
      lr: Learning rate of the server.
      beta1: Decay of the first moment.
      beta2: Decay of the second moment.
      epsilon: Added to the root of the second moment. It has nothing to do with privacy.
      lr_schedule: Changes the rate from round to round.

    Raises:
      SettingError: If a number is outside its range.

    Example:
      >>> cl.Training(model, loss, people, server=cl.ServerAdam(lr=0.01), ...)
    """

    def _second(self, second: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * second + (1 - self.beta2) * square


@refuses_unknown_keywords
@dataclass(frozen=True)
class ServerYogi(_Adaptive):
    """Yogi on the released mean. For study.

    It is like Adam, but the second moment moves by at most `(1 - beta2) * mean^2` in a round.

    Args:
      lr: Learning rate of the server.
      beta1: Decay of the first moment.
      beta2: Decay of the second moment.
      epsilon: Added to the root of the second moment. It has nothing to do with privacy.
      lr_schedule: Changes the rate from round to round.

    Raises:
      SettingError: If a number is outside its range.

    Example:
      >>> cl.Training(model, loss, people, server=cl.ServerYogi(lr=0.01), ...)
    """

    def _second(self, second: Tensor, square: Tensor) -> Tensor:
        return second - (1 - self.beta2) * torch.sign(second - square) * square


@refuses_unknown_keywords
@dataclass(frozen=True)
class ServerNormalised:
    """Momentum in steps of a length that the number of rounds decides: no rate to tune.

    With u the released mean in clips and P the number of parameters, a round does
    `momentum = 0.9 * momentum + 0.1 * u` and `params += lr * sqrt(P) * momentum / s`. Here `s^2` is the running mean of
    `|u|^2` (0.99, bias-corrected). Of noise that cancels in later rounds, `|u|^2` counts only the part that stays.

    The clip's scale drops out, and so nearly does the users' learning rate. All of it is made of released and public
    numbers, so it costs no privacy.

    Args:
      lr: How far a round moves a parameter, as root mean square, if all rounds pull one way. Left out it is
        min(0.37, 5 / sqrt(n)) / sqrt(rounds), which needs no tuning. Here n is the largest number of inputs that a unit
        of a trained layer has. Models with a single weight matrix count as n = 1.
      momentum: Share of the momentum that a round keeps.
      lr_schedule: Changes the rate from round to round.

    Raises:
      SettingError: If `lr` is not above 0, or `momentum` is outside [0, 1).

    Example:
      >>> cl.Training(model, loss, people, server=cl.ServerNormalised(), ...)
    """

    lr: float | None = declared("server_lr")
    momentum: float = declared("server_momentum")
    lr_schedule: LrSchedule | None = declared("server_lr_schedule")

    def __post_init__(self) -> None:
        check_declared(self)

    def init(self, params: Tensor) -> ServerState:
        """No momentum yet, no square seen."""
        nothing = params.new_zeros((), dtype=torch.float64)
        return {"momentum": torch.zeros_like(params), "square": nothing, "weight": nothing}

    def update(self, params: Tensor, state: ServerState, release: Release) -> tuple[Tensor, ServerState]:
        """One step along the momentum. Nothing is read back from a GPU."""
        if self.lr is None:
            raise refuse("lr", None, "given where no training says how many rounds there are", "give 0.03, say")
        noise = MeanNoise(1.0, 0.0, 0.0) if release.noise is None else release.noise
        clip = noise.clip if math.isfinite(noise.clip) else 1.0
        u = release.mean / clip
        momentum = (self.momentum * state["momentum"]).add_(u.to(params), alpha=1 - self.momentum)
        # Noise that will cancel makes |u| long and moves no model: what stays of it is put in its place.
        without_noise = (torch.linalg.vector_norm(u) ** 2 - len(u) * noise.stddev**2).clamp_min(0)
        lasting = without_noise + len(u) * noise.lasting**2
        square = _KEPT_OF_SQUARES * state["square"] + (1 - _KEPT_OF_SQUARES) * lasting
        weight = _KEPT_OF_SQUARES * state["weight"] + (1 - _KEPT_OF_SQUARES)
        length = (square / weight).sqrt()
        step = (self.lr * math.sqrt(len(u)) / length).clamp_max(_LARGEST_FACTOR) * momentum
        return step.add_(params), {"momentum": momentum, "square": square, "weight": weight}


@dataclass(frozen=True)
class AveragedServer:
    """A server optimiser whose state also has the exponential average of all models released so far.

    A released model is public, and so is any average of models. The first models count for as much as they should in
    an average of few (bias-corrected).
    """

    optimiser: ServerOptimiser

    def init(self, params: Tensor) -> ServerState:
        """No model released yet: the average is the initial one."""
        weight = params.new_zeros((), dtype=torch.float64)
        return {**self.optimiser.init(params), AVERAGE: params.clone(), f"weight of {AVERAGE}": weight}

    def update(self, params: Tensor, state: ServerState, release: Release) -> tuple[Tensor, ServerState]:
        """The optimiser's step, and the new model's share in the average."""
        inner = dict(state)
        average, before = inner.pop(AVERAGE), inner.pop(f"weight of {AVERAGE}")
        params, after = self.optimiser.update(params, inner, release)
        weight = _KEPT_OF_AVERAGE * before + (1 - _KEPT_OF_AVERAGE)
        share = ((1 - _KEPT_OF_AVERAGE) / weight).to(params)
        own = {AVERAGE: torch.lerp(average, params, share), f"weight of {AVERAGE}": weight}
        return params, {**after, **own}


Ours = ServerSGD | ServerAdam | ServerYogi | ServerNormalised


@dataclass(frozen=True)
class ScheduledServer:
    """A server optimiser whose `lr_schedule` is followed over `rounds` rounds. The state counts the rounds."""

    optimiser: Ours
    rounds: int

    def init(self, params: Tensor) -> ServerState:
        """The optimiser's own state, and no round yet."""
        return {**self.optimiser.init(params), "rounds_done": torch.zeros((), dtype=torch.int64)}

    def update(self, params: Tensor, state: ServerState, release: Release) -> tuple[Tensor, ServerState]:
        """One step at the rate of this round."""
        done = state["rounds_done"]
        assert self.optimiser.lr is not None, "known once the rounds are"
        lr = self.optimiser.lr * lr_factor(self.optimiser.lr_schedule, int(done), self.rounds)
        of_round = replace(self.optimiser, lr=max(lr, float_info.min))  # a rate of 0 is no setting
        inner = {name: value for name, value in state.items() if name != "rounds_done"}
        params, after = of_round.update(params, inner, release)
        return params, {**after, "rounds_done": done + 1}


def largest_fan_in(model: nn.Module) -> int:
    """How many inputs a unit of the trained layers has at most; 1 for a linear model, which bears any change.

    A tensor (1, ...) of three dimensions or more is no layer: an embedding of places, say.
    """
    shapes = [one.shape for one in model.parameters() if one.requires_grad]
    layers = [shape for shape in shapes if len(shape) == 2 or (len(shape) > 2 and shape[0] > 1)]
    return max(1, *(math.prod(shape[1:]) for shape in layers)) if len(layers) > 1 else 1


def for_rounds(optimiser: ServerOptimiser, rounds: int, fan_in: int = 1) -> ServerOptimiser:
    """The optimiser with what follows from rounds and model: its rate, and what a schedule's function says."""
    if isinstance(optimiser, ServerNormalised) and optimiser.lr is None:
        length = min(_LENGTH, _LARGEST_CHANGE / math.sqrt(fan_in))
        optimiser = replace(optimiser, lr=length / math.sqrt(rounds))
    if isinstance(optimiser, Ours):
        optimiser = replace(optimiser, lr_schedule=tabulated(optimiser.lr_schedule, rounds))
    return optimiser


def scheduled(optimiser: ServerOptimiser, rounds: int) -> ServerOptimiser:
    """The optimiser over `rounds` rounds: itself, if it has no schedule. A function is asked here, and never again."""
    optimiser = for_rounds(optimiser, rounds)
    if not isinstance(optimiser, Ours) or optimiser.lr_schedule is None:
        return optimiser
    schedule = optimiser.lr_schedule
    if isinstance(schedule, FactorTable):  # a rate that is no setting would end the run at this round
        assert optimiser.lr is not None
        highest = max(range(rounds), key=schedule)
        if optimiser.lr * schedule(highest) > _HIGHEST_RATE:
            raise SettingError(
                f"lr_schedule gave {schedule(highest)!r} in round {highest}, a rate above {_HIGHEST_RATE:g}: "
                "return the factor by which the rate is multiplied"
            )
    return ScheduledServer(optimiser, rounds)
