import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch

from clipline.data.column_options import ColumnOptions
from clipline.data.packed_field import PackedField
from clipline.data.population import Population
from clipline.errors import PopulationError, SettingError
from clipline.serve.new_data import arrays_of, field_like

COLUMNS = {"rider": ["b", "a", "b"], "km": [3.5, 1.0, 2.0], "stops": [1, 2, 3]}
TRAINED = {
    "km": {"dtype": "float32", "shape": []},
    "stops": {"dtype": "uint8", "shape": []},
    "hours": {"dtype": "float64", "shape": []},
    "x": {"dtype": "float32", "shape": [2]},
}


def kinds(tmp_path):
    """The same table in all forms."""
    table = pa.table(COLUMNS)
    pyarrow.csv.write_csv(table, tmp_path / "t.csv")
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
    (tmp_path / "t.jsonl").write_text("".join(f"{row}\n".replace("'", '"') for row in rows))
    np.savez(tmp_path / "t.npz", **{name: np.array(column) for name, column in COLUMNS.items()})
    yield from (tmp_path / f"t.{end}" for end in ("csv", "parquet", "jsonl", "npz"))
    yield str(tmp_path / "t.csv")
    yield table
    yield {"km": torch.tensor(COLUMNS["km"]), "stops": COLUMNS["stops"], "rider": np.array(COLUMNS["rider"])}


def test_every_kind_of_table_gives_the_trained_columns_in_the_order_of_its_rows(tmp_path):
    for data in kinds(tmp_path):
        arrays = arrays_of(data, list(TRAINED), only="").fields
        assert sorted(arrays) == ["km", "stops"], data
        assert arrays["km"].tolist() == [3.5, 1.0, 2.0], data
        assert arrays["stops"].tolist() == [1, 2, 3], data
    table = pa.table({"km": np.arange(25.0)})  # sorted as text, 10 would come before 2
    assert arrays_of(table, ["km"], only="").fields["km"].tolist() == list(range(25))


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_dataframes_too_whatever_their_index(library):
    frames = pytest.importorskip(library)
    frame = frames.DataFrame({**COLUMNS, "x": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]})
    if library == "pandas":
        frame.index = [7, 7, 3]
    single = arrays_of(frame["km"], list(TRAINED), only="only").fields
    assert single["only"].tolist() == [3.5, 1.0, 2.0]
    arrays = arrays_of(frame, list(TRAINED), only="").fields
    assert arrays["km"].tolist() == [3.5, 1.0, 2.0]
    assert arrays["x"].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


def test_a_population_goes_user_by_user_from_memory_or_a_folder(tmp_path):
    population = Population.from_arrays(COLUMNS["rider"], km=COLUMNS["km"])
    population.save(tmp_path / "store")
    for data in (population, tmp_path / "store"):
        assert arrays_of(data, list(TRAINED), only="").fields["km"].tolist() == [1.0, 3.5, 2.0]  # rider a, then b


def test_lists_of_a_population_stay_packed_and_those_of_a_table_are_padded():
    table = pa.table({"rider": [1, 0], "t": [[1, 2, 3], [4]]})
    options = {"lengths": {"t": 2}}
    population = Population.from_dataframe(table, "rider", **options)
    trained = {"t": {"dtype": "int32", "shape": [2]}, "t_length": {"dtype": "int32", "shape": []}}

    def add_200(array):
        return array.converted(add_200) if isinstance(array, PackedField) else array + 200

    wanted = {id(population): [[4, 0], [1, 2]], id(table): [[1, 2], [4, 0]]}  # user by user; in the order of the rows
    for data in (population, table):
        array = arrays_of(data, list(trained), only="", options=ColumnOptions.of(options)).fields["t"]
        assert isinstance(array, PackedField) == (data is population)
        like = field_like("t", array, trained)
        assert (like.dtype, like[0:2].tolist()) == (np.dtype(np.int32), wanted[id(data)])
        with pytest.raises(SettingError, match="must be int8 as in the training"):
            field_like("t", add_200(array), {"t": {"dtype": "int8", "shape": [2]}})
    with pytest.raises(SettingError, match="shape of 't'"):
        arrays_of(population, list(trained), only="", options=ColumnOptions.of(options), keep=["t"])


