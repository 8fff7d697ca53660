"""Lists of unequal length: one declared width, and the lengths beside them."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from clipline import Population
from clipline.data.readers import tables
from clipline.errors import PopulationError, SettingError

USERS = ["b", "a", "b", "a"]
TOKENS = [[1, 2, 3, 4], [], [5], [6, 7]]
# By hand, for a width of 3: user a has the second and the fourth row, user b the first, cut, and the third.
WIDE, LENGTHS = [[0, 0, 0], [6, 7, 0], [1, 2, 3], [5, 0, 0]], [0, 2, 3, 1]


def check(population, dtype="int64"):
    assert population.fields["tokens"].tolist() == WIDE
    assert population.fields["tokens_length"].tolist() == LENGTHS
    assert (str(population.fields["tokens"].dtype), str(population.fields["tokens_length"].dtype)) == (dtype, "int32")
    assert population.column_options == {"lengths": {"tokens": 3}}


@pytest.mark.parametrize("library", ["pyarrow", "pandas", "polars"])
def test_a_dataframe_of_lists(library):
    frame = {"user": USERS, "tokens": TOKENS}
    frame = pa.table(frame) if library == "pyarrow" else pytest.importorskip(library).DataFrame(frame)
    population = Population.from_dataframe(frame, user="user", lengths={"tokens": 3})
    check(population)
    new = population.fields_of(pa.table({"tokens": [[9, 9, 9, 9], [8]]}))
    assert (new["tokens"].tolist(), new["tokens_length"].tolist()) == ([[9, 9, 9], [8, 0, 0]], [3, 1])


def test_arrays_of_lists():
    arrays, tensors = [np.array(row, np.int64) for row in TOKENS], [torch.tensor(row).long() for row in TOKENS]
    for column in (TOKENS, pa.array(TOKENS), arrays, tensors):
        check(Population.from_arrays(USERS, tokens=column, lengths={"tokens": 3}))


def test_files_and_stores_whatever_the_size_of_a_chunk(tmp_path, monkeypatch):
    table = pa.table({"user": USERS, "tokens": pa.array(TOKENS, pa.list_(pa.uint16()))})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    population = Population.from_table(tmp_path / "t.parquet", user="user", lengths={"tokens": 3})
    check(population, "uint16")
    check(Population.open(population.save(tmp_path / "store")), "uint16")
    rows = [{"user": user, "tokens": row} for user, row in zip(USERS, TOKENS, strict=True)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    check(Population.from_table(tmp_path / "t.jsonl", user="user", lengths={"tokens": 3}))
    monkeypatch.setattr(tables, "CHUNK_BYTES", 100)  # some lines a block, and one row a chunk
    one_by_one = Population.from_table(tmp_path / "t.jsonl", user="user", lengths={"tokens": 20})
    assert one_by_one.fields["tokens_length"].tolist() == [0, 2, 4, 1]
    assert one_by_one.fields["tokens"][:, :4].tolist() == [[0] * 4, [6, 7, 0, 0], [1, 2, 3, 4], [5, 0, 0, 0]]
    np.savez(tmp_path / "t.npz", user=np.array([1, 2]), tokens=np.array([[1, 2], [3, 4]]))
    narrow = Population.from_table(tmp_path / "t.npz", user="user", lengths={"tokens": 3})
    assert narrow.fields["tokens"].tolist() == [[1, 2, 0], [3, 4, 0]]


def test_lists_of_words_of_vectors_and_of_a_tokeniser():
    words = pa.table({"u": [1, 2], "w": [["bern", "oslo", "rome"], []]})
    options = {"lengths": {"w": 2}, "categories": {"w": ["rome", "bern"]}, "pad": -1}
    people = Population.from_dataframe(words, user="u", **options)
    assert people.fields["w"].tolist() == [[1, 2], [-1, -1]]
    assert people.column_options == options
    vectors = pa.table({"u": [1, 2], "v": [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]]})
    assert Population.from_dataframe(vectors, user="u", lengths={"v": 2}).fields["v"].tolist() == [
        [[1.0, 2.0], [0.0, 0.0]],
        [[3.0, 4.0], [5.0, 6.0]],
    ]
    texts = pa.table({"u": [1, 2], "post": ["abc", "a"]})
    made = Population.from_dataframe(
        texts, user="u", lengths={"post": 2}, text=lambda texts: [[ord(letter) for letter in text] for text in texts]
    )
    assert made.fields["post"].tolist() == [[97, 98], [97, 0]]


def test_the_shape_of_one_users_rows_does_not_depend_on_others():
    alone = Population.from_arrays(["a", "a"], tokens=[[], [6, 7]], lengths={"tokens": 3})
    with_others = Population.from_arrays(USERS, tokens=TOKENS, lengths={"tokens": 3})
    for name, field in alone.of(0).items():
        assert field.dtype == with_others.of(0)[name].dtype
        np.testing.assert_array_equal(field, with_others.of(0)[name])


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        ({"t": TOKENS}, {}, "rows have different shapes): give rows of equal shape, of numbers, or lengths={'t': 128}"),
        ({"t": [[1], None, [2], [3]]}, {"lengths": {"t": 3}}, "'t' holds a gap where lengths need a list"),
        ({"t": TOKENS, "t_length": USERS}, {"lengths": {"t": 3}}, "'t_length' has the name of the field that lengths="),
        ({"t": TOKENS}, {"lengths": {"u": 3}}, "lengths names 'u', which is no field: choose among t"),
        ({"t": TOKENS}, {"lengths": {"t": 0}}, "lengths['t']=0 must be a whole number at least 1 and at most 16777216"),
        ({"t": TOKENS}, {"lengths": {"t": 3}, "pad": 0.5}, "pad=0.5 cannot stand in 't', which is int64"),
        ({"t": TOKENS}, {"lengths": {"t": 3}, "pad": float("nan")}, "pad='float' must be a finite number"),
        ({"t": TOKENS}, {"lengths": 3}, "lengths='int' must be a dict by column"),
    ],
)  # fmt: skip
def test_what_cannot_be_padded_is_refused_without_a_value(columns, options, words):
    with pytest.raises((PopulationError, SettingError)) as error:
        Population.from_arrays(USERS, **columns, **options)
    assert words in str(error.value).replace("nan", "'float'")


def test_a_scale_subtracts_and_divides_and_is_stored(tmp_path):
    frame = pa.table({"u": [1, 2], "age": [30, 50], "v": [[1.0, 2.0], [3.0, 4.0]]})
    options = {"scale": {"age": [40.0, 20.0], "v": [[1.0, 0.0], [2.0, 4.0]]}}
    people = Population.from_dataframe(frame, user="u", **options)
    assert people.fields["age"].tolist() == [-0.5, 0.5]
    assert people.fields["v"].tolist() == [[0.0, 0.5], [1.0, 1.0]]
    assert Population.open(people.save(tmp_path / "s")).column_options == people.column_options == options
    assert people.fields_of(pa.table({"age": [60]}))["age"].tolist() == [1.0]
    for wrong, words in (
        ((40, 0), "what divides above 0"),
        ((40,), "two: what is subtracted"),
        (("a", 1), "numbers"),
        (([1, 2, 3], [1, 1, 1]), "shape"),
        ((10**400, 1), "numbers"),
    ):
        with pytest.raises((PopulationError, SettingError), match=words):
            Population.from_dataframe(frame, user="u", scale={"age": wrong})


def test_a_gap_inside_a_list_is_refused_by_its_row_or_filled():
    frame = pa.table({"u": [1, 2, 3], "t": [[1, 2, 3], [], [4, None]]})
    with pytest.raises(PopulationError, match=r"a list without a value in 't', row 3 \(1 missing up to row 3\)"):
        Population.from_dataframe(frame, user="u", lengths={"t": 2})
    filled = Population.from_dataframe(frame, user="u", lengths={"t": 2}, fill={"t": 9})
    assert filled.fields["t"].tolist() == [[1, 2], [0, 0], [4, 9]]
