"""The two ways to train a cohort, and the choice between them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Literal, Protocol

from torch import Tensor

from ..errors import check_choice
from ..federated.sampling import Cohort
from .one_by_one import OneByOne
from .stacked.step import SlowEngineWarning
from .stacked.trainer import CannotStack, Stacked
from .updates import Updates
from .working_model import WorkingModel

Engine = Literal["auto", "one-by-one", "stacked"]
SMALL_MODEL = 100_000  # parameters below which starting an operation takes longer than doing it for one user
ENGINES: tuple[Engine, ...] = ("auto", "one-by-one", "stacked")


class LocalTrainer(Protocol):
    """Trains the users of a cohort, each from the same parameters on their own examples."""

    @property
    def flat(self) -> WorkingModel:
        """The working copy of the model."""
        ...

    def train(self, params: Tensor, cohort: Cohort, round_index: int) -> Iterator[Updates]:
        """Updates (params after local SGD - params) of the cohort's users in blocks: PRIVATE."""
        ...

    def begin(self, params: Tensor, cohort: Cohort, round_index: int) -> None:
        """Begin what `train` will be asked for next, if the device works while this process goes on."""
        ...

    def forget(self) -> None:
        """Let go of what was begun: no more rounds come."""
        ...


def choose_trainer(engine: Engine, plain: OneByOne, cohort_size: int, varying: bool = True) -> LocalTrainer:
    """`plain` itself or a stack on top of it.

    "auto" stacks where one user is too little work: on a GPU, and for small models on processor cores too; if the model
    cannot be stacked it goes on without, and says so where that is much slower. `varying` cohorts are not always of
    the expected size.
    """
    check_choice("engine", engine, ENGINES)
    on_gpu = plain.device.type == "cuda"
    if engine == "one-by-one" or (engine == "auto" and not on_gpu and plain.flat.dim >= SMALL_MODEL):
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