def test_numbers_become_of_the_trained_type_if_nothing_is_lost():
    for name, given, expected in (
        ("km", np.array([3, 4]), np.float32), ("stops", np.array([3.0, 4.0]), np.uint8),
        ("", np.array([[3, 4]]), np.float32),  # the only field of that shape
        ("", np.array([[3, 4, 5]]), np.int64),  # there is none
    ):  # fmt: skip
        assert field_like(name, given, TRAINED).dtype == expected
    for wrong in (np.array([3.5]), np.array([300]), np.array([-1]), np.array([np.nan])):
        with pytest.raises(SettingError, match=r"type of 'stops'='\w+' must be uint8 as in the training"):
            field_like("stops", wrong, TRAINED)


def test_what_cannot_be_read_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "t.xlsx").touch()
    (tmp_path / "bad.parquet").write_text("no")
    np.savez(tmp_path / "objects.npz", km=np.array([{}]))
    for data, said in (
        ({"rider": [1]}, "data has rider and none of the fields trained on, km, stops, hours, x: rename"),
        (pa.table({"rider": [1]}), "data has rider and none of the fields trained on"),
        ({"km": [1, 2], "stops": [1]}, "numbers of examples=.* must be the same in all fields"),
        (tmp_path / "none.csv", "is no file"),
        (tmp_path / "t.xlsx", r"is of no known kind: give a file that ends in .parquet, .csv, .tsv, .jsonl, .npz"),
        (tmp_path / "bad.parquet", "cannot be read"),
        (tmp_path / "objects.npz", "cannot be read"),  # NumPy would unpickle it
        (7, "'data' is int and no array of numbers"),
        ({"km": [{}]}, "'km' is list and no array of numbers"),
        (pa.table({"km": [1.0, None]}), r"has no value for 'km' in row 2 .*: fill the gaps or drop the rows, as the"),
    ):
        with pytest.raises((PopulationError, SettingError), match=said):
            arrays_of(data, list(TRAINED), only="")
    with pytest.raises(SettingError, match="type of 'rider'='<U1' must be numbers"):
        field_like("rider", np.array(["a"]), TRAINED)


def test_a_column_that_is_there_twice_is_refused_whether_it_is_read_or_kept(tmp_path):
    (tmp_path / "t.csv").write_text("km,id,id\n1.0,a,b\n")
    with pytest.raises(PopulationError, match="2 columns named 'id': rename all but one"):
        arrays_of(tmp_path / "t.csv", ["km"], only="", keep=["id"])
    assert arrays_of(tmp_path / "t.csv", ["km"], only="").fields["km"] == [1.0]  # it is not looked at


def test_a_single_number_is_no_column():
    for number in (1.0, np.ones(()), torch.tensor(1.0)):
        with pytest.raises(PopulationError, match=f"'km' is {type(number).__name__} and no array of numbers"):
            arrays_of({"km": number}, ["km"], only="", options=ColumnOptions.of({"fill": {"km": 0}}))


def test_a_row_alone_may_have_gaps_where_the_training_filled_them(tmp_path):
    (tmp_path / "t.csv").write_text("km,stops,mode\n,,\n")
    said = {"fill": {"km": 2.5, "stops": 1}, "categories": {"mode": ["bus", "tram"]}}
    options = ColumnOptions.of(said)
    gaps = {"km": [None], "stops": [None], "mode": [None]}
    for data in (tmp_path / "t.csv", pa.table(gaps), gaps):
        fields = arrays_of(data, ["km", "stops", "mode"], only="", options=options).fields
        assert {name: field.tolist() for name, field in fields.items()} == {"km": [2.5], "stops": [1], "mode": [2]}
    with pytest.raises(PopulationError, match=r"has no value for 'km' in row 1 .*: fill the gaps or drop the rows"):
        arrays_of(pa.table({"km": [None]}), ["km"], only="")
    halves = ColumnOptions.of({"fill": {"km": 0.5}})
    assert arrays_of({"km": [None, None]}, ["km"], only="", options=halves).fields["km"].tolist() == [0.5, 0.5]
    left = ColumnOptions.of({"missing": "zero-update", "lengths": {"km": 1}})
    assert np.isnan(arrays_of({"km": [[None]]}, ["km"], only="", options=left).fields["km"]).all()


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (["bus"], "field 'km' is text but must be numbers: give numbers, as in the training, or the same text="),
        (["1", "2", "far"], "field 'km' is text, as 1 of 3 values is no number (row 3): give numbers in all rows"),
        (["1", "2"], "field 'km' holds numbers written as text: convert it"),
    ],
)
def test_text_where_the_training_had_numbers_is_refused_with_what_can_be_done_here(column, words):
    for data in (pa.table({"km": column}), {"km": column}):
        with pytest.raises(PopulationError) as error:
            arrays_of(data, ["km"], only="", options=ColumnOptions.of({"fill": {"km": 0.5}}))
        assert words in str(error.value)
