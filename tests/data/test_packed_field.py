"""Lists kept end to end read as the padded array, and give the same batches, updates and fingerprints as it does."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from samples import flat_training, rows_of
from torch import nn

from clipline import LocalSGD, Population
from clipline.data import packed_field
from clipline.data.packed_field import PackedField, stored_values
from clipline.engine.choose import choose_trainer
from clipline.engine.core.batches import Examples
from clipline.engine.core.one_by_one import OneByOne
from clipline.engine.core.problem import Problem
from clipline.errors import ModuleError, PopulationError
from clipline.random.streams import Streams

LISTS = [[1, 2, 3], [], [4], [5, 6], [], [7, 8, 9, 10], []]
WIDTH = 4


def by_hand(lists, width, pad, dtype):
    """The padded array, row by row in plain Python."""
    return np.array([[*row[:width], *[pad] * (width - len(row))] for row in lists], dtype)


def packed(lists=LISTS, width=WIDTH, pad=0, dtype=np.int64):
    offsets = np.cumsum([0, *map(len, lists)])
    return PackedField(np.array([one for row in lists for one in row], dtype), offsets, width, np.array(pad, dtype))


@pytest.mark.parametrize(
    "index",
    [
        slice(None), slice(2, 5), slice(5, 2), slice(-3, None), slice(None, None, 2), slice(7, 9), 3, -1, np.int64(5),
        np.array([6, 0, 0, 3]), np.array([[1, 5, 0], [2, -2, 6]]), np.zeros((2, 0), np.int64),
        np.array([True, False, True, True, False, False, True]), (slice(None), slice(0, 2)), [0, 3],
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("pad", "long"), [(0, 100), (-1, 0)])  # by an index of all entries, and row by row
def test_an_index_gives_what_it_gives_of_the_padded_array(index, pad, long, monkeypatch):
    monkeypatch.setattr(packed_field, "_LONG", long)
    field, padded = packed(pad=pad, dtype=np.int16), by_hand(LISTS, WIDTH, pad, np.int16)
    found, wanted = field[index], padded[index]
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert found.tolist() == wanted.tolist()


def test_it_has_the_form_of_the_padded_array():
    field, padded = packed(pad=-1), by_hand(LISTS, WIDTH, -1, np.int64)
    for form in ("shape", "dtype", "ndim", "size", "itemsize", "nbytes"):
        assert getattr(field, form) == getattr(padded, form), form
    assert len(field) == 7
    assert np.asarray(field).tolist() == field.tolist() == padded.tolist()
    assert np.asarray(field, np.float32).dtype == np.float32
    assert field.take(np.array([5, 0])).tolist() == padded[[5, 0]].tolist()
    assert field.astype(np.int8).tolist() == padded.tolist()
    assert field.astype(np.int64, copy=False) is field
    with pytest.raises(IndexError):
        field[np.array([7])]


def test_whatever_else_is_asked_of_it_the_padded_array_answers():
    field, padded = packed(), by_hand(LISTS, WIDTH, 0, np.int64)
    assert (field == 0).tolist() == (padded == 0).tolist()
    assert (2 * field + field).tolist() == (3 * padded).tolist()
    assert (field.max(), field.mean(), np.max(field)) == (10, padded.mean(), 10)
    assert field.reshape(-1).tolist() == padded.reshape(-1).tolist()
    assert np.concatenate([field, padded]).shape == (14, WIDTH)
    assert copy.deepcopy(field).tolist() == pickle.loads(pickle.dumps(field)).tolist() == padded.tolist()
    assert repr(field) == "PackedField(7 rows of at most 4, int64)"
    for write in (lambda: field.fill(1), lambda: field.sort(), lambda: field.__setitem__(0, 1)):
        with pytest.raises((ValueError, TypeError, AttributeError)):  # not in silence, on a copy
            write()
    assert field.tolist() == padded.tolist()
    with pytest.raises(AttributeError, match="has no 'tokens'"):
        _ = field.tokens


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([0, 2, 1, 3], "rise by -1 to 2 but must by 0 to the width of 2"),  # one row would be another user's
        ([0, 3, 3, 3], "rise by 0 to 3"),
        ([1, 2, 3, 3], "go from 1 to 3 but must go from 0 to 3"),
        ([[0, 3]], "must be int64 with one axis"),
        ([], "must be int64 with one axis"),
    ],
)
def test_offsets_that_are_no_running_totals_are_refused(offsets, words):
    with pytest.raises(PopulationError, match=words):
        PackedField(np.arange(3), np.array(offsets), 2, np.array(0))


def texts(dtype=np.uint16, pad=0):
    """Users with 0 to 9 texts of 0 to 8 tokens, of which 6 are kept, packed; and the same padded by hand."""
    rng = np.random.default_rng(4)
    ids = rng.permutation(np.repeat(np.arange(12), rng.integers(0, 10, 12)))
    lists = [rng.integers(0, 20, rng.integers(0, 9)).astype(dtype) for _ in ids]
    column = pa.array([row.tolist() for row in lists], pa.list_(pa.from_numpy_dtype(dtype)))
    frame = pa.table({"user": ids, "tokens": column, "y": np.arange(len(ids)) % 3})
    people = Population.from_dataframe(frame, "user", known_users=np.arange(12), lengths={"tokens": 6}, pad=pad)
    order = np.argsort(ids, kind="stable")
    padded = by_hand([lists[i].tolist() for i in order], 6, pad, dtype)
    return people, replace(people, fields={**people.fields, "tokens": padded})


def test_a_population_of_lists_is_packed_and_its_fingerprint_is_that_of_the_padded_one():
    people, padded = texts()
    assert isinstance(people.fields["tokens"], PackedField)
    assert len(stored_values(people.fields["tokens"])) == people.fields["tokens_length"].sum()
    assert people.fingerprint() == padded.fingerprint()
    assert people.of(3)["tokens"].tolist() == padded.of(3)["tokens"].tolist()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint64, np.float64])
def test_a_batch_is_that_of_the_padded_field(dtype):
    rows = np.array([[3, 0, 0], [7, 12, 1]])
    for people in zip(*(people_batches(one, rows) for one in texts(dtype)), strict=True):
        for found, wanted in zip(*(batch.values() for batch in people), strict=True):
            assert (found.dtype, found.stride()) == (wanted.dtype, wanted.stride())
            assert torch.equal(found.to(torch.float64), wanted.to(torch.float64))


def people_batches(population, rows):
    examples = Examples(population, torch.device("cpu"), torch.float32)
    moved = {name: examples._all_moved(field) for name, field in population.fields.items()}  # as to a GPU
    return examples.gather(rows), examples.between(2, 9), moved, {"bytes": torch.tensor(examples.bytes_each)}


class Bag(nn.Module):
    """The mean of the embeddings of a text's tokens, to 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, tokens, length):
        real = (torch.arange(6) < length.unsqueeze(-1)).unsqueeze(-1)
        return self.out((self.words(tokens.long()) * real).sum(dim=-2) / length.clamp(min=1).unsqueeze(-1))


