"""Dataframes of pyarrow always, of pandas and polars where they are installed."""

import subprocess
import sys
from datetime import datetime

import numpy as np
import pyarrow as pa
import pytest

from clipline import Population
from clipline.errors import PopulationError

COLUMNS = {
    "rider": ["zoë", "ann", "bob", "ann"],
    "minutes": [12.5, 3.25, 8.0, 1.5],
    "stops": [1, 2, 3, 4],
    "start": [[0, 1], [2, 3], [4, 5], [6, 7]],
}
LIBRARIES = ["pyarrow", "pandas", "polars"]


def frame_of(library, columns):
    if library == "pyarrow":
        return pa.table(columns)
    return pytest.importorskip(library).DataFrame(columns)


def same(one, other):
    assert one.user_ids.tolist() == other.user_ids.tolist()
    assert np.array_equal(one.offsets, other.offsets)
    assert list(one.fields) == list(other.fields)
    for name, field in one.fields.items():
        assert field.dtype == other.fields[name].dtype
        assert np.array_equal(field, other.fields[name])


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_dataframe_equals_the_arrays_that_are_in_it(library):
    population = Population.from_dataframe(frame_of(library, COLUMNS), user="rider")
    arrays = {name: np.array(column) for name, column in COLUMNS.items()}
    same(population, Population.from_arrays(arrays.pop("rider"), **arrays))
    assert population.fields["start"].shape == (4, 2)


@pytest.mark.parametrize("library", LIBRARIES)
def test_text_is_refused_with_the_ways_out_that_work(library):
    frame = frame_of(library, {"u": ["a", "b"], "note": ["xyz", "x"], "x": [1, 2]})
    with pytest.raises(PopulationError, match="field 'note' is text but must be numbers: leave it out of the f"):
        Population.from_dataframe(frame, user="u")
    same(Population.from_dataframe(frame, user="u", fields=["x"]), Population.from_arrays(["a", "b"], x=[1, 2]))
    lengths = Population.from_dataframe(frame, user="u", text=lambda notes: np.array([len(note) for note in notes]))
    same(lengths, Population.from_arrays(["a", "b"], note=[3, 1], x=[1, 2]))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"u": [1, None], "x": [1, 2]}, "missing"),
        ({"u": [1, 2], "x": [1.0, None]}, "has no value for 'x' in row 2 (1 missing up to row 2): fill the gaps"),
        ({"u": [0.5, 1.5], "x": [1, 2]}, "user column 'u' is float64 but must hold whole numbers or text"),
        ({"u": ["a", ""], "x": [1, 2]}, "user column 'u' has 1 of 2 ids empty"),
        ({"u": ["a", "b"], "x": [[1], [1, 2]]}, "lists of 1 to 2 entries in 'x': give them one width with lengths="),
        ({"u": ["a", "b"]}, "population has 0 fields"),
        ({"rider": ["a", "b"], "x": [1, 2]}, "dataframe has no user column 'u': "),
        ({"u": ["a", "b"], "x": [datetime(2026, 1, 1)] * 2}, "turn it into numbers or leave it out"),
    ],
)
def test_a_dataframe_that_is_no_population_is_refused(library, columns, words):
    with pytest.raises(PopulationError) as error:
        Population.from_dataframe(frame_of(library, columns), user="u")
    assert words in str(error.value)


@pytest.mark.parametrize("frame", [{"u": [1], "x": [2]}, [1, 2], None, np.zeros((2, 2)), pa.array([1, 2])])
def test_what_is_no_dataframe_is_refused(frame):
    with pytest.raises(PopulationError, match="DataFrame of pandas or polars, or a Table of pyarrow"):
        Population.from_dataframe(frame, user="u")


def test_the_population_does_not_share_memory_with_the_dataframe():
    x = np.arange(3.0)
    frame = pa.table({"u": [1, 2, 3], "x": pa.array(x)})
    population = Population.from_dataframe(frame, user="u")
    population.fields["x"][0] = 9.0
    assert frame.column("x").to_pylist() == [0.0, 1.0, 2.0]


def test_an_index_of_pandas_is_no_field_and_columns_need_names():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"u": ["a", "b"], "x": [1, 2]}, index=[5, 6])
    assert list(Population.from_dataframe(frame, user="u").fields) == ["x"]
    assert list(Population.from_dataframe(frame[frame.u == "b"], user="u").user_ids) == ["b"]
    with pytest.raises(PopulationError, match="2 columns named 'x'"):
        Population.from_dataframe(pandas.concat([frame, frame[["x"]]], axis=1), user="u")
    with pytest.raises(PopulationError, match="field 3 must be named by text"):
        Population.from_dataframe(frame.rename(columns={"x": 3}), user="u")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda frame: frame.set_index("user"), r"'user' is the index but must be a column: give df.reset_index\(\)"),
        (lambda frame: frame.assign(x=[1, "a"]), "column x .*: give its columns one kind of value each"),
        (lambda frame: frame.assign(x=frame["x"].astype("timedelta64[s]")), r"as with \.dt\.total_seconds\(\)"),
    ],
)
def test_what_pandas_holds_and_a_population_cannot_is_refused_with_a_way_out_that_works(change, words):
    pandas = pytest.importorskip("pandas")
    with pytest.raises(PopulationError, match=words):
        Population.from_dataframe(change(pandas.DataFrame({"user": ["a", "b"], "x": [1, 2]})), user="user")


def test_pandas_and_polars_are_never_imported_by_us():
    code = (
        "import sys, pyarrow as pa; from clipline import Population; frame = pa.table({'u': ['a'], 'x': [1]}); "
        "before = set(sys.modules); Population.from_dataframe(frame, user='u'); "  # Arrow itself may have imported some
        "print({'pandas', 'polars'} & (set(sys.modules) - before))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"
