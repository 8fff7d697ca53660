"""Made-up examples have the form of the population's and nothing else of them."""

import numpy as np
import pytest
import torch

from clipline.engine.isolation.made_up_data import FILLS, check_trial_batch, made_up, parameters_to_try
from clipline.errors import PopulationError

FIELDS = {
    "x": np.full((5, 3), 7.0, np.float32),
    "y": np.full(5, 9, np.uint16),
    "flag": np.ones(5, bool),
    "name": np.full(5, "secret"),
}


@pytest.mark.parametrize("fill", FILLS)
def test_made_up_examples_have_the_form_of_the_fields_and_none_of_their_values(fill):
    batch = made_up(FIELDS, 64, fill)
    for name, field in FIELDS.items():
        assert batch[name].shape == (64, *field.shape[1:])
        assert batch[name].dtype == field.dtype
    others = {name: np.zeros_like(field) for name, field in FIELDS.items()}
    for name, values in made_up(others, 64, fill).items():
        assert np.array_equal(values, batch[name])  # whatever the population holds
    assert not (batch["name"] == "secret").any()
    if fill == "mixed":
        assert set(np.unique(batch["y"])) == set(np.unique(batch["flag"])) == {0, 1}
        assert len(np.unique(batch["x"])) > 100
    else:
        assert (batch["x"] == (fill == "ones")).all()


@pytest.mark.parametrize(("width", "least"), [(1, 1), (2, 2), (3, 2), (16, 8)])
def test_made_up_lists_are_never_so_short_that_a_mean_over_the_tokens_after_the_first_divides_by_zero(width, least):
    fields = {"tokens": np.zeros((5, width), np.int64), "tokens_length": np.zeros(5, np.int32)}
    mixed, *others = (made_up(fields, 200, fill, lengths={"tokens_length": width})["tokens_length"] for fill in FILLS)
    assert (mixed.min(), mixed.max(), mixed.dtype) == (least, width, np.int32)
    assert all((lengths == width).all() for lengths in others)


def test_given_examples_are_repeated_in_the_types_of_the_fields():
    fields = {"x": FIELDS["x"], "y": FIELDS["y"].astype(np.int16)}
    given = check_trial_batch({"x": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], "y": torch.tensor([1, 2])}, fields)
    batch = made_up(fields, 3, "mixed", given)
    assert batch["x"].tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [1.0, 2.0, 3.0]]
    assert batch["y"].tolist() == [1, 2, 1]
    assert (batch["x"].dtype, batch["y"].dtype) == (np.float32, np.int16)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1, 2], "trial_batch is a list but must map field names to arrays"),
        ({"x": np.zeros((2, 3))}, "trial_batch has nothing for field 'y'"),
        ({"x": np.zeros((2, 4)), "y": [1, 2]}, r"trial_batch has shape \(2, 4\) for field 'x'"),
        ({"x": np.zeros((0, 3)), "y": []}, r"trial_batch has shape \(0, 3\) for field 'x'"),
        ({"x": np.zeros((2, 3)), "y": [1, 2, 3]}, "fields of different lengths"),
        ({"x": np.zeros((2, 3)), "y": [0.5, 1.5]}, "trial_batch has float64 for field 'y' but must have uint16"),
    ],
)
def test_a_trial_batch_of_another_form_is_refused(given, words):
    with pytest.raises(PopulationError, match=words):
        check_trial_batch(given, {name: FIELDS[name] for name in ("x", "y")})


def test_the_parameters_to_try_are_the_initial_ones_and_the_same_others_every_time():
    initial = torch.zeros(1000, dtype=torch.float64)
    state = torch.get_rng_state()
    first, again = (list(parameters_to_try(initial)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first[0], initial)
    assert all(one.dtype == torch.float64 for one in first)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert [round(float(one.std()), 2) for one in first] == [0.0, 0.02, 0.05]
