"""Values that a loss cannot take are found by the largest and the smallest of each field."""

import numpy as np
import pytest
import torch

from clipline import Population
from clipline.engine.batches import Examples
from clipline.errors import PopulationError
from clipline.tasks.own import value_ranges
from clipline.tasks.own.value_ranges import check_ranges


def checked(run, categories=(), **fields):
    users = Population.from_arrays(np.arange(len(next(iter(fields.values())))), **fields)
    return check_ranges(Examples(users, torch.device("cpu"), torch.float32), run, "the loss", dict(categories))


def lookup(batch):
    return torch.zeros(5)[batch["place"].long()] + torch.zeros(9)[batch["word"].long()].sum(dim=1)


def test_the_field_and_what_it_may_hold_are_named_whichever_field_it_is():
    words = np.tile(np.arange(9, dtype=np.int16), (30, 1))
    checked(lookup, place=np.arange(30) % 5, word=words)
    with pytest.raises(
        PopulationError, match=r"^field 'place' holds values up to 5, and the loss takes 0 to 4 \(.* for 6$"
    ):
        checked(lookup, place=np.arange(30) % 6, word=words)
    words[17, 3] = 12
    with pytest.raises(
        PopulationError, match=r"^field 'word' holds values up to 12, and the loss takes 0 to 8 \(.* for 13$"
    ):
        checked(lookup, place=np.arange(30) % 5, word=words)


def test_what_categories_do_not_list_is_told():
    with pytest.raises(PopulationError, match=r"up to 5 \(5 stands for whatever its categories do not list\), and"):
        checked(lookup, {"place": ["a", "b", "c", "d", "e"]}, place=np.arange(6), word=np.zeros((6, 1), np.int64))


def test_an_error_that_no_single_field_explains_and_fields_too_large_to_look_through_are_left_alone(monkeypatch):
    def broken(batch):
        raise ZeroDivisionError

    checked(broken, place=np.arange(6))
    monkeypatch.setattr(value_ranges, "_MOST_BYTES", 8)
    checked(lookup, place=np.arange(6), word=np.zeros((6, 1), np.int64))


@pytest.mark.parametrize("dtype", ["uint16", "float32", "float64"])
def test_labels_of_any_type_are_looked_at(dtype):
    with pytest.raises(PopulationError, match=r"^field 'place' holds values up to 5, and the loss takes 0 to 4 \("):
        checked(lookup, place=np.arange(6).astype(dtype), word=np.zeros((6, 1), np.int64))


def test_two_fields_at_fault_do_not_hide_each_other():
    places, words = np.arange(6), np.full((6, 1), 12)
    with pytest.raises(PopulationError, match=r"^field 'place' holds values up to 5, .* 0 to 4 \(IndexError: index 5 "):
        checked(lookup, place=places, word=words)
    with pytest.raises(
        PopulationError, match=r"^field 'word' holds values up to 12, .* 0 to 8 \(IndexError: index 12 "
    ):
        checked(lookup, word=words, place=places)
