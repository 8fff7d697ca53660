"""The updates of a block of users: PRIVATE. In pieces, one a parameter, in the form in which they were computed.

A piece is `Dense`, `Rows` or `FactoredUpdates`. Each can be measured, added to a sum, and written out.

A norm is the same to the last bit whoever else is in the block. A library's own sum chooses the order of its additions
by the whole tensor, so by the number of users. That is no matter for the sum of updates, whose noise covers rounding.
But a bit that says whether the norm is within the clip may flip, and for many users at once. So squares are added by
halves, columns i and i + half, by operations that never see two users' numbers together. Columns of zeros at the end
change nothing, and the error is one rounding for each halving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_CHUNK = 1 << 24  # numbers converted to float64 at a time on a GPU, to bound memory
_CACHED = 1 << 16  # the same on a CPU core, to fit its cache
_FACTORS = 1 << 20  # the same of factors
_LEAF = 1024  # columns that are first added up by themselves: any number of such groups can be done at a time
_SQUARED = 1 << 18  # numbers squared in float64 at a time on a core; on a GPU `_CHUNK`


def _column_chunks(values: Tensor) -> Iterator[slice]:
    """Slices of the columns of values (users, width), as many as should be converted at a time."""
    step = max(256, (_CACHED if values.device.type == "cpu" else _CHUNK) // max(1, len(values)))
    for start in range(0, values.shape[1], step):
        yield slice(start, start + step)


def sum_columns(values: Tensor) -> Tensor:
    """(users,): the sum of each row of values (users, any)."""
    return _added_up(values.clone())


def squares_by_leaf(values: Tensor) -> Tensor:
    """(users, parts) float64: squares of values (users, width), added up in part; `sum_columns` gives their sums.

    How many parts depends on the width alone. No overflow for float32, whose square is far inside float64.
    """
    users, width = values.shape
    whole, rest = divmod(width, _LEAF)
    parts = values.new_zeros(users, whole + (rest > 0), dtype=torch.float64)
    step = max(1, (_SQUARED if values.device.type == "cpu" else _CHUNK) // (_LEAF * max(1, users)))
    squares = values.new_empty(users, min(step, whole), _LEAF, dtype=torch.float64)
    for first in range(0, whole, step):
        leaves = squares[:, : min(step, whole - first)]
        end = first + leaves.shape[1]
        leaves.copy_(values[:, first * _LEAF : end * _LEAF].view(leaves.shape))
        parts[:, first:end] = _added_up(leaves.square_())
    if rest:
        parts[:, -1] = _added_up(values[:, -rest:].to(torch.float64, copy=True).square_())
    return parts


def _added_up(values: Tensor) -> Tensor:
    """(...): sums of values (..., any) by halves, as if columns of zeros made their number a power of two.

    Writes into the values: give what is not used again.
    """
    width = values.shape[-1]
    while width > 1:
        half = 1 << (width - 1).bit_length() - 1
        values[..., : width - half] += values[..., half:width]
        width = half
    return values[..., 0] if width else values.sum(dim=-1)


@dataclass(frozen=True, eq=False)
class Dense:
    """Coordinates `start` to `start + width` of every user's update."""

    start: int
    values: Tensor = field(repr=False)  # (users, width)

    def __len__(self) -> int:
        return len(self.values)

    def squares(self) -> Tensor:
        """(users, parts) float64: squares of the values, added up in part."""
        return squares_by_leaf(self.values)

    def add_to(self, total: Tensor, scale: Tensor) -> None:
        """Add sum over users of scale (users,) times their values, in float64, to total (dim,).

        A user whose scale is 0 adds nothing, whatever the values: 0 times infinity is not 0.
        """
        self.add_weighted(total.unsqueeze(0), scale.unsqueeze(0), scale > 0)

    def add_weighted(self, totals: Tensor, weights: Tensor, counting: Tensor) -> None:
        """Add weights (runs, users) times the values to totals (runs, dim); only those `counting` (users,) have any."""
        own = totals[:, self.start : self.start + self.values.shape[1]]
        all_count = self.values.device.type == "cpu" and bool(counting.all())  # on a GPU this would synchronise
        for part in _column_chunks(self.values):
            wide = self.values[:, part].double()
            own[:, part].addmm_(weights, wide if all_count else wide.where(counting.unsqueeze(1), 0.0))

    def write_to(self, rows: Tensor) -> None:
        """Write the updates into rows (users, dim)."""
        rows[:, self.start : self.start + self.values.shape[1]] = self.values

    def of_users(self, chosen: Tensor) -> Dense:
        """The updates of the users for whom `chosen` (users,) is true."""
        return Dense(self.start, self.values[chosen])


