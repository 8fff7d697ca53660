"""Files that are damaged, absurd or hostile: every reader refuses them with one sentence."""

import gzip
import io
import os
import re
import tracemalloc
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from clipline.data.readers import tables
from clipline.data.readers.tables import read_table
from clipline.data.store import write_store
from clipline.errors import PopulationError


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


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.gz", "a.parquet", "a.npz"])
def test_a_pipe_or_a_device_is_no_table(name, tmp_path):
    os.mkfifo(tmp_path / name)
    (tmp_path / f"zero{name}").symlink_to("/dev/zero")
    for file in (name, f"zero{name}"):
        assert "is no regular file" in refused(read_table(tmp_path / file, "user"), tmp_path)


@pytest.mark.parametrize(
    ("name", "begin", "words"),
    [
        ("a.jsonl.gz", b'{"user": 1, "x": "a"}\n{"user": 1, "x": "', "line 2 of .* has more than 16777216 bytes"),
        ("a.csv.gz", b"user,x\n1,a\n2,", "a row has more than 1048576 bytes"),
    ],
)
def test_a_cell_of_400_mb_in_a_small_file_is_refused_before_it_is_in_memory(name, begin, words, tmp_path):
    (tmp_path / name).write_bytes(gzip.compress(begin) + gzip.compress(b"1" * 1_000_000) * 400)
    tracemalloc.start()
    sentence = refused(read_table(tmp_path / name, "user"), tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert re.search(words, sentence)
    assert peak < 100_000_000


def test_a_line_may_be_as_long_as_the_limit(tmp_path, monkeypatch):
    line = b'{"user": 1, "x": 2}\n'
    (tmp_path / "a.jsonl").write_bytes(line * 9)
    for limit in (len(line), len(line) - 1):
        monkeypatch.setattr(tables, "ROW_BYTES", limit)
        if limit == len(line):
            assert sum(len(ids) for ids, _ in read_table(tmp_path / "a.jsonl", "user")) == 9
        else:
            assert "line 1 of " in refused(read_table(tmp_path / "a.jsonl", "user"), tmp_path)


def test_long_rows_of_parquet_are_refused_by_what_the_footer_says_of_the_columns_that_are_read(tmp_path):
    wide = pa.ListArray.from_arrays([0, 1, 5_000_001], pa.array(np.ones(5_000_001, np.int8)))  # 8 bytes an entry
    pa.parquet.write_table(pa.table({"user": [1, 2], "y": [3, 4], "x": wide}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 5000
    sentence = refused(read_table(tmp_path / "a.parquet", "user"), tmp_path)
    assert "a row of " in sentence
    assert (
        "at 8 bytes an entry or more, has more than 16777216 bytes, the limit of a row: leave its longest column out"
        in sentence
    )
    ((ids, _),) = read_table(tmp_path / "a.parquet", "user", fields=["y"])
    assert len(ids) == 2


def test_an_archive_that_unpacks_to_more_than_the_limit_is_refused_before_it_is_read(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", user=np.arange(4), x=np.zeros((4, 1000)))
    size = 2 * 128 + 4 * 8 + 4 * 1000 * 8  # two headers of NumPy, four ids, the values
    monkeypatch.setattr(tables, "NPZ_BYTES", size)
    assert sum(len(ids) for ids, _ in read_table(tmp_path / "a.npz", "user")) == 4
    monkeypatch.setattr(tables, "NPZ_BYTES", size - 1)
    monkeypatch.setattr(zipfile.ZipFile, "open", None)
    assert f"it unpacks to {size} bytes, the limit is {size - 1}" in refused(
        read_table(tmp_path / "a.npz", "user"), tmp_path
    )
