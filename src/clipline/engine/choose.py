"""Chooses how a cohort is trained: one user after the other, stacked, or by single steps with shared weights."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Literal

from ..errors import check_choice
from ..federated.backend import LocalTrainer
from .one_by_one import OneByOne
from .single_step.trainer import SingleStep, can_share_weights
from .stacked.agreement import WrongStack
from .stacked.probe import CannotStack
from .stacked.step import SlowEngineWarning
from .stacked.trainer import Stacked

Engine = Literal["auto", "one-by-one", "stacked"]
SMALL_MODEL = 100_000  # parameters: below, launching an operation for one user costs more than the operation itself
ENGINES: tuple[Engine, ...] = ("auto", "one-by-one", "stacked")


def engine_in_words(trainer: LocalTrainer) -> str:
    """What this trainer does, in a sentence."""
    if isinstance(trainer, SingleStep):
        return trainer.in_words
    if isinstance(trainer, Stacked):
        return f"stacked: up to {trainer.block_size} users at once, each with parameters of their own"
    return "one by one: one user after the other"


def choose_trainer(engine: Engine, plain: OneByOne, cohort_size: int, varying: bool = True) -> LocalTrainer:
    """`plain` itself, or a trainer of many users at once on top of it.

    "auto" lets users of one example and one step share the round's weights, where the model can (`SingleStep`). Else it
    stacks or trains one by one.

    "auto" stacks where one user is too little work for the device: on a GPU, and for small models on CPU cores. If the
    model cannot be stacked, users train one by one, with a warning on a GPU, where that is much slower, and wherever a
    stack would train wrongly. `varying` says that cohort sizes vary around `cohort_size`, as under Poisson sampling.
    """
    check_choice("engine", engine, ENGINES)
    if engine == "auto" and can_share_weights(plain.problem):
        with suppress(CannotStack):
            return SingleStep(plain, cohort_size, varying=varying)
    on_gpu = plain.problem.device.type == "cuda"
    if engine == "one-by-one" or (engine == "auto" and not on_gpu and plain.problem.model.dim >= SMALL_MODEL):
        return plain
    try:
        return Stacked(plain, cohort_size, varying=varying)
    except CannotStack as error:
        if engine == "stacked":
            raise
        if on_gpu or isinstance(error, WrongStack):
            slow = f"{error}; users train one by one{', which is slower on a GPU' if on_gpu else ''}"
            warnings.warn(slow, SlowEngineWarning, stacklevel=2)
        return plain
