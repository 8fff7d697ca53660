"""What `Population.open`, `save`, `from_table` and `from_dataframe` promise."""

import csv
import io
import json
import os
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from clipline import Population
from clipline.data import grouping
from clipline.data.manifest import verify_store
from clipline.data.store import write_store
from clipline.errors import PopulationError


def test_a_stored_population_opens_as_it_was(tmp_path):
    ids = np.array([2, 0, 2, 5])
    population = Population.from_arrays(ids, x=np.arange(12.0).reshape(4, 3), y=np.array([1, 2, 3, 4], np.uint8))
    opened = Population.open(population.save(tmp_path / "p"))
    assert len(opened) == 3
    for user in range(3):
        for name in ("x", "y"):
            np.testing.assert_array_equal(opened.of(user)[name], population.of(user)[name])
            assert opened.of(user)[name].dtype == population.of(user)[name].dtype
    assert isinstance(opened.fields["x"], np.memmap)


def test_opening_a_million_users_takes_next_to_no_memory(tmp_path):
    users = 1_000_000
    ids = np.arange(users)
    path = Population(np.arange(users + 1), {"x": np.zeros(users, np.uint8)}, ids).save(tmp_path / "p")
    tracemalloc.start()
    population = Population.open(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(population) == users
    assert population.of(999_999)["x"].tolist() == [0]
    assert peak < 200_000  # offsets and ids are 8 MB each


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("[]", "holds no JSON object"),
        *((damaged, "is damaged") for damaged in ("[" * 100_000, b"\xff\xfe", "")),
        ({"version": 99}, "has version 99 but this clipline reads 1 and 2"),
        ({"users": 1.5}, "is no manifest with checksums (users is 1.5)"),
        ({"tasks": [1]}, "is no manifest with checksums (tasks is [1])"),
        ({"origin": "mine"}, "is no manifest with checksums (origin is 'mine')"),
        ({"sha256": {"../x": "00"}}, "sha256 of '../x' is '00'"),
        *(({"fields": [name]}, "cannot name a file") for name in (1, "../x", "/x", "", "x\0", "\ud800", "y" * 400)),
        ({"fields": ["x", "x"]}, "field 'x' comes twice"),
        ({"fields": []}, "population has 0 fields"),
    ],
)
def test_a_manifest_that_is_none_is_refused_with_the_reason(change, words, tmp_path):
    path = Population.from_arrays([1, 2], x=[1, 2]).save(tmp_path / "p")
    if isinstance(change, dict):
        change = json.dumps({**json.loads((path / "population.json").read_text()), **change})
    (path / "population.json").write_bytes(change if isinstance(change, bytes) else change.encode())
    with pytest.raises(PopulationError) as error:
        Population.open(path)
    assert words in str(error.value)


def test_names_that_no_file_can_have_are_refused(tmp_path):
    path = Population.from_arrays([1, 2], x=[1, 2]).save(tmp_path / "p")
    entries = json.loads((path / "population.json").read_text())
    for name in ("y" * 400, "\ud800", ""):
        (path / "population.json").write_text(json.dumps({**entries, "sha256": {name: "0"}}))
        with pytest.raises(PopulationError, match="is missing: prepare the data again"):
            verify_store(path)
        with pytest.raises(PopulationError, match="cannot name a file"):
            Population.from_arrays([1], **{name: [1.0]}).save(tmp_path / "q")


@pytest.mark.parametrize("name", ["population.json", "offsets.npy", "field.x.npy", "user_ids.npy"])
def test_a_pipe_in_a_store_is_refused_and_nobody_waits_for_it(name, tmp_path):
    path = Population.from_arrays([1, 2], x=[1, 2]).save(tmp_path / "p")
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(PopulationError, match="no regular file but a pipe or a device"):
        Population.open(path)


def npy(header):
    """A file of one number behind a header of one's own."""
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(8)


