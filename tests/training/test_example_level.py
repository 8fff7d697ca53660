"""Privacy for single examples: the page and the example run as printed, and the guarantee says what it is for."""

import warnings

import numpy as np
import pytest
import torch
from samples import ROOT, load_script
from torch import nn
from torch.utils.data import TensorDataset

from clipline import FixedClip, LocalSGD, Population, Privacy, ServerNormalised, Training
from clipline.errors import PopulationError


def test_the_example_is_short_and_learns(capsys):
    path = ROOT / "examples" / "example_level_images.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
    assert load_script(path).accuracy > 0.6  # a guess gives 0.1
    assert "one example" in capsys.readouterr().out


def test_each_item_is_a_user_with_a_number_for_an_id():
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6)
    arrays = Population.one_each(x=x, y=y)
    items = Population.one_each(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)))
    named = Population.one_each([{"x": row, "y": label} for row, label in zip(x, y, strict=True)])
    for population in (arrays, items, named):
        assert len(population) == population.examples == 6
        assert population.user_ids.dtype.kind == "i"
        assert population.example_level
        assert np.array_equal(population.of(4)["x"], [[8.0, 9.0]])
        assert population.of(4)["y"] == [4]
    assert arrays.fingerprint() == items.fingerprint()


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_rows_of_a_dataframe_may_be_users_with_options_of_columns(library):
    frames = pytest.importorskip(library)
    columns = {"km": [1.0, None, 3.0], "bike": ["race", "city", "boat"], "late": [0, 1, 1]}
    frame = (frames.table if library == "pyarrow" else frames.DataFrame)(columns)
    options = {"fill": {"km": 2.0}, "categories": {"bike": ["city", "race"]}}
    for population in (Population.one_each(frame, **options), Population.one_each(**columns, **options)):
        assert population.example_level
        assert {name: values.tolist() for name, values in population.fields.items()} == {
            "km": [1.0, 2.0, 3.0], "bike": [1, 0, 2], "late": [0, 1, 1]
        }  # fmt: skip
        assert population.column_options == options
    assert list(Population.one_each(frame, fields=["late"]).fields) == ["late"]
    with pytest.raises(PopulationError, match="has no column 'lat': did you mean 'late'"):
        Population.one_each(frame, fields=["lat"])
    with pytest.raises(PopulationError, match=r"use Population\.from_dataframe"):
        Population.from_dataset(frame, [1, 2, 3])


def test_the_server_needs_no_rate_and_the_average_of_models_is_given_for_users_and_for_examples():
    x, terms = np.ones((4, 1), np.float32), {"rounds": 4, "cohort_size": 2, "local": LocalSGD(1.0)}
    for population in (Population.one_each(x=x), Population.from_arrays([0, 1, 2, 3], x=x)):
        made = Training(
            nn.Linear(1, 1), lambda model, batch: model(batch["x"]).mean(), population, privacy=Privacy(epsilon=9.0),
            **terms,
        )  # fmt: skip
        assert made.server == ServerNormalised(0.37 / 4**0.5)
        assert made.average


def test_halves_subsets_and_stores_stay_at_the_level_of_examples(tmp_path):
    population = Population.one_each(x=np.arange(40.0))
    train, test = population.split(test=10)
    assert train.example_level
    assert test.example_level
    assert sorted([*train.user_ids, *test.user_ids]) == list(range(40))  # who leaves takes nobody's number along
    assert np.array_equal(train.fields["x"], train.user_ids)
    assert Population.open(test.save(tmp_path / "store")).example_level
    users = Population.from_arrays([0, 0, 1], x=np.arange(3.0))
    assert not Population.open(users.save(tmp_path / "users")).example_level


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "needs one of them"),
        ({"dataset": [(1.0, 2)], "x": np.zeros(1)}, "needs one of them"),
        ({"x": np.zeros(3), "y": np.zeros(2)}, "field 'y' has 2 rows but must have 3"),
        ({"x": np.array([1.0, np.nan])}, "missing"),
    ],
)
def test_what_is_no_table_of_examples_is_refused(given, words):
    with pytest.raises(PopulationError, match=words):
        Population.one_each(**given)


def test_users_of_several_examples_are_not_called_examples():
    with pytest.raises(PopulationError, match="one_each"):
        Population(np.array([0, 2, 3]), {"x": np.zeros(3)}, example_level=True)


def training(population, **privacy):
    def loss(model, batch):
        return model(batch["x"]).square().sum(dim=1)

    with warnings.catch_warnings(action="ignore"):
        return Training(
            torch.nn.Linear(2, 1), loss, population, rounds=3, cohort_size=20, local=LocalSGD(1.0),
            clip=FixedClip(1.0), privacy=Privacy(noise_multiplier=1.0, delta=1e-3, **privacy),
        )  # fmt: skip


def test_the_guarantee_is_for_one_example_and_says_that_each_user_is_one():
    x = np.zeros((100, 2), np.float32)
    examples, users = Population.one_each(x=x), Population.from_arrays(np.arange(100), x=x)
    added = str(training(examples, population_size=100).run().guarantee)
    assert "for add-or-remove one example, where each user is one example, Poisson" in added
    silent = str(training(examples).planned)
    assert "zero-out one example (the number of examples is public), where each user is one example" in silent
    assert "one user" not in added + silent
    ordinary = training(users, population_size=100).planned
    assert "for add-or-remove one user, Poisson" in str(ordinary)  # one row each, but not by the way it was made
    assert ordinary.epsilon == training(examples, population_size=100).planned.epsilon
