"""Datasets of torch with a user per item, and of Hugging Face where installed."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from clipline import Population
from clipline.errors import PopulationError

X = torch.arange(12.0).reshape(4, 3)
Y = torch.tensor([3, 1, 2, 0], dtype=torch.int32)
USERS = ["b", "a", "b", "a"]


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return self.rows[place]


def dicts(**more):
    return Rows([{"x": x, "y": int(y), "who": who, **more} for x, y, who in zip(X, Y, USERS, strict=True)])


@pytest.mark.parametrize("dataset", [torch.utils.data.TensorDataset(X, Y), Rows(list(zip(X.numpy(), Y, strict=True)))])
def test_a_torch_dataset_of_tuples_equals_its_arrays(dataset):
    plain = Population.from_arrays(USERS, x=X.numpy(), y=Y.numpy())
    assert Population.from_dataset(dataset, USERS).fingerprint() == plain.fingerprint()
    named = Population.from_dataset(dataset, np.array([7, 5, 7, 5]), fields=["image", "label"], known_users=[9])
    assert (list(named.fields), named.user_ids.tolist()) == (["image", "label"], [5, 7, 9])
    assert named.of(0)["label"].tolist() == [1, 0]


def test_a_torch_dataset_of_dicts_names_its_fields_and_its_users():
    population = Population.from_dataset(dicts(), "who")
    plain = Population.from_arrays(USERS, x=X.numpy(), y=Y.numpy().astype(int))
    assert population.fingerprint() == plain.fingerprint()
    single = Population.from_dataset(Rows(list(X)), USERS, fields=["x"])
    assert single.of(1)["x"].tolist() == [[0, 1, 2], [6, 7, 8]]
    tensors = Population.from_dataset(Rows([{"u": torch.tensor(u), "x": 1.0} for u in (4, 2)]), "u")
    assert tensors.user_ids.tolist() == [2, 4]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Population.from_dataset(iter([1]), [1]), "must have a length and items by number"),
        (lambda: Population.from_dataset(Rows([]), []), "dataset has 0 items"),
        (lambda: Population.from_dataset(DataLoader(Rows([1])), [1]), "give from_dataset(loader.dataset, user_ids)"),
        (lambda: Population.from_dataset(Rows([(1, 2, 3)]), [1]), "are 2 but items have 3 entries"),
        (lambda: Population.from_dataset(dicts(), "whom"), "no key 'whom' for the user: did you mean 'who'?"),
        (lambda: Population.from_dataset(Rows([{"x": 1}, {"y": 1}]), [1, 2]), "items have different keys"),
        (lambda: Population.from_dataset(Rows([(X[0], 0), (X[0, :2], 1)]), [1, 2]), "field 'x' has items of different"),
        (lambda: Population.from_dataset(Rows([(X[0] * np.nan, 1)]), [1]), "field 'x' has 3 of 3 values missing"),
    ],
)
def test_a_dataset_that_is_no_population_is_refused(make, words):
    with pytest.raises(PopulationError) as error:
        make()
    assert words in str(error.value)


def test_a_dataset_of_hugging_face_is_a_dataframe_with_its_choice_of_rows():
    datasets = pytest.importorskip("datasets")
    rows = {"who": ["b", "a", "b", "c"], "x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], "y": [0, 1, 0, 1]}
    dataset = datasets.Dataset.from_dict(rows).select([2, 0, 1])
    population = Population.from_dataframe(dataset, user="who")
    plain = Population.from_arrays(["b", "b", "a"], x=[[5.0, 6.0], [1.0, 2.0], [3.0, 4.0]], y=[0, 0, 1])
    assert population.fingerprint() == plain.fingerprint()
    with pytest.raises(PopulationError, match="give one, as dataset\\['train'\\]"):
        Population.from_dataframe(datasets.DatasetDict({"train": dataset}), user="who")
    with pytest.raises(PopulationError, match="load it without streaming=True"):
        Population.from_dataframe(dataset.to_iterable_dataset(), user="who")
    with pytest.raises(PopulationError, match="has no user column 'whom': did you mean 'who'"):
        Population.from_dataframe(dataset, user="whom")


@pytest.mark.parametrize("changed", [[float("nan")] * 3, [1e30, -1e30, 0.0], [0.5, 0.5, 0.5]])
def test_another_item_of_one_user_moves_nobody_else(changed):
    def by_user(rows):
        people = Population.from_dataset(Rows([{"x": x, "who": who} for x, who in rows]), "who", missing="zero-update")
        ends = people.offsets
        return {who: people.fields["x"][ends[i] : ends[i + 1]].tobytes() for i, who in enumerate(people.user_ids)}

    rows = list(zip(X, USERS, strict=True))
    before, after = by_user(rows), by_user([(torch.tensor(changed), "b"), *rows[1:]])
    assert after["b"] != before["b"]
    assert after["a"] == before["a"] == X[[1, 3]].numpy().tobytes()