def bag_loss(model, batch):
    scores = model(batch["tokens"], batch["tokens_length"])
    return nn.functional.cross_entropy(scores, batch["y"], reduction="none")


@pytest.mark.parametrize("row_fields", [None, {"words.weight": "tokens"}], ids=["dense", "rows"])
@pytest.mark.parametrize("engine", ["one-by-one", "stacked"])
def test_every_update_is_that_of_the_padded_field_bit_for_bit(engine, row_fields):
    local = LocalSGD(0.5, batch_size=3, epochs=2)
    both = []
    for people in texts():
        plain = OneByOne(Problem(Bag(), bag_loss, people, local, Streams(1), row_fields=row_fields))
        both.append(rows_of(choose_trainer(engine, plain, 12), np.arange(12)))
    assert both[0].abs().sum(dim=1).gt(0).sum() > 8
    assert torch.equal(*both)


@pytest.mark.parametrize("engine", ["one-by-one", "stacked"])
def test_a_training_is_that_of_the_padded_field_bit_for_bit(engine, tmp_path):
    people, padded = texts()
    stored = Population.open(people.save(tmp_path / "store"))
    results = [
        flat_training(
            Bag(), bag_loss, one, rounds=3, cohort_size=6, local=LocalSGD(0.5, 3), noise_multiplier=1.0, seed=3,
            engine=engine,
        ).run()
        for one in (people, stored, padded)
    ]  # fmt: skip
    first, *others = [torch.cat([param.detach().reshape(-1) for param in one.model.parameters()]) for one in results]
    assert not torch.equal(first, torch.cat([param.detach().reshape(-1) for param in Bag().parameters()]))
    for other in others:
        assert torch.equal(first, other)


def test_row_numbers_below_0_are_found_in_the_padding_of_lists():
    people, _ = texts(np.int64, pad=-1)
    with pytest.raises(ModuleError, match="'tokens' holds a number below 0"):
        Problem(Bag(), bag_loss, people, LocalSGD(0.5, 3), Streams(1), row_fields={"words.weight": "tokens"})
