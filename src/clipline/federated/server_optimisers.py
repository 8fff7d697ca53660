"""Server optimisers. They see released means only, so their state is public too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from sys import float_info
from typing import Protocol

import torch
from torch import Tensor

from ..errors import SettingError, check_number
from ..lr_schedules import FactorTable, LrSchedule, lr_factor, tabulated
from ..settings import check, check_declared, declared
from ..synonyms import refuses_unknown_keywords
from .mechanism import Release

ServerState = Mapping[str, Tensor]
_HIGHEST_RATE = 1e30  # that of the setting server_lr


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
    """Algorithm 1: momentum <- beta * momentum + mean; params <- params + lr * momentum (no Nesterov).

    `lr_schedule` changes the rate from round to round, here as in the other server optimisers: see `lr_factor`.
    """

    lr: float = declared("server_lr")
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
    """Adam on the released mean, with bias correction. For study: the paper found it weaker under noise."""

    def _second(self, second: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * second + (1 - self.beta2) * square


@refuses_unknown_keywords
@dataclass(frozen=True)
class ServerYogi(_Adaptive):
    """Yogi on the released mean: like Adam, but the second moment moves by at most (1 - beta2) mean^2. For study."""

    def _second(self, second: Tensor, square: Tensor) -> Tensor:
        return second - (1 - self.beta2) * torch.sign(second - square) * square


@dataclass(frozen=True)
class ScheduledServer:
    """A server optimiser whose `lr_schedule` is followed over `rounds` rounds. The state counts the rounds."""

    optimiser: ServerSGD | ServerAdam | ServerYogi
    rounds: int

    def init(self, params: Tensor) -> ServerState:
        """The optimiser's own state, and no round yet."""
        return {**self.optimiser.init(params), "rounds_done": torch.zeros((), dtype=torch.int64)}

    def update(self, params: Tensor, state: ServerState, release: Release) -> tuple[Tensor, ServerState]:
        """One step at the rate of this round."""
        done = state["rounds_done"]
        lr = self.optimiser.lr * lr_factor(self.optimiser.lr_schedule, int(done), self.rounds)
        of_round = replace(self.optimiser, lr=max(lr, float_info.min))  # a rate of 0 is no setting
        inner = {name: value for name, value in state.items() if name != "rounds_done"}
        params, after = of_round.update(params, inner, release)
        return params, {**after, "rounds_done": done + 1}


def scheduled(optimiser: ServerOptimiser, rounds: int) -> ServerOptimiser:
    """The optimiser over `rounds` rounds: itself, if it has no schedule. A function is asked here, and never again."""
    if isinstance(optimiser, ServerSGD | ServerAdam | ServerYogi) and optimiser.lr_schedule is not None:
        schedule = tabulated(optimiser.lr_schedule, rounds)
        if isinstance(schedule, FactorTable):  # a rate that is no setting would end the run at this round
            highest = max(range(rounds), key=schedule)
            if optimiser.lr * schedule(highest) > _HIGHEST_RATE:
                raise SettingError(
                    f"lr_schedule gave {schedule(highest)!r} in round {highest}, a rate above {_HIGHEST_RATE:g}: "
                    "return the factor by which the rate is multiplied"
                )
        optimiser = replace(optimiser, lr_schedule=schedule)
        return ScheduledServer(optimiser, rounds)
    return optimiser
