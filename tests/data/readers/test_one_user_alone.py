"""Files that differ in one user give populations that differ in that user alone, whoever reads them and in what pieces.

The expected values are those that were written: for every other user the very numbers of the unchanged table.
"""

import json
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
import pytest
from tff_layouts import example, write_hdf5, write_sqlite

from clipline.data import grouping
from clipline.data.chunks import converted
from clipline.data.population import Population
from clipline.data.readers import tables
from clipline.data.store import write_store
from clipline.errors import PopulationError
from clipline.serve.new_data import arrays_of
from clipline_paper.data.tff_files import read_tff_hdf5, read_tff_sqlite

USERS = ["u0", "u1", "u2", "u3", "u0", "u2", "u4"]
NAN = float("nan")
LONG = "ä" * 20_000
LISTS = [
    [None], [None, None], [None, 1.5], [None, None, 1.5], [1.5, None], [1.5, None, 2.5], [], [NAN], [NAN, 1.5],
    [1.5] * 3000, [None] * 3000, None,
]  # fmt: skip
SCALARS = [None, NAN, 1e30, -0.5]
TEXTS = ["", LONG, "0", "1.5", "null", 'a, "b"\nc', "2026-01-31"]
CHANGES = [*(("x", one) for one in LISTS), *(("a", one) for one in SCALARS), *(("note", one) for one in TEXTS)]
PLACES = [("u0", "first"), ("u2", "last"), ("u4", "last")]  # whose example is another, and which of them
MISSING = [None, 0.25, "zero-update"]


def rows(change=None, user="u0", where="first"):
    """Seven examples, lists in `x`; in the first or in the last one of the user something is changed."""
    table = [
        {"user": name, "x": [10 * i + 0.5, 10 * i + 1.5][: 1 + i % 2], "a": i + 0.25, "note": f"note {i}"}
        for i, name in enumerate(USERS)
    ]
    places = [i for i, name in enumerate(USERS) if name == user]
    if change is not None:
        table[places[0 if where == "first" else -1]][change[0]] = change[1]
    return table


def numbers(texts):
    """Two numbers for each text, by a checksum."""
    return np.array([[len(text), zlib.crc32(text.encode()) / 7] for text in texts])


def columns(table):
    return {name: [row[name] for row in table] for name in table[0]}


def typed(table):
    types = {"user": pa.string(), "x": pa.list_(pa.float64()), "a": pa.float64(), "note": pa.string()}
    return pa.table({name: pa.array(column, types[name]) for name, column in columns(table).items()})


def jsonl(path, table, rows_a_group):
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row).replace("NaN", "null") + "\n" for row in table))
    return path


def csv(path, table, rows_a_group):
    path = path.with_suffix(".csv")
    pa.csv.write_csv(typed(table).drop_columns("x"), path)
    return path


def parquet(path, table, rows_a_group):
    path = path.with_suffix(".parquet")
    pa.parquet.write_table(typed(table), path, row_group_size=rows_a_group)
    return path


def archive(path, table, rows_a_group):
    """Lists padded with zeros, as arrays have no others."""
    path, of = path.with_suffix(".npz"), columns(table)
    width = max(2, *(len(one or ()) for one in of["x"]))
    lists = np.array([[NAN if one is None else one for one in (row or ())] + [0.0] * (width - len(row or ()))
                      for row in of["x"]])  # fmt: skip
    np.savez(path, user=of["user"], x=lists, a=np.array(of["a"], float), note=np.array(of["note"]))
    return path


def read(path, options):
    lengths = {} if path.suffix == ".csv" else {"x": 2}
    return Population.from_table(path, user="user", text=numbers, lengths=lengths, **options)


def by_user(population):
    """The bytes of every field of each user."""
    fields = {name: np.asarray(field) for name, field in population.fields.items()}
    starts = population.offsets
    return {
        str(user): {name: (f.dtype, f[starts[i] : starts[i + 1]].tobytes()) for name, f in fields.items()}
        for i, user in enumerate(population.user_ids)
    }


def others_alike(read_rows, before, change, user, where):
    """Whether the change was taken; then the rows of all others are those of the table without it, `before`."""
    try:
        after = by_user(read_rows(rows(change, user, where)))
    except PopulationError:
        return False
    assert {name: row for name, row in after.items() if name != user} == {
        name: row for name, row in before.items() if name != user
    }
    return True


