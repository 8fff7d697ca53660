"""Categories, timestamps and gaps: asked for once, stored, and applied to new data alike."""

import json
from datetime import UTC, date, datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from clipline import Population
from clipline.data import prepare_table
from clipline.data.column_options import ColumnOptions
from clipline.errors import PopulationError, SettingError

OPTIONS = {
    "categories": {"city": ["Rome", "Bern"]},
    "timestamps": {"start": "hours since 2026-01-01"},
    "fill": {"minutes": 2.5},
}
COLUMNS = {
    "rider": ["b", "a", "b", "a"],
    "city": ["Bern", "Oslo", None, "Rome"],
    "start": [datetime(2026, 1, 1, 12), datetime(2025, 12, 31), datetime(2026, 1, 2, 0, 30), datetime(2026, 1, 1)],
    "minutes": [1.0, None, 3.0, 4.0],
}
# By hand; user a first, whose rows are the second and the fourth.
CODES, HOURS, MINUTES = [2, 0, 1, 2], [-24.0, 0.0, 12.0, 24.5], [2.5, 4.0, 1.0, 3.0]


def check(population):
    assert population.fields["city"].tolist() == CODES
    assert population.fields["start"].tolist() == HOURS
    assert population.fields["minutes"].tolist() == MINUTES
    assert population.column_options == OPTIONS


@pytest.mark.parametrize("library", ["pyarrow", "pandas", "polars"])
def test_options_of_a_dataframe(library):
    frame = pa.table(COLUMNS) if library == "pyarrow" else pytest.importorskip(library).DataFrame(COLUMNS)
    population = Population.from_dataframe(frame, user="rider", **OPTIONS)
    check(population)
    new = population.fields_of(frame.select(["city", "start"]) if library != "pandas" else frame[["city", "start"]])
    assert (new["city"].tolist(), new["start"].tolist()) == ([1, 2, 2, 0], [12.0, -24.0, 24.5, 0.0])


def test_options_of_arrays_of_files_and_of_stores(tmp_path):
    columns = dict(COLUMNS)
    check(Population.from_arrays(columns.pop("rider"), **columns, **OPTIONS))
    pyarrow.parquet.write_table(pa.table(COLUMNS), tmp_path / "t.parquet")
    check(Population.from_table(tmp_path / "t.parquet", user="rider", **OPTIONS))
    prepare_table(tmp_path / "t.parquet", tmp_path / "s", "rider", options=ColumnOptions(**OPTIONS))
    opened = Population.open(tmp_path / "s")
    check(opened)
    check(Population.open(opened.save(tmp_path / "again")))
    assert all(half.column_options == OPTIONS for half in opened.split(test=1))


def test_times_with_a_zone_are_counted_in_utc():
    east = timezone(timedelta(hours=2))
    times = [datetime(2026, 1, 1, 2, tzinfo=east), datetime(2026, 1, 1, 3, tzinfo=UTC)]
    for form in (times, pa.array(times)):
        frame = {"u": ["a", "b"], "t": form}
        since = {"t": "minutes since 2026-01-01"}
        assert Population.from_dataframe(pa.table(frame), user="u", timestamps=since).fields["t"].tolist() == [0, 180]
    assert Population.from_arrays(["a", "b"], t=times, timestamps=since).fields["t"].tolist() == [0, 180]


@pytest.mark.parametrize(
    "times",
    [
        ["2026-01-01 00:00", "2026-01-01T03:00:00", None],  # as pandas reads them from a CSV file
        ["2026-01-01T02:00:00+02:00", "2026-01-01 03:00:00Z", None],
        ["2026-01-01T00:00:00.000000000", "2026-01-01T03:00:00.000000000", None],
    ],
)
def test_dates_that_are_text_are_counted_wherever_they_come_from(times, tmp_path):
    options = {"timestamps": {"t": "minutes since 2026-01-01"}, "fill": {"t": 5}}
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"u": "a", "t": time}) + "\n" for time in times))
    table = pa.table({"u": ["a"] * 3, "t": times})
    views = table.set_column(1, "t", table["t"].cast(pa.string_view()))
    made = [Population.from_dataframe(one, user="u", **options) for one in (table, views)]
    made += [Population.from_table(tmp_path / "t.jsonl", user="u", **options)]
    made += [Population.from_arrays(["a"] * 3, t=times, **options)]
    assert [population.fields["t"].tolist() for population in made] == [[0, 180, 5]] * 4


def test_days_and_arrays_of_text_are_times_too():
    since = {"t": "hours since 2026-01-01"}
    for days in ([date(2026, 1, 2)], np.array(["2026-01-02"])):
        assert Population.from_arrays(["a"], t=days, timestamps=since).fields["t"].tolist() == [24]
    with pytest.raises(PopulationError, match="'t' as text but timestamps need dates") as error:
        Population.from_arrays(["a"], t=["Easter 4711"], timestamps=since)
    assert "4711" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"missing": "mean"}, SettingError, "missing='mean' must be a finite number"),
        ({"missing": np.zeros(4)}, SettingError, "missing='ndarray'"),
        ({"fill": 3}, SettingError, "fill='int' must be a dict by column"),
        ({"fill": {"x": np.inf}}, SettingError, "fill['x']=inf must be a finite number"),
        ({"fill": {"z": 1}}, PopulationError, "fill names 'z', which is no field"),
        ({"categories": {"x": "ab"}}, SettingError, "categories['x']='str' must be a list"),
        ({"categories": {"x": ["a", 1]}}, SettingError, "all text or all whole numbers"),
        ({"categories": {"x": ["a", "a"]}}, SettingError, "comes twice"),
        ({"categories": {"x": ["1", "2"]}}, PopulationError, "field 'x' holds numbers but its categories are text"),
        ({"timestamps": {"x": "hours"}}, SettingError, "hours or days since a date"),
        ({"timestamps": {"x": "hours since 2026-02-31"}}, SettingError, "since a day of the calendar"),
        ({"timestamps": {"x": "hours since 2026-01-01"}}, PopulationError, "'x' is int64 but timestamps need dates"),
    ],
)
def test_options_out_of_range_are_refused(options, error, words):
    with pytest.raises(error) as raised:
        Population.from_arrays(["a", "b"], x=[1, 2], **options)
    assert words in str(raised.value)


