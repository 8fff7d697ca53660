import lzma
import sqlite3

import h5py
import numpy as np
import pytest
from tff_layouts import example, write_hdf5, write_sqlite

from clipline.data.population import Population
from clipline.data.store import write_store
from clipline.errors import PopulationError
from clipline_paper.data import tff_files
from clipline_paper.data.tff_files import read_tff_hdf5, read_tff_sqlite

PIXELS = np.arange(5 * 4, dtype=np.float32).reshape(5, 4) / 20
CLIENTS = ["f0000_14", "ß", "f0000_14", "f0001_41", "f0000_14"]


def rows(split="train"):
    numbers = zip(CLIENTS, PIXELS.tolist(), range(5), strict=True)
    return [(split, client, example(pixels=pixels, label=[label])) for client, pixels, label in numbers]


def check(population):
    assert population.user_ids.tolist() == ["f0000_14", "f0001_41", "ß"]
    assert population.of(0)["label"].tolist() == [0, 2, 4]
    assert population.fields["pixels"].dtype == np.float32
    assert np.array_equal(population.fields["pixels"].reshape(5, 4), PIXELS[[0, 2, 4, 3, 1]])


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_sqlite(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(tff_files, "CHUNK_BYTES", chunk_bytes)
    path = write_sqlite(tmp_path / "a.sqlite", rows() + rows("test")[:2])
    write_store(tmp_path / "store", read_tff_sqlite(path, "train"), source="a")
    check(Population.open(tmp_path / "store"))
    assert len(list(read_tff_sqlite(path, "train"))) == (5 if chunk_bytes == 1 else 1)
    ((ids, fields),) = read_tff_sqlite(path, "test", fields=["label"]) if chunk_bytes > 1 else [(CLIENTS[:2], {})]
    assert list(ids) == CLIENTS[:2]
    assert "pixels" not in fields


@pytest.mark.parametrize("form", [lzma.FORMAT_ALONE, lzma.FORMAT_XZ])
def test_sqlite_lzma_is_unpacked_in_the_scratch_folder_and_cleaned_up(tmp_path, form):
    plain = write_sqlite(tmp_path / "a.sqlite", rows())
    packed = tmp_path / "b.sqlite.lzma"
    packed.write_bytes(lzma.compress(plain.read_bytes(), form))
    (tmp_path / "scratch").mkdir()
    seen = []
    reader = read_tff_sqlite(
        packed, "train", scratch=tmp_path / "scratch", progress=lambda done, total: seen.append(done / total)
    )
    chunk = next(reader)
    assert len(list((tmp_path / "scratch").iterdir())) == 1
    write_store(tmp_path / "store", [chunk, *reader], source="b")
    check(Population.open(tmp_path / "store"))
    assert list((tmp_path / "scratch").iterdir()) == []
    assert seen[-1] == 1
    assert seen == sorted(seen)


def test_clients_that_follow_themselves_stay_in_one_chunk(tmp_path, monkeypatch):
    """A tokeniser that cuts a role's text into rows needs the whole role."""
    monkeypatch.setattr(tff_files, "CHUNK_BYTES", 1)
    monkeypatch.setattr(tff_files, "CHUNK_BYTES", 1)
    speeches = {"HAMLET": ["To be", "or not"], "OPHELIA": ["My lord"]}
    lines = [("train", role, example(snippets=text)) for role, texts in speeches.items() for text in texts]
    base = write_sqlite(tmp_path / "a.sqlite", lines)
    tree = write_hdf5(tmp_path / "a.h5", {role: {"snippets": texts} for role, texts in speeches.items()})
    for chunks in (list(read_tff_sqlite(base, "train")), list(read_tff_hdf5(tree))):
        assert [ids.tolist() for ids, _ in chunks] == [["HAMLET", "HAMLET"], ["OPHELIA"]]
        assert [fields["snippets"].tolist() for _, fields in chunks] == list(speeches.values())


def hdf5_clients():
    who = np.array(CLIENTS)
    return {
        client: {"pixels": PIXELS[who == client].reshape(-1, 2, 2), "label": np.flatnonzero(who == client)}
        for client in ("ß", "f0001_41", "f0000_14")
    }


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_hdf5(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(tff_files, "CHUNK_BYTES", chunk_bytes)
    path = write_hdf5(tmp_path / "a.h5", hdf5_clients())
    seen = []
    chunks = read_tff_hdf5(path, progress=lambda *now: seen.append(now))
    write_store(tmp_path / "store", chunks, source="a")
    population = Population.open(tmp_path / "store")
    check(population)
    assert population.fields["pixels"].shape == (5, 2, 2)
    assert seen[-1] == (3, 3)
    fields = [fields for _, fields in read_tff_hdf5(path, fields=["label"])]
    assert all(list(each) == ["label"] for each in fields)


def refused(words, chunks):
    with pytest.raises(PopulationError) as caught:
        list(chunks)
    assert words in str(caught.value)


def test_damaged_hdf5(tmp_path):
    path = write_hdf5(tmp_path / "a.h5", hdf5_clients())
    refused("has no field 'labels': did you mean 'label'?", read_tff_hdf5(path, fields=["labels"]))
    path.write_bytes(path.read_bytes()[:2000])
    refused("cannot be read as TFF's HDF5", read_tff_hdf5(path))
    for key, value, words in (
        ("x", [1], "has no group 'examples'"),
        ("examples/x", [1], "client 'x' is no group"),
        ("examples/a/x", 1, "client 'a' has one value as 'x', not a list"),
    ):
        with h5py.File(tmp_path / "other.h5", "w") as root:
            root[key] = value
        refused(words, read_tff_hdf5(tmp_path / "other.h5"))
    for clients, words in (
        ({"a": {"x": [1, 2], "y": [1]}}, "client 'a' has unequal numbers of examples (2 of 'x', 1 of 'y')"),
        ({"a": {"x": [[1, 2]]}, "b": {"x": [[1]]}}, "client 'b' has 'x' as int64[1] but others as int64[2]"),
        ({"a": {"x": [1], "y": [1]}, "b": {"x": [1]}}, "client 'b' has no field 'y'"),
    ):
        write_hdf5(tmp_path / "uneven.h5", clients)
        refused(words, read_tff_hdf5(tmp_path / "uneven.h5"))


def test_damaged_sqlite(tmp_path):
    path = write_sqlite(tmp_path / "a.sqlite", rows() * 200)
    refused("no split 'trian': did you mean 'train'?", read_tff_sqlite(path, "trian"))
    refused("has no field 'pixel': did you mean 'pixels'?", read_tff_sqlite(path, "train", fields=["pixel"]))
    data = path.read_bytes()
    (tmp_path / "cut.sqlite").write_bytes(data[: len(data) // 2])
    refused("cannot be read as TFF's SQLite", read_tff_sqlite(tmp_path / "cut.sqlite", "train"))
    (tmp_path / "text.sqlite").write_bytes(b"no data base " * 100)
    refused("not a database", read_tff_sqlite(tmp_path / "text.sqlite", "train"))
    (tmp_path / "cut.sqlite.lzma").write_bytes(lzma.compress(data)[:-100])
    refused("ended before", read_tff_sqlite(tmp_path / "cut.sqlite.lzma", "train"))
    (tmp_path / "none.sqlite.lzma").write_bytes(data)
    refused("cannot be read", read_tff_sqlite(tmp_path / "none.sqlite.lzma", "train"))
    other = write_sqlite(tmp_path / "b.sqlite", [*rows(), ("train", "eve", b"\x0a\x7fshort")])
    refused("an example of client 'eve' is no tf.train.Example", read_tff_sqlite(other, "train"))
    uneven = write_sqlite(tmp_path / "c.sqlite", [*rows(), ("train", "eve", example(pixels=[0.5], label=[1]))])
    refused("client 'eve' has 1 entries of 'pixels' but others have 4", read_tff_sqlite(uneven, "train"))
    assert not [left for left in tmp_path.iterdir() if left.name.startswith(".")]


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_hdf5_clients_without_rows_are_told_of_whatever_their_empty_arrays_look_like(
    tmp_path, monkeypatch, chunk_bytes
):
    monkeypatch.setattr(tff_files, "CHUNK_BYTES", chunk_bytes)
    clients = hdf5_clients()
    clients["a first"] = {"pixels": np.zeros((0, 2, 2), np.float32), "label": np.zeros(0, np.int64)}
    clients["in between"] = {"pixels": np.zeros(0), "label": np.zeros(0)}  # h5py's defaults for empty lists
    clients["zz bare"] = {}
    path = write_hdf5(tmp_path / "a.h5", clients)
    silent = []
    write_store(tmp_path / "store", read_tff_hdf5(path, without_rows=silent.append), source="a", known_users=silent)
    assert silent == ["a first", "in between", "zz bare"]
    population = Population.open(tmp_path / "store")
    assert population.user_ids.tolist() == ["a first", "f0000_14", "f0001_41", "in between", "zz bare", "ß"]
    assert np.diff(population.offsets).tolist() == [0, 3, 1, 0, 0, 1]


def test_sqlite_clients_of_the_files_list_without_rows_are_told_of(tmp_path):
    path = write_sqlite(tmp_path / "a.sqlite", rows())
    base = sqlite3.connect(path)
    base.execute("INSERT INTO client_metadata VALUES ('silent', 'train', 0)")
    base.execute("INSERT INTO client_metadata VALUES ('silent elsewhere', 'test', 0)")
    base.commit()
    base.close()
    silent = []
    assert sum(len(ids) for ids, _ in read_tff_sqlite(path, "train", without_rows=silent.append)) == 5
    assert silent == ["silent"]
