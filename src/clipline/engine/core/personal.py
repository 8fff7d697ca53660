"""Personal parameters of all users who took part so far: PRIVATE, outside every release.

A user's row is a function of the user's own data, the rounds in which the user was drawn, and released parameters. It
is kept for each state that something may still ask for, since a checkpoint may be written while the next round trains.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import RunError
from ...federated.backend import PersonalRows

Rows = Mapping[int, Tensor]  # user's place in the population -> (personal,)


class PersonalStore:
    """Rows (personal,) of users by place in the population, as they were before each round that is still of interest.

    Who never took part starts from `initial`, the model's own values.
    """

    def __init__(self, initial: Tensor) -> None:
        self.initial = initial.detach().cpu().clone()
        self._before: dict[int, Rows] = {0: {}}  # round -> rows before it

    def __repr__(self) -> str:
        return "PersonalStore(private)"

    def begin(self, round_index: int) -> None:
        """Start a run at this round: from no rows at round 0, else from the rows that were kept for it, or refused."""
        if round_index == 0:
            self._before = {0: {}}
        elif round_index not in self._before:
            raise RunError(
                f"state.round_index={round_index} must be that of the last state of this training, as personal "
                "parameters are kept of that one alone: go on with Training.resume, whose checkpoint has them"
            )

    def request(self, round_index: int, users: NDArray[np.int64]) -> PersonalRows:
        """What these users start from in this round, with room for what comes of it."""
        rows = self._before[round_index]
        start = torch.stack([rows.get(user, self.initial) for user in users.tolist()]) if len(users) else None
        start = self.initial.new_zeros(0, len(self.initial)) if start is None else start
        return PersonalRows(start, start.clone())

    def add(self, round_index: int, users: NDArray[np.int64], trained: PersonalRows) -> None:
        """After this round: these users' rows are what they trained."""
        own = trained.result().unbind(0)
        self._before[round_index + 1] = {**self._before[round_index], **dict(zip(users.tolist(), own, strict=True))}

    def forget(self, before: int) -> None:
        """No state earlier than before this round is of interest any more."""
        self._before = {index: rows for index, rows in self._before.items() if index >= before}

    def at(self, round_index: int) -> Rows:
        """The rows before this round."""
        return self._before[round_index]

    @property
    def latest(self) -> Rows:
        """The rows after the last round."""
        return self._before[max(self._before)]

    def restore(self, round_index: int, initial: Tensor, rows: Rows) -> None:
        """What a checkpoint had."""
        self.initial, self._before = initial, {round_index: rows}