@pytest.mark.parametrize("chunk_bytes", [100, 8 << 20])
@pytest.mark.parametrize("write", [jsonl, csv, parquet, archive])
def test_tables_that_differ_in_one_user_give_populations_that_differ_in_that_user_alone(
    tmp_path, monkeypatch, write, chunk_bytes
):
    monkeypatch.setattr(tables, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(grouping, "MEMORY_BYTES", chunk_bytes)  # grouped on disk, too
    for missing, group in ((None, 1), (0.25, 3), ("zero-update", 100)):
        options = {} if missing is None else {"missing": missing}

        def read_rows(table, options=options, group=group):
            return read(write(tmp_path / "t", table, group), options)

        before = by_user(read_rows(rows()))
        for number, change in enumerate(CHANGES):
            if change[0] == "x" and write is csv:
                continue
            user, where = PLACES[(number + len(options) * group) % 3]
            taken = others_alike(read_rows, before, change, user, where)
            # A first block of nothing but gaps has no type that later ones could have.
            assert taken or missing is None or change == ("x", None) or chunk_bytes == 100, (change, user)


@pytest.mark.parametrize("batch_rows", [1, 3, 100])
@pytest.mark.parametrize("missing", MISSING)
def test_dataframes_and_lists_of_python_too(missing, batch_rows):
    options = {} if missing is None else {"missing": missing}

    def frame(table):
        batches = typed(table).to_batches(batch_rows)
        return Population.from_dataframe(
            pa.Table.from_batches(batches), "user", text=numbers, lengths={"x": 2}, **options
        )

    def arrays(table):
        of = columns(table)
        of["note"] = numbers(of["note"])
        return Population.from_arrays(of.pop("user"), lengths={"x": 2}, **options, **of)

    for read_rows in (frame, arrays):
        before = by_user(read_rows(rows()))
        for change in CHANGES:
            for user, where in PLACES:
                taken = others_alike(read_rows, before, change, user, where)
                assert taken or missing is None or change == ("x", None), change


@pytest.mark.parametrize("kind", ["hdf5", "sqlite"])
def test_files_of_tff_too(tmp_path, kind):
    def read_rows(table):
        if kind == "hdf5":
            clients = {
                user: {"a": np.array([row["a"] for row in table if row["user"] == user]),
                       "note": [row["note"] for row in table if row["user"] == user]}
                for user in USERS
            }  # fmt: skip
            path = write_hdf5(tmp_path / "t.h5", clients)
        else:
            path = write_sqlite(
                tmp_path / "t.sqlite",
                [("train", row["user"], example(a=[row["a"]], note=row["note"])) for row in table],
            )

        def convert(chunk):
            ids, fields = chunk
            return ids, {"a": fields["a"], "note": numbers(fields["note"])}

        target = tmp_path / f"store{len(list(tmp_path.iterdir()))}"
        chunks = read_tff_hdf5(path) if kind == "hdf5" else read_tff_sqlite(path, "train")
        write_store(target, converted(chunks, convert), source=kind)
        return Population.open(target)

    before = by_user(read_rows(rows()))
    for change in CHANGES:
        if change[0] != "x" and change[1] is not None:
            for user, where in PLACES:
                taken = others_alike(read_rows, before, change, user, where)
                assert taken or change[1] != change[1], change  # a store without options has no gaps


def damaged():
    """Lists of which the second begins before the first ends; only full validation looks."""
    offsets = pa.py_buffer(np.array([0, 2, 1, 3], np.int32))
    lists = pa.Array.from_buffers(pa.list_(pa.float64()), 3, [None, offsets], children=[pa.array([1.5, 2.5, 3.5])])
    return pa.table({"user": ["u0", "u1", "u2"], "x": lists})


def test_lists_that_arrow_hands_over_damaged_are_refused_everywhere():
    with pytest.raises(PopulationError, match=r"dataframe cannot be read \(Column 1: .*offset"):
        Population.from_dataframe(damaged(), user="user", lengths={"x": 1}, missing=0.0)
    with pytest.raises(PopulationError, match="dataframe cannot be read"):
        arrays_of(damaged(), ["x"], only="")


def test_a_list_that_begins_with_null_moves_nobody_in_jsonl(tmp_path):
    """Users 2 to 4 had 3.5, 4.5, 5.5 in the place of 2.5, 3.5, 4.5."""
    path = tmp_path / "t.jsonl"
    table = [{"user": 1, "x": [None, 1.5]}, *({"user": i, "x": [i + 0.5]} for i in (2, 3, 4))]
    path.write_text("\n".join(map(json.dumps, [*table, {"user": 4, "x": [5.5]}])))
    population = Population.from_table(path, user="user", lengths={"x": 1}, missing=0.0)
    assert np.asarray(population.fields["x"]).ravel().tolist() == [0.0, 2.5, 3.5, 4.5, 5.5]
    assert population.fields["x_length"].tolist() == [1] * 5
    with pytest.raises(PopulationError, match=r"has a list without a value in 'x', row 1 \(1 missing"):
        Population.from_table(path, user="user", lengths={"x": 1})
    fields = arrays_of(path, ["x"], only="", options=tables.ColumnOptions(lengths={"x": 1}, missing=0.0)).fields
    assert np.asarray(fields["x"]).ravel().tolist() == [0.0, 2.5, 3.5, 4.5, 5.5]
