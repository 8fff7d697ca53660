"""A change of a matrix as terms of a sum, and a matrix with such a change: multiplied by sparse rows, never formed.

In C where terms.c can be compiled; otherwise in torch's operations, which form the change.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .native import address, call


@dataclass(frozen=True, eq=False)
class SparseOuterProducts:
    """Row numbers[i] of a matrix has factors[i] times row sources[i] of the table, and so on for every i."""

    numbers: Tensor  # (terms,) int64
    sources: Tensor  # (terms,) int64
    factors: Tensor  # (terms,)
    table: Tensor  # (any, out)

    @staticmethod
    def none(like: Tensor) -> SparseOuterProducts:
        """No change of a matrix like this."""
        nothing = torch.empty(0, dtype=torch.int64)
        return SparseOuterProducts(nothing, nothing, like.new_empty(0), like.new_empty(0, like.shape[1]))

    @staticmethod
    def of_rows(numbers: Tensor, rows: Tensor) -> SparseOuterProducts:
        """These rows (terms, out), one term each."""
        return SparseOuterProducts(numbers, torch.arange(len(rows)), rows.new_ones(len(rows)), rows.contiguous())

    @staticmethod
    def joined(parts: Sequence[SparseOuterProducts]) -> SparseOuterProducts:
        """The sum of several; at least one."""
        if len(parts) == 1:
            return parts[0]
        starts, start = list[int](), 0
        for part in parts:
            starts.append(start)
            start += len(part.table)
        return SparseOuterProducts(
            torch.cat([part.numbers for part in parts]),
            torch.cat([part.sources + start for part, start in zip(parts, starts, strict=True)]),
            torch.cat([part.factors for part in parts]),
            torch.cat([part.table for part in parts]),
        )

    def rows(self, starts: Tensor) -> Tensor:
        """(starts, out): the sum of the terms from each start to the next, of the last to the end."""
        if not len(self.numbers):
            return self.table.new_zeros(len(starts), self.table.shape[1])
        return F.embedding_bag(self.sources, self.table, starts, per_sample_weights=self.factors, mode="sum")

    def added_up(self) -> SparseOuterProducts:
        """The same change with one term a row."""
        ordered = arranged([[self]])
        rows = ordered.terms.rows(ordered.starts[:-1])
        return SparseOuterProducts(ordered.rows, torch.arange(len(rows)), rows.new_ones(len(rows)), rows)


@dataclass(frozen=True, eq=False)
class Arranged:
    """The terms of several users by row and then by user: a row of a total is in the cache for all who touch it."""

    rows: Tensor  # (pairs,): row numbers, ascending
    owners: Tensor  # (pairs,): whose, ascending for each row
    starts: Tensor  # (pairs + 1,): where the terms of each begin, and where the last end
    terms: SparseOuterProducts  # their numbers are not in this order


def arranged(users: Sequence[Sequence[SparseOuterProducts]]) -> Arranged:
    """The terms of these users, each in parts."""
    terms = SparseOuterProducts.joined([part for parts in users for part in parts])
    counts = torch.tensor([sum(len(part.numbers) for part in parts) for parts in users])
    owners = torch.repeat_interleave(torch.arange(len(users)), counts)
    keys, order = (terms.numbers * len(users) + owners).sort(stable=True)
    pairs, sizes = torch.unique_consecutive(keys, return_counts=True)
    rows = pairs.div(len(users), rounding_mode="floor")
    in_order = SparseOuterProducts(terms.numbers, terms.sources[order], terms.factors[order], terms.table)
    return Arranged(rows, pairs - rows * len(users), F.pad(sizes.cumsum(dim=0), (1, 0)), in_order)


@dataclass(frozen=True, eq=False)
class Located:
    """The same for terms.c: of each term where its row of a table lies, so that no table is copied into another."""

    rows: Tensor
    owners: Tensor
    starts: Tensor
    terms: Tensor  # (terms,) int64: addresses
    factors: Tensor  # (terms,)
    users: Sequence[Sequence[SparseOuterProducts]]  # whose memory that is


def located(library: ctypes.CDLL, users: Sequence[Sequence[SparseOuterProducts]], height: int) -> Located:
    """The terms of these users, each in parts, of a matrix of so many rows."""
    parts = [
        [len(part.sources), user, *map(address, (part.numbers, part.sources, part.factors, part.table))]
        for user, own in enumerate(users)
        for part in own
    ]
    count, like = sum(part[0] for part in parts), users[0][0]
    ends, starts = torch.empty(height + 1, dtype=torch.int64), torch.empty(count + 1, dtype=torch.int64)
    terms, rows, owners = (torch.empty(count, dtype=torch.int64) for _ in range(3))
    factors = like.factors.new_empty(count)
    pairs = call(
        library.arrange, len(parts), torch.tensor(parts), height, like.table.shape[1],
        ends, terms, factors, rows, owners, starts,
    )  # fmt: skip
    return Located(rows[:pairs], owners[:pairs], starts[: pairs + 1], terms, factors, users)


class Moved(Protocol):
    """A weight, (height, out), with a change."""

    def product(self, features: Tensor, values: Tensor) -> tuple[Tensor, SparseOuterProducts]:
        """(batch, width) int64 and values -> (batch, out), and what was multiplied; the table is left to the caller."""
        ...


def moved(weight: Tensor, change: Sequence[SparseOuterProducts], library: ctypes.CDLL | None = None) -> Moved:
    """The weight, which stays as it is, with these changes; products by `library` (terms.c) if it is given."""
    return _Plain(weight, change) if library is None else _Native(library, weight, change)


class _Native:
    """Terms hang on a chain for each row of the weight, and a product runs along those of the rows that it reads."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, change: Sequence[SparseOuterProducts]) -> None:
        self._library, self._weight = library, weight.contiguous()
        self._terms = SparseOuterProducts.joined(change or [SparseOuterProducts.none(weight)])
        self._heads = torch.full((len(weight),), -1)
        self._next = torch.empty_like(self._terms.numbers)
        if change:
            call(library.hang, len(self._next), self._terms.numbers, self._heads, self._next)

    def product(self, features: Tensor, values: Tensor) -> tuple[Tensor, SparseOuterProducts]:
        (batch, width), (height, out) = features.shape, self._weight.shape
        product = self._weight.new_empty(batch, out)
        numbers, sources = (torch.empty(batch * width, dtype=torch.int64) for _ in range(2))
        factors, rows = torch.empty(batch * width, dtype=values.dtype), len(self._terms.table)
        seen, found = torch.zeros(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
        products, packed = (torch.empty(rows, dtype=values.dtype) for _ in range(2))
        count = call(
            self._library.product, batch, width, height, out, features.contiguous(), values.contiguous(), self._weight,
            self._heads, self._next, self._terms.sources, self._terms.factors, self._terms.table,
            seen, found, products, packed, product, numbers, sources, factors,
        )  # fmt: skip
        return product, SparseOuterProducts(numbers[:count], sources[:count], factors[:count], product)


class _Plain:
    """The rows that have changed are formed."""

    def __init__(self, weight: Tensor, change: Sequence[SparseOuterProducts]) -> None:
        self._weight, self._parts = weight, change

    @cached_property
    def _change(self) -> tuple[Tensor, Tensor]:
        """Where each row of the weight stands among those that have changed, and how these did: at last a row of 0."""
        ordered = arranged([self._parts])
        where = torch.full((len(self._weight),), len(ordered.rows))
        where[ordered.rows] = torch.arange(len(ordered.rows))
        return where, ordered.terms.rows(ordered.starts)

    def product(self, features: Tensor, values: Tensor) -> tuple[Tensor, SparseOuterProducts]:
        kept = values != 0
        places = kept.flatten().nonzero().squeeze(1)
        numbers = features.flatten()[places].clamp(0, len(self._weight) - 1)
        factors, counts = values.flatten()[places], kept.sum(dim=1)
        starts = counts.cumsum(dim=0).sub_(counts)
        product = SparseOuterProducts(numbers, numbers, factors, self._weight).rows(starts)
        if self._parts:
            where, change = self._change
            product += SparseOuterProducts(numbers, where[numbers], factors, change).rows(starts)
        sources = places.div(max(1, features.shape[1]), rounding_mode="floor")
        return product, SparseOuterProducts(numbers, sources, factors, product)
