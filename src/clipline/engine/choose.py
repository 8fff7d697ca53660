"""The two ways to train a cohort, and the choice between them."""

from __future__ import annotations

import warnings
from typing import Literal

from ..errors import check_choice
from ..federated.backend import LocalTrainer
from .one_by_one import OneByOne
from .stacked.probe import CannotStack
from .stacked.step import SlowEngineWarning
from .stacked.trainer import Stacked

Engine = Literal["auto", "one-by-one", "stacked"]
SMALL_MODEL = 100_000  # parameters below which starting an operation takes longer than doing it for one user
ENGINES: tuple[Engine, ...] = ("auto", "one-by-one", "stacked")


def choose_trainer(engine: Engine, plain: OneByOne, cohort_size: int, varying: bool = True) -> LocalTrainer:
    """`plain` itself or a stack on top of it.

    "auto" stacks where one user is too little work: on a GPU, and for small models on processor cores too; if the model
    cannot be stacked it goes on without, and says so where that is much slower. `varying` cohorts are not always of
    the expected size.
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
        if on_gpu:
            slow = f"{error}; users train one by one, which is slower on a GPU"
            warnings.warn(slow, SlowEngineWarning, stacklevel=2)
        return plain