@dataclass(frozen=True, eq=False)
class Rows:
    """Updates of a matrix parameter at offset `start`: of each user only the rows that the user's data touch."""

    start: int
    height: int  # rows of the whole matrix
    places: Tensor = field(repr=False)  # (users, touched) row numbers
    values: Tensor = field(repr=False)  # (users, touched, width), 0 in padding

    def __len__(self) -> int:
        return len(self.values)

    def squares(self) -> Tensor:
        """(users, parts) float64: squares of the values, added up in part.

        The padding that a stack has is the user's own; users who were trained one by one are padded to the longest.
        """
        return sum_columns(squares_by_leaf(self.values.flatten(1))).unsqueeze(1)

    def add_to(self, total: Tensor, scale: Tensor) -> None:
        """Add sum over users of scale (users,) times their rows, in float64, to total (dim,); scale 0 adds nothing."""
        users, touched, width = self.values.shape
        matrix = total[self.start : self.start + self.height * width].view(self.height, width)
        if self.values.device.type == "cpu":
            step = max(1, _CACHED // width)
            for places, values, factor in zip(self.places, self.values, scale.tolist(), strict=True):
                for start in range(0, touched if factor > 0 else 0, step):
                    part = slice(start, start + step)
                    matrix.index_add_(0, places[part], values[part].double(), alpha=factor)
            return
        step = max(1, _CHUNK // max(1, touched * width))
        for start in range(0, users, step):
            part = slice(start, start + step)
            factors = scale[part, None, None]
            scaled = torch.where(factors > 0, self.values[part].double() * factors, 0.0)
            matrix.index_add_(0, self.places[part].flatten(), scaled.flatten(0, 1))

    def write_to(self, rows: Tensor) -> None:
        """Write the updates into rows (users, dim)."""
        for row, places, values in zip(rows, self.places, self.values, strict=True):
            matrix = row[self.start : self.start + self.height * values.shape[1]].view(self.height, -1)
            matrix.index_add_(0, places, values)

    def of_users(self, chosen: Tensor) -> Rows:
        """The updates of the users for whom `chosen` (users,) is true."""
        return Rows(self.start, self.height, self.places[chosen], self.values[chosen])


@dataclass(frozen=True, eq=False)
class FactoredUpdates:
    """Updates of a matrix at offset `start`: each user's is one output times one input, and is never formed.

    Its norm is that of one factor times that of the other.

    Reference implementation: `Dense`, the update as it is. Held equal by: tests/engine/core/test_factored_updates.py.
    Switch: `FastParts.single_step`. Buys: rounds of 256 examples in 2.4 ms instead of 6.8 (logistic regression) and 24
    instead of 33 (small CNN), processor time, 2026-11-19.
    """

    start: int
    inputs: Tensor = field(repr=False)  # (users, in)
    outputs: Tensor = field(repr=False)  # (users, out)

    def __len__(self) -> int:
        return len(self.inputs)

    def squares(self) -> Tensor:
        """(users, 1) float64: sums of squares."""
        inputs, outputs = (sum_columns(squares_by_leaf(one)) for one in (self.inputs, self.outputs))
        return (inputs * outputs).unsqueeze(1)

    def add_to(self, total: Tensor, scale: Tensor) -> None:
        """Add sum over users of scale (users,) times their values, in float64, to total (dim,); 0 adds nothing."""
        height, width = self.outputs.shape[1], self.inputs.shape[1]
        own = total[self.start : self.start + height * width].view(height, width)
        step = max(1, _FACTORS // max(1, width + height))
        for start in range(0, len(self), step):
            users = slice(start, start + step)
            counts = scale[users] > 0
            inputs, outputs = self.inputs[users][counts].double(), self.outputs[users][counts].double()
            own.addmm_((outputs * scale[users][counts].unsqueeze(1)).t(), inputs)

    def write_to(self, rows: Tensor) -> None:
        """Write the updates into rows (users, dim)."""
        formed = (self.outputs.unsqueeze(2) * self.inputs.unsqueeze(1)).flatten(1)
        rows[:, self.start : self.start + formed.shape[1]] = formed

    def of_users(self, chosen: Tensor) -> FactoredUpdates:
        """The updates of the users for whom `chosen` (users,) is true."""
        return FactoredUpdates(self.start, self.inputs[chosen], self.outputs[chosen])


Piece = Dense | Rows | FactoredUpdates


@dataclass(frozen=True, eq=False)
class Updates:
    """Updates (params after local training - params) of a block of users, not clipped."""

    pieces: Sequence[Piece] = field(repr=False)  # together they cover all coordinates

    def __len__(self) -> int:
        return len(self.pieces[0])

    def norms(self) -> Tensor:
        """(users,) float64: the L2 norm of what will be summed; infinite or NaN where an update is, or its square.

        A function of the user's own update to the last bit, whoever else is in the block: a bit depends on it.
        """
        return sum_columns(torch.cat([piece.squares() for piece in self.pieces], dim=1)).sqrt()

    def add_to(self, totals: Tensor, scale: Tensor, runs: Tensor | None = None) -> None:
        """Add each update times its scale (users,) to the row of totals (runs, dim) of its run (users,), in float64.

        Without `runs` there is one row.
        """
        if runs is None:
            for piece in self.pieces:
                piece.add_to(totals[0], scale)
        elif all(isinstance(piece, Dense) for piece in self.pieces):
            weights = scale.new_zeros(len(totals), len(scale))
            weights[runs, torch.arange(len(scale), device=runs.device)] = scale
            for piece in self.pieces:
                assert isinstance(piece, Dense)
                piece.add_weighted(totals, weights, scale > 0)
        else:
            for number in range(len(totals)):
                of_run = runs == number
                self.of_users(of_run).add_to(totals[number : number + 1], scale[of_run])

    def of_users(self, chosen: Tensor) -> Updates:
        """The updates of the users for whom `chosen` (users,) is true."""
        return Updates([piece.of_users(chosen) for piece in self.pieces])

    def dense(self, dim: int) -> Tensor:
        """The updates as a dense matrix (users, dim)."""
        first = self.pieces[0]
        like = first.outputs if isinstance(first, FactoredUpdates) else first.values
        rows = like.new_zeros(len(self), dim)
        for piece in self.pieces:
            piece.write_to(rows)
        return rows
