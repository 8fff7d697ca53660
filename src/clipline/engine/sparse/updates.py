"""Updates of a matrix parameter as terms of a sum: no row is formed but where it is measured or added."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from .native import call
from .outer_products import Arranged, Located, SparseOuterProducts, arranged, located

_CACHED = 1 << 18  # numbers that torch's operations form at a time
_FEW = 1 << 10  # rows at most: their squares are added one after the other, the sums of such parts in pairs


@dataclass(frozen=True, eq=False)
class OuterProductUpdates:
    """Rows of a matrix parameter that starts at `start`: of each user those that the user's terms name.

    A row is formed anew for the norm and for the sum, by the same additions in the same order: what is summed is to the
    last bit what was measured.
    """

    start: int
    height: int  # rows of the whole matrix
    users: Sequence[Sequence[SparseOuterProducts]] = field(repr=False)  # each user's in parts
    library: ctypes.CDLL | None = field(default=None, repr=False)  # of terms.c, if that is to be used

    def __len__(self) -> int:
        return len(self.users)

    @property
    def dtype(self) -> torch.dtype:
        """That of the updates."""
        return self.users[0][0].table.dtype

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return self.users[0][0].table.shape[1]

    def greatest(self) -> Tensor:
        """(users,): the greatest absolute value of each user."""
        most = torch.zeros(len(self), dtype=self.dtype)
        for _, owners, values in self._parts():
            most.scatter_reduce_(0, owners, values.abs().amax(dim=1), "amax")
        return most

    def squares(self, unit: Tensor | None = None) -> Tensor:
        """(users,) float64: sums of squares, of the values over unit (users,) if given."""
        library = self.library
        if library is not None:
            sums, lost = torch.zeros(2, len(self), dtype=torch.float64)
            units = torch.ones_like(sums) if unit is None else unit
            call(library.squares, *self._given, units, sums, lost)
            found: Tensor = sums + lost
            return found
        parts = [torch.zeros(len(self), dtype=torch.float64)]
        for _, owners, values in self._parts():
            wide = values.double() if unit is None else values / unit[owners].unsqueeze(1)
            parts.append(torch.zeros_like(parts[0]).index_add_(0, owners, wide.square_().sum(dim=1)))
        return torch.stack(parts).sum(dim=0)

    def add_to(self, total: Tensor, scale: Tensor) -> None:
        """Add sum over users of scale (users,) times their rows, in float64, to total (dim,).

        A user whose scale is 0 takes no part, whatever the values.
        """
        own = total[self.start : self.start + self.height * self.width]
        library = self.library
        if library is not None:
            call(library.add, *self._given, self._located.rows, scale, own)
            return
        for rows, owners, values in self._parts():
            taking_part = scale[owners] > 0
            wide = values[taking_part].double().mul_(scale[owners[taking_part]].unsqueeze(1))
            # torch adds whole rows where the index is one number stretched over each; index_add_ is slower.
            stretched = rows[taking_part].unsqueeze(1).expand_as(wide)
            own.view(self.height, self.width).scatter_add_(0, stretched, wide)

    def put_in(self, rows: Tensor) -> None:
        """Write into rows (users, dim)."""
        whole = rows[:, self.start : self.start + self.height * self.width].view(len(rows), self.height, self.width)
        for numbers, owners, values in self._parts():
            whole[owners, numbers] = values

    def of_users(self, chosen: Tensor) -> OuterProductUpdates:
        """Those for whom `chosen` (users,) is true."""
        return replace(self, users=[self.users[place] for place in chosen.nonzero().flatten().tolist()])

    @cached_property
    def _ordered(self) -> Arranged:
        return arranged(self.users)

    @cached_property
    def _located(self) -> Located:
        assert self.library is not None
        return located(self.library, self.users, self.height)

    @property
    def _given(self) -> tuple[int | Tensor, ...]:
        """What every function of terms.c is given first."""
        found = self._located
        return len(found.rows), self.width, found.starts, found.terms, found.factors, found.owners

    def _parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Row numbers, whose they are, and values (rows, width), a few at a time."""
        ordered, terms = self._ordered, self._ordered.terms
        step = max(1, min(_FEW, _CACHED // max(1, self.width)))
        for first in range(0, len(ordered.rows), step):
            last = min(first + step, len(ordered.rows))
            begin, end = ordered.starts[first : last + 1 : last - first].tolist()
            some = SparseOuterProducts(
                terms.numbers[begin:end], terms.sources[begin:end], terms.factors[begin:end], terms.table
            )
            yield ordered.rows[first:last], ordered.owners[first:last], some.rows(ordered.starts[first:last] - begin)
