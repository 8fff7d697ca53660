"""Updates of a matrix parameter as terms of a sum: rows are formed a few at a time, where the cache holds them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from .bags import Terms

_CACHED = 1 << 18  # numbers that are formed at a time
_own = threading.local()  # each thread's room for as many in float64: new memory costs more than the arithmetic


@dataclass(frozen=True, eq=False)
class Bagged:
    """Rows of a matrix parameter that starts at `start`: of each user those that the user's terms name.

    A row is formed anew for the norm and for the sum, by the same additions in the same order: what is summed is to the
    last bit what was measured.
    """

    start: int
    height: int  # rows of the whole matrix
    users: Sequence[Terms] = field(repr=False)

    def __len__(self) -> int:
        return len(self.users)

    @property
    def dtype(self) -> torch.dtype:
        """That of the updates."""
        return self.users[0].table.dtype

    def greatest(self) -> Tensor:
        """(users,): the greatest absolute value of each user."""
        most = torch.zeros(len(self), dtype=self.dtype)
        for _, owners, values in self._parts():
            most.scatter_reduce_(0, owners, values.abs().amax(dim=1), "amax")
        return most

    def squares(self, unit: Tensor | None = None) -> Tensor:
        """(users,) float64: sums of squares, of the values over unit (users,) if given."""
        sums = [torch.zeros(len(self), dtype=torch.float64)]
        for _, owners, values in self._parts():
            wide = _wide(values)
            if unit is not None:
                wide.div_(unit[owners].unsqueeze(1))
            sums.append(torch.zeros_like(sums[0]).index_add_(0, owners, wide.square_().sum(dim=1)))
        return torch.stack(sums).sum(dim=0)

    def add_to(self, total: Tensor, scale: Tensor) -> None:
        """Add sum over users of scale (users,) times their rows, in float64, to total (dim,).

        A user whose scale is 0 takes no part, whatever the values.
        """
        every, scaled = bool((scale > 0).all()), bool((scale != 1).any())
        for rows, owners, values in self._parts():
            if not every:
                taking_part = scale[owners] > 0
                rows, owners, values = rows[taking_part], owners[taking_part], values[taking_part]
            wide = _wide(values)
            if scaled:
                wide.mul_(scale[owners].unsqueeze(1))
            width = wide.shape[1]
            matrix = total[self.start : self.start + self.height * width].view(self.height, width)
            # torch adds whole rows where the index is one number stretched over each; index_add_ is slower.
            matrix.scatter_add_(0, rows.unsqueeze(1).expand_as(wide), wide)

    def put_in(self, rows: Tensor) -> None:
        """Write into rows (users, dim)."""
        for numbers, owners, values in self._parts():
            width = values.shape[1]
            whole = rows[:, self.start : self.start + self.height * width].view(len(rows), self.height, width)
            whole[owners, numbers] = values

    def of_users(self, chosen: Tensor) -> Bagged:
        """Those for whom `chosen` (users,) is true."""
        users = [user for user, taken in zip(self.users, chosen.tolist(), strict=True) if taken]
        return replace(self, users=users)

    @cached_property
    def _in_order(self) -> tuple[Tensor, Tensor, Terms]:
        """By row and then by user: a row of the total is in the cache for all who touch it."""
        count = len(self.users)
        return Terms.joined(
            [replace(user, numbers=user.numbers * count + place) for place, user in enumerate(self.users)]
        ).in_order()

    def _parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Row numbers, whose they are, and values (rows, width), a few at a time."""
        numbers, starts, terms = self._in_order
        step = max(1, _CACHED // max(1, terms.table.shape[1]))
        rows, owners = numbers.div(len(self.users), rounding_mode="floor"), numbers.remainder(len(self.users))
        bounds = [*starts[::step].tolist(), len(terms.numbers)]
        for part, first in enumerate(range(0, len(numbers), step)):
            own = slice(bounds[part], bounds[part + 1])
            some = Terms(terms.numbers[own], terms.sources[own], terms.factors[own], terms.table)
            last = min(first + step, len(numbers))
            yield rows[first:last], owners[first:last], some.rows(starts[first:last] - bounds[part])


def _wide(values: Tensor) -> Tensor:
    """The values in float64, in this thread's room: until the next call."""
    if getattr(_own, "room", None) is None or _own.room.numel() < values.numel():
        _own.room = torch.empty(max(_CACHED, values.numel()), dtype=torch.float64)
    room: Tensor = _own.room
    return room[: values.numel()].view_as(values).copy_(values)
