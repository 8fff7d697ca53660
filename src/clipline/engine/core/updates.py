"""The updates of a block of users: PRIVATE. In pieces, one a parameter, in the form in which they were computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..isolation.user_sums import squares_by_leaf, sum_columns
from .precision import kernels_in_use

block_sums: Any = None  # Triton kernels, where there are: `engine/choose.py` hands them in

_CHUNK = 1 << 22  # numbers converted to float64 at a time on a GPU, to bound memory
_CACHED = 1 << 16  # the same on a CPU core, to fit its cache


def subtracts_lazily(values: Tensor) -> bool:
    """Whether to keep parameters and starting point apart: Triton reductions subtract on the fly, saving a pass."""
    return _by_triton(values) and values.dtype == torch.float32


def _by_triton(values: Tensor) -> bool:
    """Whether Triton kernels measure and sum: on a GPU, where Triton is there and not switched off."""
    return values.device.type == "cuda" and block_sums is not None and kernels_in_use()


def broadcast(first: Tensor, piece: Tensor) -> None:
    """Write first (1 or users, *shape) into piece (users, *shape): what users start from."""
    if len(first) == 1 and _by_triton(piece):
        block_sums.spread(first.reshape(-1), piece.view(len(piece), -1))
    else:
        piece.copy_(first)


def _column_chunks(values: Tensor) -> Iterator[slice]:
    """Slices of the columns of values (users, width), as many as should be converted at a time."""
    step = max(256, (_CACHED if values.device.type == "cpu" else _CHUNK) // max(1, len(values)))
    for start in range(0, values.shape[1], step):
        yield slice(start, start + step)


@dataclass(frozen=True, eq=False)
class Dense:
    """Coordinates `start` to `start + width` of every user's update: `values`, minus `before` if that is given."""

    start: int
    values: Tensor = field(repr=False)  # (users, width)
    before: Tensor | None = field(default=None, repr=False)  # (1 or users, width)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the updates."""
        return self.values.dtype

    def formed(self, columns: slice = slice(None)) -> Tensor:
        """The updates (users, width), or some columns, with `before` subtracted."""
        return self.values[:, columns] if self.before is None else self.values[:, columns] - self.before[:, columns]

    def greatest(self) -> Tensor:
        """(users,): the largest absolute value of each user."""
        return self.formed().abs().amax(dim=1) if self.values[:1].numel() else self.values.new_zeros(len(self))

    def squares(self, unit: Tensor | None = None) -> Tensor:
        """(users, parts) float64: squares of the values, divided by unit (users,) if given, added up in part.

        Parts, here and below, are a user's own to the last bit, and so is their number: see `user_sums`.
        """
        if unit is not None:
            return Dense(0, self.formed() / unit.unsqueeze(1)).squares()
        if _by_triton(self.values):
            squares: Tensor = block_sums.squares(self.values, self.before)
            return squares
        return squares_by_leaf(self.formed())

    def add_to(self, total: Tensor, scale: Tensor) -> None:
        """Add sum over users of scale (users,) times their values, in float64, to total (dim,).

        A user whose scale is 0 adds nothing, whatever the values: 0 times infinity is not 0.
        """
        own = total[self.start : self.start + self.values.shape[1]]
        if _by_triton(self.values):
            block_sums.add_scaled(self.values, scale, own, self.before)
            return
        values = self.formed()
        values = values if bool((scale > 0).all()) else values[scale > 0]
        scale = scale[scale > 0]
        for part in _column_chunks(values):
            own[part] += scale @ values[:, part].double()

    def write_to(self, rows: Tensor) -> None:
        """Write the updates into rows (users, dim)."""
        rows[:, self.start : self.start + self.values.shape[1]] = self.formed()

    def of_users(self, chosen: Tensor) -> Dense:
        """The updates of the users for whom `chosen` (users,) is true."""
        return Dense(self.start, self.formed()[chosen])


