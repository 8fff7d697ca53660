"""Fields in every usual form, and what is refused, filled or kept."""

from datetime import datetime

import numpy as np
import pyarrow as pa
import pytest
import torch

from clipline import Population
from clipline.data.readers import tables
from clipline.errors import PopulationError, SettingError

IDS = ["b", "a", "b"]
SECRET = 4711.25  # a user's value, which no message may hold


def made(x, **options):
    return Population.from_arrays(IDS, x=x, **options)


@pytest.mark.parametrize("dtype", ["bool", "u1", "u8", "i2", "i8", "f2", "f8", "c8", ">f4", ">i2"])
def test_numbers_keep_their_type_in_the_population(dtype):
    population = made(np.array([1, 0, 1], dtype))
    assert population.fields["x"].dtype == np.dtype(dtype).newbyteorder("=")
    assert population.fields["x"].tolist() == np.array([0, 1, 1]).astype(dtype).tolist()


def test_columns_of_other_libraries_are_fields():
    numbers = [1.5, 2.5, 3.5]
    for form in (numbers, pa.array(numbers), torch.tensor(numbers), np.array(numbers, object)):
        assert made(form).fields["x"].tolist() == [2.5, 1.5, 3.5]


@pytest.mark.parametrize("kind", ["float64", "Float64", "double[pyarrow]", "object"])
def test_columns_of_pandas_are_fields(kind):
    pandas = pytest.importorskip("pandas")
    assert made(pandas.Series([1.5, 2.5, 3.5], dtype=kind)).fields["x"].tolist() == [2.5, 1.5, 3.5]
    with pytest.raises(PopulationError, match=r"1 of 3 values missing|1 missing up to row 3"):
        made(pandas.Series([1.5, None, 3.5], dtype=kind))
    assert made(pandas.Series([1.5, None, 3.5], dtype=kind), missing=9).fields["x"].tolist() == [9, 1.5, 3.5]


def test_whole_numbers_with_gaps_stay_whole_where_filled():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"u": IDS, "x": pandas.Series([1, None, 3], dtype="Int64")})
    for population in (
        Population.from_dataframe(frame, user="u", fill={"x": -1}),
        Population.from_dataframe(frame, user="u", missing=-1.0),
        Population.from_arrays(frame.u, x=frame.x, fill={"x": -1}),
    ):
        assert (population.fields["x"].dtype, population.fields["x"].tolist()) == (np.int64, [-1, 1, 3])
    for make in (
        lambda **options: Population.from_dataframe(frame, user="u", **options),
        lambda **options: Population.from_arrays(frame.u, x=frame.x, **options),
    ):
        with pytest.raises(SettingError, match=r"whole|cannot fill"):
            make(missing=0.5)
        with pytest.raises(PopulationError, match="fill="):  # a whole number cannot be NaN
            make(missing="zero-update")


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (["p", "q", "r"], "field 'x' is text but must be numbers: leave it out"),
        (
            ["1", "SECRET 4711", "2.5"],
            "field 'x' is text, as 1 of 3 values is no number (row 2): mend the data, or leave such",
        ),
        (np.array(["2026-01-01"] * 3, "M8[s]"), "timestamps={'x': \"hours since 2026-01-01\"}"),
        ([datetime(2026, 1, 1)] * 3, "timestamps={'x'"),
        (np.array([1, 2, 3], "m8[s]"), "field 'x' is timedelta64[s]"),
        ([{"a": SECRET}, {}, {}], "the data has 'x' as struct"),
        (["1", "2.5", ""], "field 'x' holds numbers written as text: convert it"),
        (np.array([SECRET, "p", 1], object), "field 'x' is text, as 1 of 3 values is no number (row 2)"),
        (np.array([10**30, 1, 2], object), "field 'x' is object but must be numbers"),
        (["\ud800", "p", "q"], "the data has a lone surrogate, half a letter of UTF-16, in the text of 'x': mend it"),
        ([[1], [2, 3], [4]], "its rows have different shapes"),
        (np.array([1, 2, 2**63], np.uint64), "field 'x' has whole numbers of 2^63 or more"),
        ([SECRET, np.nan, np.nan], "field 'x' has 2 of 3 values missing (NaN)"),
        ([[SECRET, np.nan], [1, 2], [3, 4]], "field 'x' has 1 of 6 values missing (NaN)"),
        ([SECRET, None, 2], "the data has no value for 'x' in row 2 (1 missing up to row 3)"),
        ([SECRET, np.inf, -np.inf], "field 'x' has 2 of 3 values infinite or above 3.4e38"),
        ([SECRET, 1e39, 1.0], "field 'x' has 1 of 3 values infinite or above 3.4e38"),  # float32 makes infinity of it
        (torch.tensor([1.0] * 3, requires_grad=True), "field 'x' cannot become a NumPy array (RuntimeError)"),
    ],
)
def test_what_is_no_number_is_refused_when_the_population_is_made(x, words):
    with pytest.raises(PopulationError) as error:
        made(x)
    assert words in str(error.value)
    assert "4711" not in str(error.value)


