"""Updates of a matrix parameter as sparse outer products: a row is formed only while it is measured or added.

Plain twin, switch, test and what it buys: see `recorded_weight.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ..isolation.user_sums import squares_by_leaf, sum_columns
from .outer_products import SortedTerms, SparseOuterProducts, sort_terms

_MAX_FORMED = 1 << 18  # numbers formed at a time by torch's operations, to fit the cache
_MAX_ROWS = 1 << 10  # the same


@dataclass(frozen=True, eq=False)
class OuterProductUpdates:
    """Updates of a matrix parameter at offset `start` of the vector; a user's update is the sum of the user's terms.

    A row is formed twice, for the norm and for the sum, by the same additions in the same order: what is summed equals
    what was measured to the last bit.
    """

    start: int
    height: int  # rows of the whole matrix
    users: Sequence[Sequence[SparseOuterProducts]] = field(repr=False)  # each user's terms, in parts

    def __len__(self) -> int:
        return len(self.users)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the updates."""
        return self.users[0][0].table.dtype

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return self.users[0][0].table.shape[1]

    def greatest(self) -> Tensor:
        """(users,): the largest absolute value of each user."""
        most = torch.zeros(len(self), dtype=self.dtype)
        for _, owners, values in self._row_chunks():
            most.scatter_reduce_(0, owners, values.abs().amax(dim=1), "amax")
        return most

    def squares(self, unit: Tensor | None = None) -> Tensor:
        """(users, 1) float64: sums of squares, of the values divided by unit (users,) if given.

        Each is a function of the user's own rows, to the last bit: see `user_sums`.
        """
        sums_of_rows = [torch.zeros(0, dtype=torch.float64)]
        for _, owners, values in self._row_chunks():
            scaled = values if unit is None else values / unit[owners].unsqueeze(1)
            sums_of_rows.append(sum_columns(squares_by_leaf(scaled)))
        owners, order = self._sorted.owners.sort(stable=True)
        counts = torch.bincount(owners, minlength=len(self))
        number = torch.arange(len(owners)) - (counts.cumsum(dim=0) - counts)[owners]  # of each row among its user's
        by_user = torch.zeros(len(self), int(counts.max()), dtype=torch.float64)
        by_user[owners, number] = torch.cat(sums_of_rows)[order]
        return sum_columns(by_user).unsqueeze(1)

    def add_to(self, total: Tensor, scale: Tensor) -> None:
        """Add sum over users of scale (users,) times their rows, in float64, to total (dim,).

        A user whose scale is 0 adds nothing, whatever the values.
        """
        own = total[self.start : self.start + self.height * self.width]
        for rows, owners, values in self._row_chunks():
            has_weight = scale[owners] > 0
            wide = values[has_weight].double().mul_(scale[owners[has_weight]].unsqueeze(1))
            # With an expanded index scatter_add_ adds whole rows; index_add_ is slower.
            index = rows[has_weight].unsqueeze(1).expand_as(wide)
            own.view(self.height, self.width).scatter_add_(0, index, wide)

    def write_to(self, rows: Tensor) -> None:
        """Write the updates into rows (users, dim)."""
        whole = rows[:, self.start : self.start + self.height * self.width].view(len(rows), self.height, self.width)
        for numbers, owners, values in self._row_chunks():
            whole[owners, numbers] = values

    def of_users(self, chosen: Tensor) -> OuterProductUpdates:
        """The updates of the users for whom `chosen` (users,) is true."""
        return replace(self, users=[self.users[user] for user in chosen.nonzero().flatten().tolist()])

    @cached_property
    def _sorted(self) -> SortedTerms:
        return sort_terms(self.users)

    def _row_chunks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Row numbers (rows,), their users (rows,) and values (rows, width), a chunk at a time."""
        by_row, terms = self._sorted, self._sorted.terms
        step = max(1, min(_MAX_ROWS, _MAX_FORMED // max(1, self.width)))
        for first in range(0, len(by_row.rows), step):
            last = min(first + step, len(by_row.rows))
            begin, end = by_row.starts[first : last + 1 : last - first].tolist()
            chunk = SparseOuterProducts(
                terms.numbers[begin:end], terms.sources[begin:end], terms.factors[begin:end], terms.table
            )
            yield by_row.rows[first:last], by_row.owners[first:last], chunk.rows(by_row.starts[first:last] - begin)
