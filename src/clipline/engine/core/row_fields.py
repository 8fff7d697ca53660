"""Matrix parameters of which a user touches few rows: only those rows are gathered, trained and summed.

`RowFields` maps a parameter's name to the field of the population that holds row numbers, as {"tags.weight": "words"}.
A user trains on a small matrix of the user's own rows, and the field is renumbered to index that matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...data.packed_field import is_mapped
from ...data.population import Population
from ...errors import ModuleError
from ...federated.local_sgd import Batch
from .updates import Dense, Piece, Rows, Updates
from .working_model import WorkingModel

RowFields = Mapping[str, str]


def check_row_fields(row_fields: RowFields, model: WorkingModel, population: Population) -> None:
    """Refuse unknown names, parameters that are not matrices, and fields that are not row numbers."""
    shapes = model.named_shapes
    for name, field in row_fields.items():
        if len(shapes.get(name, ())) != 2:
            raise ModuleError(
                f"row_fields names {name!r}, which is no trainable matrix of the model: name one, or none"
            )
        if field not in population.fields or population.fields[field].dtype.kind not in "iu":
            raise ModuleError(
                f"row_fields names {field!r}, which is no field of whole numbers of the population: name one, or none"
            )
        numbers = population.fields[field]
        if not is_mapped(numbers) and numbers.size and int(numbers.min()) < 0:
            raise ModuleError(f"field {field!r} holds a number below 0 but rows count from 0: pad with 0 instead")
    if len(set(row_fields.values())) < len(row_fields):
        raise ModuleError("row_fields names a field twice, which would be renumbered twice: give each its own field")


@dataclass(frozen=True, eq=False)
class TouchedRows:
    """The rows that each user touches, padded to the same number for all."""

    rows: Tensor  # (users, room): ascending; 0 where padded
    used: Tensor  # (users, room): false where padded

    def of_users(self, users: slice | Tensor) -> TouchedRows:
        """The rows of some users."""
        return TouchedRows(self.rows[users], self.used[users])

    def padded_to(self, room: int) -> TouchedRows:
        """The same rows with less padding, in memory of their own: nobody with a step touches more than `room`."""
        return TouchedRows(self.rows[:, :room].clone(), self.used[:, :room].clone())


class RowUsage:
    """Which of `height` rows appear in each user's numbers (users, ...). Larger numbers count as the last row.

    Whoever is `idle` (users,) has no example of their own, but another's to pad with: row 0 alone counts for them.
    """

    def __init__(self, numbers: Tensor, height: int, idle: NDArray[np.bool_] | None = None) -> None:
        self._shape, self._height = numbers.shape, height
        self._numbers = numbers.reshape(len(numbers), -1).long().clamp(0, height - 1)
        if idle is not None and idle.any():
            nobody = torch.from_numpy(idle).to(numbers.device, non_blocking=True)
            self._numbers.masked_fill_(nobody.unsqueeze(1), 0)
        zeros = torch.zeros(len(numbers), height, dtype=torch.int64, device=numbers.device)
        self._present = zeros.scatter_(1, self._numbers, 1)
        self._rank = self._present.cumsum(dim=1)  # of each row among those that the user touches, from 1

    def rooms(self, least: int) -> NDArray[np.int64]:
        """(users,): the padded number of rows of each user: `least` times a power of four, or `height`.

        The model can see it, so it depends on the user's own numbers alone. Finer steps would spare padding, but users
        of each number are trained by themselves, which means more launches.
        """
        counts: NDArray[np.int64] = self._rank[:, -1].cpu().numpy()
        doublings = np.ceil(np.log2(np.maximum(counts, 1) / least)).clip(0).astype(np.int64)
        return np.asarray(np.minimum(least << 2 * -(-doublings // 2), self._height), np.int64)

    def touched(self, room: int | None = None) -> tuple[TouchedRows, Tensor]:
        """The rows of each user, padded to `room` or to the user with most, and the numbers as indices into them."""
        if room is None:
            room = max(1, int(self._rank[:, -1].max())) if len(self._rank) else 1
        count, device = len(self._numbers), self._numbers.device
        rows = torch.arange(self._height, device=device).expand(count, self._height)
        slots = torch.where(self._present > 0, self._rank - 1, room)  # absent rows go to a spare slot
        chosen = torch.zeros(count, room + 1, dtype=torch.int64, device=device).scatter_(1, slots, rows)
        used = torch.arange(room, device=device) < self._rank[:, -1:]
        places = (self._rank.gather(1, self._numbers) - 1).view(self._shape)
        return TouchedRows(chosen[:, :room].contiguous(), used), places


def renumber_rows(
    examples: Batch, row_fields: RowFields, heights: Mapping[str, int]
) -> tuple[Batch, dict[str, TouchedRows]]:
    """The examples with renumbered fields, and the rows of each parameter, padded to the user with most."""
    examples, rows = dict(examples), dict[str, TouchedRows]()
    for name, field in row_fields.items():
        rows[name], examples[field] = RowUsage(examples[field], heights[name]).touched()
    return examples, rows


def starting_params(
    params: Tensor, shapes: Mapping[str, torch.Size], rows: Mapping[str, TouchedRows], run: Tensor | None = None
) -> dict[str, Tensor]:
    """The parameters each user starts from, by name: (users, *shape), or the user's own rows (users, touched, width).

    `params` is (runs, dim) and `run` (users,) is each user's run. Without `run` there is one run: the result is (1,
    *shape), shared by all users, and nothing is copied.
    """
    pieces = torch.split(params, [shape.numel() for shape in shapes.values()], dim=1)
    first = {}
    for (name, shape), piece in zip(shapes.items(), pieces, strict=True):
        whole = piece.reshape(len(params), *shape)
        if name in rows:
            own = rows[name].rows
            first[name] = F.embedding(own, whole[0]) if run is None else whole[run.unsqueeze(1), own]
        else:
            first[name] = whole if run is None else whole[run]
    return first


def build_updates(
    stack: Sequence[Tensor],
    first: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    rows: Mapping[str, TouchedRows],
) -> Updates:
    """The updates: trained parameters `stack` (users, ...) minus `first`. May write into the stack."""
    start, pieces = 0, list[Piece]()
    for (name, shape), values in zip(shapes.items(), stack, strict=True):
        own = rows.get(name)
        values.sub_(first[name])
        if own is not None:
            # Padding must be zero, whatever the loss did there: it would be added to row 0 many times.
            if len(values) > 1 or values.device.type != "cpu" or not bool(own.used.all()):
                values.masked_fill_(~own.used.unsqueeze(2), 0.0)
            pieces.append(Rows(start, shape[0], own.rows, values))
        else:  # reshape, not flatten: a scalar parameter has no axis to flatten
            pieces.append(Dense(start, values.reshape(len(values), -1)))
        start += shape.numel()
    return Updates(pieces)