def test_gaps_are_filled_or_kept_as_asked():
    x, y = [1.0, np.nan, 3.0], np.array([[np.nan, 1], [2, 3], [4, np.nan]], np.float32)
    population = Population.from_arrays(IDS, x=x, y=y, missing=0.0, fill={"y": 7})
    assert population.fields["x"].tolist() == [0, 1, 3]
    assert population.fields["y"].tolist() == [[2, 3], [7, 1], [4, 7]]
    assert population.fields["y"].dtype == np.float32
    kept = made([1.0, np.nan, np.inf], missing="zero-update").fields["x"]
    assert np.isnan(kept[0])
    assert kept[1:].tolist() == [1, np.inf]
    with pytest.raises(PopulationError, match="infinite"):  # infinity is no gap
        made([1.0, np.nan, np.inf], missing=0.0)
    assert np.isnan(x[1])  # the caller's own are as they were


def test_populations_made_by_hand_are_checked_too(tmp_path):
    fields = {"x": np.array([1.0, np.nan])}
    with pytest.raises(PopulationError, match="1 of 2 values missing"):
        Population(np.array([0, 2]), fields)
    kept = Population(np.array([0, 2]), fields, column_options={"missing": "zero-update"})
    opened = Population.open(kept.save(tmp_path / "kept"))
    assert opened.column_options == {"missing": "zero-update"}
    assert np.isnan(opened.subset([0]).fields["x"][1])


def test_a_gap_far_into_a_large_field_is_found():
    x = np.zeros((70_000, 40), np.float32)
    x[69_999, 39] = np.nan
    with pytest.raises(PopulationError, match="has 1 of 2800000 values missing"):
        Population(np.array([0, 70_000]), {"x": x})


def test_text_with_gaps_is_refused_with_a_way_out_that_works(tmp_path):
    path = tmp_path / "t.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({"u": [1, 1, 2], "kind": ["a", None, "b"]}), path)
    with pytest.raises(PopulationError, match=r"'kind' in row 2 .*categories=\{.*, where a gap is anything") as error:
        Population.from_table(path, user="u")
    assert "fill=" not in str(error.value)
    people = Population.from_table(path, user="u", categories={"kind": ["a", "b"]})
    assert people.fields["kind"].tolist() == [0, 2, 1]


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".jsonl", ".npz"])
def test_a_table_with_nan_is_refused_and_no_value_is_told(ending, tmp_path):
    path = tmp_path / f"t{ending}"
    if ending == ".npz":
        np.savez(path, u=IDS, x=[SECRET, np.nan, 1.0])
    elif ending == ".csv":
        path.write_text(f"u,x\nb,{SECRET}\na,nan\nb,1.5\n")
    elif ending == ".jsonl":
        path.write_text(f'{{"u": "b", "x": {SECRET}}}\n{{"u": "a", "x": null}}\n{{"u": "b", "x": 1.5}}\n')
    else:
        pytest.importorskip("pyarrow.parquet").write_table(pa.table({"u": IDS, "x": [SECRET, np.nan, 1.0]}), path)
    with pytest.raises(PopulationError, match="missing") as error:
        Population.from_table(path, user="u")
    assert "4711" not in str(error.value)
    assert Population.from_table(path, user="u", missing=5).of(0)["x"].tolist() == [5]
    assert np.isnan(Population.from_table(path, user="u", missing="zero-update").of(0)["x"]).all()


@pytest.mark.parametrize("lines", ["a,1\nb,secret word\n", "a,1\nb,2,secret word\n"])
def test_a_damaged_row_of_csv_is_told_without_its_values(lines, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "CSV_BYTES", 32)
    (tmp_path / "t.csv").write_text("u,x\n" + "a,1\n" * 30 + lines)  # the first block says what x is
    with pytest.raises(PopulationError) as error:
        Population.from_table(tmp_path / "t.csv", user="u")
    assert "secret" not in str(error.value)
    assert "in 'x', line 33, of another type" in str(error.value) or "(not shown)" in str(error.value)
