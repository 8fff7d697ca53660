"""Chooses how a cohort is trained: one user after the other, or stacked."""

from __future__ import annotations

import warnings
from typing import Literal

from ..errors import check_choice
from ..federated.backend import LocalTrainer
from .one_by_one import OneByOne
from .stacked.agreement import WrongStack
from .stacked.probe import CannotStack
from .stacked.step import SlowEngineWarning
from .stacked.trainer import Stacked

Engine = Literal["auto", "one-by-one", "stacked"]
SMALL_MODEL = 100_000  # parameters: below, launching an operation for one user costs more than the operation itself
ENGINES: tuple[Engine, ...] = ("auto", "one-by-one", "stacked")


def choose_trainer(engine: Engine, plain: OneByOne, cohort_size: int, varying: bool = True) -> LocalTrainer:
    """`plain` itself, or a stacked trainer on top of it.

    "auto" stacks where one user is too little work for the device: on a GPU, and for small models on CPU cores. If the
    model cannot be stacked, users train one by one, with a warning on a GPU, where that is much slower, and wherever a
    stack would train wrongly. `varying` says that cohort sizes vary around `cohort_size`, as under Poisson sampling.
    """
    check_choice("engine", engine, ENGINES)
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