def archive():
    file = io.BytesIO()
    np.savez(file, x=np.zeros(2))
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\0" * 64, archive(), npy("{"), npy("[]")),
        *(
            npy(f"{{'descr': {kind}, 'fortran_order': False, 'shape': ({size},), }}")
            for kind, size in (("'<i8'", 1000), ("'<i8'", "1" + "0" * 30), ("'<i8'", -1), ("'|O'", 1), ("'what'", 1))
        ),
    ],
)
@pytest.mark.parametrize("name", ["offsets", "field.x", "user_ids"])
def test_a_damaged_array_is_refused(name, content, tmp_path):
    path = Population.from_arrays([1, 2], x=[1, 2]).save(tmp_path / "p")
    (path / f"{name}.npy").write_bytes(content)
    with pytest.raises(PopulationError, match=rf"{name}\.npy' cannot be opened"):
        Population.open(path)


def test_what_is_saved_has_a_manifest_with_checksums_as_what_is_prepared(tmp_path):
    """One format: each store is opened and verified the same way, whichever of the two wrote it."""
    ids, x = np.array([2, 1, 2]), np.arange(3.0)
    population = Population.from_arrays(ids, x=x)
    saved = verify_store(population.save(tmp_path / "saved"))
    prepared = write_store(tmp_path / "prepared", [(ids, {"x": x})], source="by hand")
    assert (saved.users, saved.examples, saved.fields, saved.user_ids) == (2, 3, ["x"], True)
    assert saved.sha256 == prepared.sha256  # the very same files
    assert Population.open(tmp_path / "saved").fingerprint() == Population.open(tmp_path / "prepared").fingerprint()
    without = Population(np.array([0, 3]), {"x": x}).save(tmp_path / "without")
    assert verify_store(without).user_ids is False
    assert Population.open(without).user_ids is None


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(PopulationError, match=r"cannot be written .*No space left"):
        Population.from_arrays([1], x=[1]).save(tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


# Tables --------------------------------------------------------------------------------------------------------------

RIDERS = np.array(["zoë", "ann", "bob", "ann", "zoë", "ann"])
MINUTES = np.array([12.5, 3.25, 8.0, 1.5, 7.0, 2.0])
STARTS = np.arange(12).reshape(6, 2)


def write_parquet(path):
    pyarrow.parquet.write_table(pa.table({"rider": RIDERS, "minutes": MINUTES, "start": STARTS.tolist()}), path)


def write_csv(path):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["rider", "minutes", "seats"], *zip(RIDERS, MINUTES, STARTS[:, 0], strict=True)])


def write_jsonl(path):
    rows = zip(RIDERS.tolist(), MINUTES.tolist(), STARTS.tolist(), strict=True)
    path.write_text("".join(json.dumps({"rider": r, "minutes": m, "start": s}) + "\n" for r, m, s in rows))


def write_npz(path):
    np.savez(path, rider=RIDERS, minutes=MINUTES, start=STARTS)


WRITERS = {".parquet": write_parquet, ".csv": write_csv, ".jsonl": write_jsonl, ".npz": write_npz}


def equal(one, other):
    assert np.array_equal(one.offsets, other.offsets)
    assert one.user_ids.tolist() == other.user_ids.tolist()
    assert list(one.fields) == list(other.fields)
    for name, field in one.fields.items():
        assert field.dtype == other.fields[name].dtype
        assert np.array_equal(field, other.fields[name])


@pytest.mark.parametrize("memory", [1, grouping.MEMORY_BYTES])  # what does not fit in is grouped on disk
@pytest.mark.parametrize("ending", WRITERS)
def test_a_table_of_every_format_equals_the_arrays_that_are_in_it(ending, memory, tmp_path, monkeypatch):
    monkeypatch.setattr(grouping, "MEMORY_BYTES", memory)
    path = tmp_path / f"rides{ending}"
    WRITERS[ending](path)
    second = {"seats": STARTS[:, 0]} if ending == ".csv" else {"start": STARTS}
    (tmp_path / "scratch").mkdir()
    population = Population.from_table(path, user="rider", scratch=tmp_path / "scratch")
    equal(population, Population.from_arrays(RIDERS, minutes=MINUTES, **second))
    assert isinstance(population.fields["minutes"], np.memmap) == (memory == 1)
    assert list((tmp_path / "scratch").iterdir()) == []  # the maps are of files that are deleted already
    assert population.fingerprint() == Population.from_arrays(RIDERS, minutes=MINUTES, **second).fingerprint()
