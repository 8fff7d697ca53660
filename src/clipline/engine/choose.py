"""Chooses how a cohort is trained (one user after the other, stacked, or by single steps) and by which processes."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

import torch
from torch import nn

from ..data.population import Population
from ..errors import check_choice, check_whole
from ..federated.backend import Backend, LocalTrainer
from ..federated.local_sgd import LocalTraining, Loss
from ..privacy.events import Sampling
from ..random.streams import Streams
from .core.one_by_one import OneByOne
from .core.problem import Problem, SlowEngineWarning
from .gpu.programs.triton_runtime import prepare_triton
from .isolation.guard import enough_resources
from .stacked.probe import CannotStack, WrongStack
from .stacked.single_step import SingleStep, can_share_weights
from .stacked.trainer import Stacked
from .stacked.vmap_layers import make_stackable
from .workers.forked import ForkedBackend, warn_of_too_many
from .workers.single import SingleProcess
from .workers.torchrun import TorchrunBackend

Workers = int | Literal["torchrun"]
Engine = Literal["auto", "one-by-one", "stacked"]
SMALL_MODEL = 100_000  # parameters: below, launching an operation for one user costs more than the operation itself
SMALL_WORK = 1 << 28  # tokens times parameters in a step of one user: above, a stack gains nothing on a core
ENGINES: tuple[Engine, ...] = ("auto", "one-by-one", "stacked")


def make_problem(
    model: nn.Module,
    loss: Loss,
    population: Population,
    local: LocalTraining,
    streams: Streams,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Problem:
    """A `Problem`, whose model has layers that run in a stack; on a GPU also what Triton needs before its kernels."""
    if torch.device(device).type == "cuda":
        prepare_triton()
    return Problem(model, loss, population, local, streams, device, make_stackable=make_stackable, **options)


@enough_resources()
@torch.enable_grad()  # also within a test function, which is called without gradients
def choose_trainer(
    engine: Engine, plain: OneByOne, cohort_size: int, varying: bool = True
) -> OneByOne | Stacked | SingleStep:
    """`plain` itself, or a trainer of many users at once on top of it.

    "auto" lets users of one example and one step share the round's weights, where the model can (`SingleStep`). Else it
    stacks or trains one by one.

    "auto" stacks where one user is too little work for the device: on a GPU, and on CPU cores for models that train few
    parameters and do little in a step, frozen parameters included, if a user is rounded alike whoever else is in the
    stack (`stacked/rounding.py`). If the model cannot be stacked, users train one by one, with a warning on a GPU,
    where that is much slower, and wherever a stack would train wrongly. Personal parameters, which would carry such
    rounding on, are refused in any other stack. `varying` says that cohort sizes vary around `cohort_size`, as under
    Poisson sampling. The trainer's `in_words` says what runs.
    """
    check_choice("engine", engine, ENGINES)
    not_single = ""
    if engine == "auto" and can_share_weights(plain.problem):
        try:
            return SingleStep(plain, cohort_size, varying=varying)
        except CannotStack as error:
            not_single = f"; not in single steps: {error}"
    on_gpu = plain.problem.device.type == "cuda"
    if engine == "one-by-one":
        return plain
    if engine == "auto" and not on_gpu and (enough := _enough_for_a_core(plain.problem)):
        plain.reason = enough + not_single
        return plain
    try:
        stacked = Stacked(plain, cohort_size, varying=varying)
        personal = bool(plain.problem.model.personal_shapes)
        if stacked.rounds_by_company and (personal or (engine == "auto" and not on_gpu)):
            why = f"stacking is disabled because {stacked.rounds_by_company}"
            if engine == "stacked":
                raise CannotStack(f"personal parameters need exact stacks, and {why}: use engine='one-by-one'")
            plain.reason = why + not_single
            return plain
        if not_single:
            stacked.reason += not_single
        return stacked
    except CannotStack as error:
        if engine == "stacked":
            raise
        if on_gpu or isinstance(error, WrongStack):
            slow = f"{error}; users train one by one{', which is slower on a GPU' if on_gpu else ''}"
            warnings.warn(slow, SlowEngineWarning, stacklevel=2)
        plain.reason = str(error)
        return plain


def work_of_a_step(problem: Problem) -> int:
    """Tokens times parameters, frozen ones included, in a full batch of one user.

    The tokens of an example are the entries of its largest field of whole numbers; an example without one counts once.
    """
    fields = problem.population.fields.values()
    tokens = max((math.prod(field.shape[1:]) for field in fields if field.dtype.kind in "iu"), default=1)
    return problem.local.batch_size * max(tokens, 1) * sum(p.numel() for p in problem.model.module.parameters())


def _enough_for_a_core(problem: Problem) -> str:
    """Why one user keeps a core busy, in words; "" if a user does not."""
    if problem.model.dim >= SMALL_MODEL:
        return f"{problem.model.dim:,} trained parameters keep a core busy"
    work = work_of_a_step(problem)
    return f"a step of one user keeps a core busy ({work:.2g} tokens times parameters)" if work >= SMALL_WORK else ""


def choose_backend(workers: Workers, trainer: LocalTrainer, problem: Problem, sampling: Sampling) -> Backend:
    """The backend of this process alone (1), of `workers` processes on this machine, or of torchrun's processes."""
    if workers == "torchrun":
        return TorchrunBackend(trainer, problem, sampling)
    check_whole("workers", workers, at_least=1, way_out="1 is this process alone, 'torchrun' all that it started")
    if workers == 1:
        return SingleProcess(trainer)
    forked = ForkedBackend(trainer, problem, [sampling], workers)
    warn_of_too_many(workers)
    return forked