@dataclass(frozen=True, eq=False)
class Rows:
    """Updates of a matrix parameter at offset `start`: of each user only the rows that the user's data touch."""

    start: int
    height: int  # rows of the whole matrix
    places: Tensor = field(repr=False)  # (users, touched) row numbers
    values: Tensor = field(repr=False)  # (users, touched, width), minus `before` if that is given
    used: Tensor | None = field(
        default=None, repr=False
    )  # (users, touched): false for padding; None: values are 0 there
    before: Tensor | None = field(default=None, repr=False)  # (users, touched, width)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the updates."""
        return self.values.dtype

    def greatest(self) -> Tensor:
        """(users,): the largest absolute value of each user."""
        return Dense(0, self.formed().flatten(1)).greatest()

    def formed(self) -> Tensor:
        """The updates (users, touched, width): `before` subtracted, padding 0."""
        if self.before is None:
            return self.values
        change = self.values - self.before
        return change if self.used is None else change.masked_fill_(~self.used.unsqueeze(2), 0.0)

    def squares(self, unit: Tensor | None = None) -> Tensor:
        """(users, parts) float64: squares of the values, divided by unit (users,) if given, added up in part.

        The padding that a stack has is the user's own; users who were trained one by one are padded to the longest.
        """
        if self.before is not None and unit is None and _by_triton(self.values):
            squares: Tensor = block_sums.squares(self.values.flatten(1), self.before.flatten(1), self.used)
            return squares
        return sum_columns(Dense(0, self.formed().flatten(1)).squares(unit)).unsqueeze(1)

    def add_to(self, total: Tensor, scale: Tensor) -> None:
        """Add sum over users of scale (users,) times their rows, in float64, to total (dim,); scale 0 adds nothing."""
        users, touched, width = self.values.shape
        matrix = total[self.start : self.start + self.height * width].view(self.height, width)
        if self.values.device.type == "cpu":
            step = max(1, _CACHED // width)
            for places, values, factor in zip(self.places, self.formed(), scale.tolist(), strict=True):
                for start in range(0, touched if factor > 0 else 0, step):
                    part = slice(start, start + step)
                    matrix.index_add_(0, places[part], values[part].double(), alpha=factor)
            return
        if _by_triton(self.values):
            block_sums.add_rows(self.places, self.used, self.values, scale, matrix, self.before)
            return
        change, step = self.formed(), max(1, _CHUNK // max(1, touched * width))
        for start in range(0, users, step):
            part = slice(start, start + step)
            factors = scale[part, None, None]
            scaled = torch.where(factors > 0, change[part].double() * factors, 0.0)
            matrix.index_add_(0, self.places[part].flatten(), scaled.flatten(0, 1))

    def write_to(self, rows: Tensor) -> None:
        """Write the updates into rows (users, dim)."""
        for row, places, values in zip(rows, self.places, self.formed(), strict=True):
            matrix = row[self.start : self.start + self.height * values.shape[1]].view(self.height, -1)
            matrix.index_add_(0, places, values)

    def of_users(self, chosen: Tensor) -> Rows:
        """The updates of the users for whom `chosen` (users,) is true."""
        used = None if self.used is None else self.used[chosen]
        return Rows(self.start, self.height, self.places[chosen], self.formed()[chosen], used)


@dataclass(frozen=True, eq=False)
class ChannelsLast:
    """Updates of the weight of a convolution at offset `start`, each with its channels last: only the sum is reordered.

    `values` (users, out * kernel height * kernel width * channels) holds the updates, `shape` is that of the weight.
    """

    start: int
    values: Tensor = field(repr=False)
    shape: tuple[int, int, int, int]  # out, channels, kernel height, kernel width

    def __len__(self) -> int:
        return len(self.values)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the updates."""
        return self.values.dtype

    def greatest(self) -> Tensor:
        """(users,): the largest absolute value of each user."""
        return Dense(0, self.values).greatest()

    def squares(self, unit: Tensor | None = None) -> Tensor:
        """(users, parts) float64: squares of the values, divided by unit (users,) if given, added up in part."""
        return Dense(0, self.values).squares(unit)

    def add_to(self, total: Tensor, scale: Tensor) -> None:
        """Add sum over users of scale (users,) times their values, in float64, to total (dim,); 0 adds nothing."""
        summed = total.new_zeros(self.values.shape[1])
        Dense(0, self.values).add_to(summed, scale)
        total[self.start : self.start + len(summed)] += self._channels_first(summed.unsqueeze(0))[0]

    def write_to(self, rows: Tensor) -> None:
        """Write the updates into rows (users, dim)."""
        rows[:, self.start : self.start + self.values.shape[1]] = self._channels_first(self.values)

    def of_users(self, chosen: Tensor) -> ChannelsLast:
        """The updates of the users for whom `chosen` (users,) is true."""
        return ChannelsLast(self.start, self.values[chosen], self.shape)

    def _channels_first(self, values: Tensor) -> Tensor:
        """(rows, numbers) with channels last -> (rows, numbers) as in the weight."""
        out, channels, height, width = self.shape
        return values.view(-1, out, height, width, channels).permute(0, 1, 4, 2, 3).flatten(1)


class Piece(Protocol):
    """The updates of some coordinates, in one of the forms above or in that of another way to train."""

    def __len__(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """The type of the updates."""
        ...

    def greatest(self) -> Tensor:
        """(users,): the largest absolute value of each user."""
        ...

    def squares(self, unit: Tensor | None = None) -> Tensor:
        """(users, parts) float64: squares of the values, divided by unit (users,) if given, added up in part."""
        ...

    def add_to(self, total: Tensor, scale: Tensor) -> None:
        """Add sum over users of scale (users,) times their values, in float64, to total (dim,)."""
        ...

    def write_to(self, rows: Tensor) -> None:
        """Write the updates into rows (users, dim)."""
        ...

    def of_users(self, chosen: Tensor) -> Piece:
        """The updates of the users for whom `chosen` (users,) is true."""
        ...


@dataclass(frozen=True, eq=False)
class Updates:
    """Updates (params after local training - params) of a block of users, not clipped."""

    pieces: Sequence[Piece] = field(repr=False)  # together they cover all coordinates

    def __len__(self) -> int:
        return len(self.pieces[0])

    def norms(self) -> Tensor:
        """(users,) float64: the L2 norm of what will be summed; infinite or NaN where an update is.

        A function of the user's own update to the last bit, whoever else is in the block: a bit depends on it.
        """
        if self.pieces[0].dtype != torch.float64:
            return sum_columns(torch.cat([piece.squares() for piece in self.pieces], dim=1)).sqrt()
        # The square of a float64 may overflow or underflow: divide by the largest entry first.
        greatest = torch.stack([piece.greatest() for piece in self.pieces]).amax(dim=0)
        unit = greatest.clamp(min=torch.finfo(torch.float64).tiny)
        return unit * sum_columns(torch.cat([piece.squares(unit) for piece in self.pieces], dim=1)).sqrt()

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
            all_count = scale.device.type == "cpu" and bool((scale > 0).all())  # on a GPU this would synchronise
            for piece in self.pieces:
                assert isinstance(piece, Dense)
                own = totals[:, piece.start : piece.start + piece.values.shape[1]]
                for part in _column_chunks(piece.values):
                    values = piece.formed(part).double()
                    own[:, part].addmm_(weights, values if all_count else values.where(scale.unsqueeze(1) > 0, 0.0))
        else:
            for number in range(len(totals)):
                of_run = runs == number
                self.of_users(of_run).add_to(totals[number : number + 1], scale[of_run])

    def of_users(self, chosen: Tensor) -> Updates:
        """The updates of the users for whom `chosen` (users,) is true."""
        return Updates([piece.of_users(chosen) for piece in self.pieces])

    def dense(self, dim: int) -> Tensor:
        """The updates as a dense matrix (users, dim)."""
        values = next((piece.values for piece in self.pieces if isinstance(piece, Dense | Rows | ChannelsLast)), None)
        rows = torch.zeros(len(self), dim, dtype=self.pieces[0].dtype, device=None if values is None else values.device)
        for piece in self.pieces:
            piece.write_to(rows)
        return rows
