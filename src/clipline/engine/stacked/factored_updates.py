"""Updates of a matrix as factors: a user's is a sum of outer products, which is never formed.

For one outer product the norm is that of one factor times that of the other. For several it comes from the inner
products of all pairs: |sum_p b_p a_p^T|^2 = sum_pq (a_p . a_q)(b_p . b_q).

Plain twin: `Dense`, the update as it is. Held equal by: tests/engine/stacked/test_factored_updates.py.
Switch and what it buys: see `shared_step.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ..isolation.user_sums import squares_by_leaf, sum_columns

_WIDTH = 16  # numbers: a row of a product begins at a multiple of 64 bytes
_CHUNK = 1 << 20  # numbers of a factor converted to float64 at a time
_EPS = torch.finfo(torch.float64).eps
_MOST_CANCELLED = 2.0**-14  # of the lengths of a user's outer products: no norm is taken to be less


@dataclass(frozen=True, eq=False)
class FactoredUpdates:
    """Updates of a matrix parameter at offset `start` of the vector: sum over positions of output times input."""

    start: int
    inputs: Tensor = field(repr=False)  # (users, positions, in)
    outputs: Tensor = field(repr=False)  # (users, positions, out)

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the updates."""
        return self.inputs.dtype

    def greatest(self) -> Tensor:
        """(users,): at least the largest absolute value of each user; equal to it for one position."""
        if not self.inputs.numel() or not self.outputs.numel():
            return self.inputs.new_zeros(len(self))
        return sum_columns(self.inputs.abs().amax(dim=2) * self.outputs.abs().amax(dim=2))

    def squares(self, unit: Tensor | None = None) -> Tensor:
        """(users, 1) float64: sums of squares, of the values divided by unit (users,) if given.

        Never too small by more than rounding of the result itself: where outer products cancel each other, what
        rounding may have hidden is added. And where they cancel almost wholly it is too large, so that no outer product
        is more than 16,384 clips long when it is added. The slack for rounding is a bound for sums of vectors of one
        clip. For such outer products it is not; what was measured is a thousandth of it.
        """
        found = [self._squares(inputs, outputs, None if unit is None else unit[users])
                 for users, inputs, outputs in self._chunks]  # fmt: skip
        return torch.cat(found).unsqueeze(1) if found else torch.zeros(0, 1, dtype=torch.float64)

    @staticmethod
    def _squares(inputs: Tensor, outputs: Tensor, unit: Tensor | None) -> Tensor:
        if unit is not None:  # squares of float64 may overflow or underflow: bring both factors near 1
            sizes = [one.abs().amax(dim=(1, 2)).clamp(min=torch.finfo(torch.float64).tiny) for one in (inputs, outputs)]
            inputs = inputs / sizes[0][:, None, None]
            outputs = outputs / sizes[1][:, None, None] * (sizes[0] * (sizes[1] / unit))[:, None, None]
        if inputs.shape[1] == 1:
            of_inputs, of_outputs = (sum_columns(squares_by_leaf(one.flatten(1))) for one in (inputs, outputs))
            return of_inputs * of_outputs
        products = inner_products(inputs) * inner_products(outputs)  # (users, positions, positions)
        lengths = sum_columns(products.diagonal(dim1=1, dim2=2).sqrt())
        rounded = (inputs.shape[2] + outputs.shape[2] + inputs.shape[1] ** 2) * _EPS * lengths.square()
        found = sum_columns(products.flatten(1)).clamp(min=0.0) + rounded
        return torch.maximum(found, (_MOST_CANCELLED * lengths).square())

    def add_to(self, total: Tensor, scale: Tensor) -> None:
        """Add sum over users of scale (users,) times their values, in float64, to total (dim,).

        A user whose scale is 0 adds nothing, whatever the values: 0 times infinity is not 0.
        """
        height, width = self.outputs.shape[2], self.inputs.shape[2]
        own = total[self.start : self.start + height * width].view(height, width)
        for users, inputs, outputs in self._chunks:
            counts, factors = scale[users] > 0, scale[users]
            if not bool(counts.all()):
                inputs, outputs, factors = inputs[counts], outputs[counts], factors[counts]
            if self.dtype == torch.float64:  # the greater one: a tiny one times a tiny factor would lose its digits
                sizes = [one.abs().amax(dim=(1, 2)) if one.numel() else factors for one in (inputs, outputs)]
                inputs = inputs * torch.where(sizes[0] > sizes[1], factors, 1.0)[:, None, None]
                factors = torch.where(sizes[0] > sizes[1], 1.0, factors)
            own.addmm_((outputs * factors[:, None, None]).flatten(0, 1).t(), inputs.flatten(0, 1))

    def write_to(self, rows: Tensor) -> None:
        """Write the updates into rows (users, dim)."""
        formed = torch.bmm(self.outputs.transpose(1, 2), self.inputs).flatten(1)
        rows[:, self.start : self.start + formed.shape[1]] = formed

    def of_users(self, chosen: Tensor) -> FactoredUpdates:
        """The updates of the users for whom `chosen` (users,) is true."""
        return FactoredUpdates(self.start, self.inputs[chosen], self.outputs[chosen])

    @cached_property
    def _chunks(self) -> Iterable[tuple[slice, Tensor, Tensor]]:
        """Some users at a time, with their factors in float64. A single chunk is kept for the next time."""
        step = max(1, _CHUNK // max(1, self.inputs[:1].numel() + self.outputs[:1].numel()))
        chunks = _Chunks(self.inputs, self.outputs, step)
        return chunks if len(self) > step else list(chunks)


@dataclass(frozen=True, eq=False)
class _Chunks:
    """Two factors, some users at a time, in float64."""

    inputs: Tensor
    outputs: Tensor
    step: int

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for start in range(0, len(self.inputs), self.step):
            users = slice(start, start + self.step)
            yield users, self.inputs[users].double(), self.outputs[users].double()


def inner_products(rows: Tensor) -> Tensor:
    """(users, positions, width) -> (users, positions, positions): of every two positions of a user.

    Rounded alike wherever the user stands and whoever else is there: padded to a multiple of 64 bytes, since libraries
    take other instructions for a matrix that begins elsewhere, and at least two users, since for one alone they share
    the work among threads. Of 900 shapes in float64 258 differed without, none with.
    """
    wide = F.pad(rows, (0, -rows.shape[-1] % _WIDTH)).contiguous()
    wide = wide if len(wide) > 1 else wide.repeat(2, 1, 1)
    return torch.bmm(wide, wide.transpose(1, 2))[: len(rows)]
