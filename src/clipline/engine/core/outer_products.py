"""The change of a matrix as a sum of sparse outer products, and sparse products with the changed matrix.

A term adds a factor times one row of a table to one row of the matrix. Only rows that have changed are formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SparseOuterProducts:
    """A sum of terms: for every i, row numbers[i] of a matrix grows by factors[i] times row sources[i] of the table."""

    numbers: Tensor  # (terms,) int64
    sources: Tensor  # (terms,) int64
    factors: Tensor  # (terms,)
    table: Tensor  # (any, out)

    @staticmethod
    def none(like: Tensor) -> SparseOuterProducts:
        """No change, of a matrix like this."""
        no_index = torch.empty(0, dtype=torch.int64)
        return SparseOuterProducts(no_index, no_index, like.new_empty(0), like.new_empty(0, like.shape[1]))

    @staticmethod
    def of_rows(numbers: Tensor, rows: Tensor) -> SparseOuterProducts:
        """The change that adds these rows (terms, out) to rows `numbers`: one term each."""
        return SparseOuterProducts(numbers, torch.arange(len(rows)), rows.new_ones(len(rows)), rows.contiguous())

    @staticmethod
    def joined(parts: Sequence[SparseOuterProducts]) -> SparseOuterProducts:
        """The sum of several changes, at least one, as one list of terms."""
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
        """Segment sums (starts, out): row r adds the terms from starts[r] to starts[r + 1], the last one to the end."""
        if not len(self.numbers):
            return self.table.new_zeros(len(starts), self.table.shape[1])
        return F.embedding_bag(self.sources, self.table, starts, per_sample_weights=self.factors, mode="sum")

    def added_up(self) -> SparseOuterProducts:
        """The same change with one term for each row that changes, as `Tensor.coalesce` does."""
        by_row = sort_terms([[self]])
        rows = by_row.terms.rows(by_row.starts[:-1])
        return SparseOuterProducts(by_row.rows, torch.arange(len(rows)), rows.new_ones(len(rows)), rows)


@dataclass(frozen=True, eq=False)
class SortedTerms:
    """The terms of several users, by row, then by user: a row of the total stays in the cache for all its users."""

    rows: Tensor  # (pairs,): row numbers, ascending
    owners: Tensor  # (pairs,): the user, ascending within each row
    starts: Tensor  # (pairs + 1,): where the terms of each pair begin, and where the last ends
    terms: SparseOuterProducts  # sorted, except for `numbers`, which is not needed


def sort_terms(users: Sequence[Sequence[SparseOuterProducts]]) -> SortedTerms:
    """Sort the terms of these users; each user's come in several parts."""
    terms = SparseOuterProducts.joined([part for parts in users for part in parts])
    counts = torch.tensor([sum(len(part.numbers) for part in parts) for parts in users])
    owners = torch.repeat_interleave(torch.arange(len(users)), counts)
    keys, order = (terms.numbers * len(users) + owners).sort(stable=True)
    pairs, sizes = torch.unique_consecutive(keys, return_counts=True)
    rows = pairs.div(len(users), rounding_mode="floor")
    reordered = SparseOuterProducts(terms.numbers, terms.sources[order], terms.factors[order], terms.table)
    return SortedTerms(rows, pairs - rows * len(users), F.pad(sizes.cumsum(dim=0), (1, 0)), reordered)


class UpdatedWeight:
    """A weight (height, out) plus a change. The changed rows are formed once, when first needed."""

    def __init__(self, weight: Tensor, change: Sequence[SparseOuterProducts]) -> None:
        self._weight, self._changes = weight, change

    @cached_property
    def _change(self) -> tuple[Tensor, Tensor]:
        """The index of each weight row among the changed rows, and the changes; unchanged rows index a zero row."""
        by_row = sort_terms([self._changes])
        where = torch.full((len(self._weight),), len(by_row.rows))
        where[by_row.rows] = torch.arange(len(by_row.rows))
        return where, by_row.terms.rows(by_row.starts)

    def sparse_product(self, features: Tensor, values: Tensor) -> tuple[Tensor, SparseOuterProducts]:
        """`bag`: features (batch, width) int64 and their values -> (batch, out), and the entries that took part.

        The entries come as terms: numbers (features), sources (examples) and factors (values). The caller sets the
        table: the gradient of the product, once it is known.
        """
        present = values != 0
        entries = present.flatten().nonzero().squeeze(1)
        numbers = features.flatten()[entries].clamp(0, len(self._weight) - 1)
        factors, counts = values.flatten()[entries], present.sum(dim=1)
        starts = counts.cumsum(dim=0).sub_(counts)
        product = SparseOuterProducts(numbers, numbers, factors, self._weight).rows(starts)
        if self._changes:
            where, change = self._change
            product += SparseOuterProducts(numbers, where[numbers], factors, change).rows(starts)
        sources = entries.div(max(1, features.shape[1]), rounding_mode="floor")
        return product, SparseOuterProducts(numbers, sources, factors, product)
