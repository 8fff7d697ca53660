"""Files that are damaged, absurd or hostile: every reader refuses them with one sentence."""

import io
import sqlite3
import zipfile

import h5py
import numpy as np
import pytest
from tff_layouts import TABLES, delimited, example, feature

from clipline.data.readers.tables import read_table
from clipline.data.store import write_store
from clipline.errors import PopulationError
from clipline_paper.data.catalogue import CATALOGUE
from clipline_paper.data.tff_files import read_tff_hdf5, read_tff_sqlite


def refused(chunks, tmp_path):
    """The sentence with which a file is refused on its way into a store."""
    with pytest.raises(PopulationError) as error:
        write_store(tmp_path / "store", chunks, source="it")
    assert not (tmp_path / "store").exists()
    assert ": " in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "user,x,x\n1,2,3\n", "has 2 columns named 'x': rename all but one"),
        ("a.csv", "user,x\n1,2\n".encode("utf-16"), "cannot be read (CSV parse error: Row #"),
        ("a.csv", b"user,\xff\n1,2\n", "cannot be read ('utf-8' codec"),
        ("a.csv", b"\0" * 100, "has no user column 'user'"),
        ("a.csv", "user,a/b\n1,2\n", "field 'a/b' cannot name a file"),
        ("a.csv", f"user,x\n{'u' * 2000},1\n", "a user id has 2000 letters but may have 1024"),
        ("a.csv", "user,x\nu\0,1\nu,1\n", "a user id ends in a NUL byte"),
        ("a.jsonl", '\ufeffnull\n{"user": 1, "x": 1}\n', "in line 1 (it holds no JSON object)"),
        ("a.jsonl", '{"user": 1, "x": 1}\nnull\n', "in line 2 (it holds no JSON object)"),
        ("a.jsonl", '{"user": 1, "x": 1, "x": 2}\n', "cannot be read in line 1 (a key comes twice)"),
        ("a.jsonl", b'{"user": "\xff", "x": 1}\n', "cannot be read in line 1"),
        ("a.jsonl", '{"user": 1, "x": 1}\n{"user": "a", "x": 1}\n', "a value in 'user', row 2, of another type"),
    ],
)
def test_tables(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert words in refused(read_table(tmp_path / name, "user"), tmp_path)


@pytest.mark.parametrize(
    ("open_", "close", "levels"), [("[", "]", 33), ('{"a":', "}", 100_000), ('["]", ', "]", 100_000)]
)
def test_deeply_nested_objects_are_refused_before_a_parser_breaks_over_them(open_, close, levels, tmp_path):
    for end in (close * levels + "}\n", ""):
        (tmp_path / "a.jsonl").write_text('{"user": 1, "x": ' + open_ * levels + "1" + end)
        sentence = refused(read_table(tmp_path / "a.jsonl", "user"), tmp_path)
        words = "lists more than 32 deep", "turn it into numbers", "in line 1 (", "row 1, of another type"
        assert any(one in sentence for one in words), sentence
        assert levels < 1000 or "in line 1 (its brackets are nested too deep)" in sentence


def array(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def headed(header, data=bytes(64)):
    """An `.npy` file with a header of one's own."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


SHAPED = "{{'descr': '{}', 'fortran_order': False, 'shape': {}, }}"


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (headed("{"), "cannot be read as NPZ"),
        (headed(SHAPED.format("<f8", "(4, 100)")), "cannot be read as NPZ"),
        (headed(SHAPED.format("|O", "(4,)")), "cannot be read as NPZ (Object arrays cannot be loaded"),
        (headed(SHAPED.format("<f16", "(4,)")), "field 'x' is float128"),
        (array(np.arange(3)), "field 'x' has 3 rows but must have 4, one for each user id"),
    ],
)
def test_npz_members_that_are_no_arrays(x, words, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("user.npy", array(np.arange(4)))
        file.writestr("x.npy", x)
    assert words in refused(read_table(tmp_path / "a.npz", "user"), tmp_path)


PIXELS, LABELS = np.zeros((2, 28, 28), np.float32), np.zeros(2, np.int64)


def client(file, **fields):
    group = file.create_group("examples/a")
    for name, value in fields.items():
        group.create_dataset(name, data=value)
    return group


def texts(file):
    client(file, pixels=PIXELS).create_dataset("label", data=["a", "b"], dtype=h5py.string_dtype())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda file: client(file, label=LABELS).create_group("pixels"), "cannot be read as TFF's HDF5"),
        (lambda file: client(file, label=LABELS, pixels=np.zeros(2, "f4,i4")), "field 'pixels' is"),
        (lambda file: client(file, label=LABELS, pixels=PIXELS + 1j), "field 'pixels' is complex64"),
        (lambda file: client(file, label=np.zeros((2, 3), int), pixels=PIXELS), "field 'label' has rows of shape (3,)"),
        (texts, "field 'label' is object but must hold numbers"),
    ],
)
def test_hdf5_of_another_layout(make, words, tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        make(file)
    chunks = read_tff_hdf5(tmp_path / "a.h5", fields=["pixels", "label"])
    assert words in refused(map(CATALOGUE["emnist"].convert, chunks), tmp_path)


ROW = example(pixels=[0.5] * 784, label=[3])


def base(path, rows, counts):
    """A file without TFF's types and constraints."""
    with sqlite3.connect(path) as file:
        file.executescript(TABLES.replace(" NOT NULL", "").replace("TEXT", "").replace("INTEGER", ""))
        file.executemany("INSERT INTO examples VALUES ('all', ?, ?)", rows)
        file.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", counts)
    file.close()
    return path


def entry(name, value):
    return delimited(1, delimited(1, name) + delimited(2, value))


@pytest.mark.parametrize(
    ("rows", "counts", "words"),
    [
        ([("a", ROW)], [("a", "all", None)], "1 examples of 'all' where its client_metadata promises None"),
        ([], [], "has no split 'all': there is none to choose"),
        ([(None, ROW)], [("a", "all", 1)], "client ids holds NoneType where text is needed"),
        ([("a", ROW), ("a\0", ROW)], [("a", "all", 2)], "a user id ends in a NUL byte"),
        ([("a", delimited(1, entry(b"\xff", feature([1]))))], [("a", "all", 1)], "is no tf.train.Example"),
        ([("a", example(pixels=[0.5] * 784, label=[1, 2]))], [("a", "all", 1)], "field 'label' has rows of shape (2,)"),
        ([("a", example(pixels="x", label=[1]))], [("a", "all", 1)], "field 'pixels' is object"),
    ],
)
def test_sqlite_with_absurd_values(rows, counts, words, tmp_path):
    path = base(tmp_path / "a.sqlite", rows, counts)
    chunks = read_tff_sqlite(path, "all", fields=["pixels", "label"])
    assert words in refused(map(CATALOGUE["emnist"].convert, chunks), tmp_path)


def test_a_damaged_schema_of_sqlite_is_refused(tmp_path):
    path = base(tmp_path / "a.sqlite", [("a", ROW)], [("a", "all", 1)])
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE client_metadata", b"CREATE T\xffBLE client_metadata"))
    assert "cannot be read as TFF's SQLite" in refused(read_tff_sqlite(path, "all"), tmp_path)