def test_new_data_have_the_types_and_shapes_of_the_population():
    people = Population.from_arrays(["a", "b"], x=np.ones((2, 2), np.float32), y=[0, 1])
    new = people.fields_of(pa.table({"x": [[1.5, 2.5]], "other": ["?"]}))
    assert (list(new), new["x"].dtype, new["x"].tolist()) == (["x"], np.float32, [[1.5, 2.5]])
    for columns, words in (
        ({"x": [[1.0]]}, "rows of shape \\(1,\\) but the population has \\(2,\\)"),
        ({"y": [0.5]}, "field 'y' is float64 but the population has int64"),
        ({"x": [[1.0, np.nan]]}, "1 of 2 values missing"),
        ({"z": [1]}, "none of the fields"),
    ):
        with pytest.raises(PopulationError, match=words):
            people.fields_of(pa.table(columns))


def test_options_are_checked_whoever_wrote_them(tmp_path):
    with pytest.raises(SettingError, match="'fil' is no option of columns: did you mean 'fill'"):
        Population.from_dataframe(pa.table({"u": [1], "x": [1]}), user="u", fil={"x": 1})
    store = Population.from_dataframe(pa.table({"u": [1], "t": [[1]]}), user="u", lengths={"t": 2}).save(tmp_path / "s")
    manifest = json.loads((store / "population.json").read_text())
    for entry, odd in (
        ("column_options", {"missing": 10**400}), ("column_options", [1]), ("column_options", {"x": 1}),
        ("column_options", {"lengths": {"t": "2"}}), ("charges", 3), ("charges", [3]), ("charges", [{}]),
        ("charges", [{"sampling": "none", "noise_multiplier": 1.0, "statistic": {"name": "x"}}]),
    ):  # fmt: skip
        (store / "population.json").write_text(json.dumps({**manifest, entry: odd}))
        with pytest.raises(PopulationError, match=str(store)):
            Population.open(store)
    for path in (None, 3):
        with pytest.raises(SettingError, match=r"folder='.*' must be the path of a store"):
            Population.open(path)
    (store / "population.json").write_text(json.dumps({**manifest, "fields": ["t"]}))
    with pytest.raises(PopulationError, match="population has no field 't_length'"):
        Population.open(store).fields_of(pa.table({"t": [[1]]}))
    (store / "population.json").write_text(json.dumps(manifest))
    (store / "values.t.npy").unlink()
    (tmp_path / "private").write_text("4711 is a secret")
    (store / "values.t.npy").symlink_to(tmp_path / "private")
    with pytest.raises(PopulationError, match="cannot be opened") as error:
        Population.open(store)
    assert "4711" not in str(error.value)  # NumPy would quote the first bytes


def test_categories_of_which_none_occurs_are_refused_in_memory_in_a_file_and_in_a_store(tmp_path):
    table = pa.table({"user": [1, 1, 2], "plan": ["free", "pro", "free"]})
    pyarrow.csv.write_csv(table, tmp_path / "plans.csv")
    wrong, some = {"plan": ["Free", "Pro"]}, {"plan": ["free"]}
    words = "none of the 3 values of 'plan' is among its 2 categories"
    for make in (
        lambda listed: Population.from_dataframe(table, user="user", categories=listed),
        lambda listed: Population.from_table(tmp_path / "plans.csv", user="user", categories=listed),
    ):
        with pytest.raises(PopulationError, match=words):
            make(wrong)
        assert sorted(make(some).fields["plan"].tolist()) == [0, 0, 1]
    assert make(some).fields_of(pa.table({"plan": ["team"]}))["plan"].tolist() == [1]  # new rows may all be others


def test_what_is_wrong_with_several_columns_is_told_at_once_with_a_call_that_takes_them_all(tmp_path):
    """The call is run as it stands, so that what it says is true."""
    rides = pa.table({
        "rider": ["ann", "bob"], "city": ["A", "4711"], "start": [datetime(2026, 1, 1)] * 2, "age": [30, None],
        "stops": [[1], [1, 2]], "km": [1.5, None], "left": ["x", "y"],
    })  # fmt: skip
    pyarrow.parquet.write_table(rides, tmp_path / "t.parquet")
    wanted = ["city", "start", "age", "stops", "km"]
    frame = rides  # by this name in the call
    for make in (
        lambda: Population.from_dataframe(frame, user="rider", fields=wanted, fill={"km": 2}),
        lambda: Population.from_table(tmp_path / "t.parquet", user="rider", fields=wanted, fill={"km": 2}),
    ):
        with pytest.raises(PopulationError, match=r"has 4 columns that cannot become fields:\n- ") as error:
            make()
        assert all(f"'{name}'" in str(error.value) for name in ("city", "start", "age", "stops"))
        assert "4711" not in str(error.value)
        call = str(error.value).partition("all at once: ")[2].removesuffix(", with your own values")
        people = eval(call, {"Population": Population, "frame": frame})
        assert people.fields["age"].tolist() == [30, 0]
        assert (people.fields["km"].tolist(), people.fields["city"].tolist()) == ([1.5, 2.0], [0, 2])
