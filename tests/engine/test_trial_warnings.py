"""Values that a loss cannot take are found by the largest and the smallest of each field."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipline as cl
from clipline import Population
from clipline.engine.core.batches import Examples
from clipline.engine.core.one_by_one import RetainedStateWarning
from clipline.engine.trial_warnings import ValueRangeWarning, check_ranges
from clipline.errors import PopulationError


def checked(run, categories=(), most_bytes=2**20, **fields):
    users = Population.from_arrays(np.arange(len(next(iter(fields.values())))), **fields)
    return check_ranges(
        Examples(users, torch.device("cpu"), torch.float32), run, "the loss", dict(categories), most_bytes
    )


def lookup(batch):
    return torch.zeros(5)[batch["place"].long()] + torch.zeros(9)[batch["word"].long()].sum(dim=1)


def test_the_field_and_what_it_may_hold_are_named_whichever_field_it_is():
    words = np.tile(np.arange(9, dtype=np.int16), (30, 1))
    checked(lookup, place=np.arange(30) % 5, word=words)
    said = r"^field 'place' holds values up to 5, and the loss takes 0 to 4 \(.* for 6$"
    with pytest.raises(PopulationError, match=said):
        checked(lookup, place=np.arange(30) % 6, word=words)
    words[17, 3] = 12
    said = r"^field 'word' holds values up to 12, and the loss takes 0 to 8 \(.* for 13$"
    with pytest.raises(PopulationError, match=said):
        checked(lookup, place=np.arange(30) % 5, word=words)


def test_what_categories_do_not_list_is_told():
    with pytest.raises(PopulationError, match=r"up to 5 \(5 stands for whatever its categories do not list\), and"):
        checked(lookup, {"place": ["a", "b", "c", "d", "e"]}, place=np.arange(6), word=np.zeros((6, 1), np.int64))


def test_an_error_that_no_single_field_explains_and_what_comes_late_in_a_long_field_are_left_alone():
    def broken(batch):
        raise ZeroDivisionError

    checked(broken, place=np.arange(6))
    words = np.zeros((6, 1), np.int64)
    checked(lookup, most_bytes=5 * 8, place=np.arange(6), word=words)  # the last place, 5, is the sixth
    with pytest.raises(PopulationError, match="'place' holds values up to 5"):
        checked(lookup, most_bytes=6 * 8, place=np.arange(6), word=words)


@pytest.mark.parametrize("dtype", ["uint16", "float32", "float64"])
def test_labels_of_any_type_are_looked_at(dtype):
    with pytest.raises(PopulationError, match=r"^field 'place' holds values up to 5, and the loss takes 0 to 4 \("):
        checked(lookup, place=np.arange(6).astype(dtype), word=np.zeros((6, 1), np.int64))


def test_two_fields_at_fault_do_not_hide_each_other():
    places, words = np.arange(6), np.full((6, 1), 12)
    with pytest.raises(PopulationError, match=r"^field 'place' holds values up to 5, .* 0 to 4 \(IndexError: index 5 "):
        checked(lookup, place=places, word=words)
    with pytest.raises(PopulationError, match=r"^field 'word' holds values up to 12, .* 0 to 8 \(IndexError: index 1"):
        checked(lookup, word=words, place=places)


MODEL = nn.Linear(1, 3)


def scores(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def training(labels, loss=scores, missing=None, **others):
    x = np.linspace(-1, 1, len(labels), dtype=np.float32)[:, None]
    users = Population.from_arrays(np.arange(len(labels)), x=x, y=labels, missing=missing)
    return cl.Training(
        MODEL, loss, users, rounds=1, cohort_size=4, local=cl.LocalSGD(lr=0.1),
        privacy=cl.Privacy(noise_multiplier=1.0), seed=0, **others,
    )  # fmt: skip


def test_a_training_warns_of_labels_that_begin_at_1_and_trains_as_it_would_without_a_warning():
    labels = np.arange(8) % 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training(labels)
        quiet = training(labels + 1, missing="zero-update").run()
    with pytest.warns(ValueRangeWarning, match=r"^field 'y' holds values up to 3, and the loss takes 0 to 2 \(Index"):
        warned = training(labels + 1)
    state = torch.get_rng_state()
    with pytest.warns(ValueRangeWarning, match=r"^field 'y' holds -1, and the loss takes none below 0 .* adds nothing"):
        training(labels - 1)
    assert torch.equal(torch.get_rng_state(), state)
    for got, wanted in zip(warned.run().model.parameters(), quiet.model.parameters(), strict=True):
        assert torch.equal(got, wanted)


def test_a_loss_finds_its_reference_and_its_own_state_as_before():
    seen = []

    def remembering(model, batch, reference):
        seen.append(len(batch["y"]))
        assert {name: tuple(piece.shape) for name, piece in reference.items()} == {"weight": (3, 1), "bias": (3,)}
        return scores(model, batch)

    with pytest.warns(RetainedStateWarning), pytest.warns(ValueRangeWarning, match="takes 0 to 2"):
        training(np.arange(8) % 4, remembering, compute=cl.Compute(engine="one-by-one"))
    assert seen == []
