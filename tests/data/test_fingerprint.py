import hashlib
import json
import os

import numpy as np
import pytest
from samples import small_population

from clipline import Population
from clipline.data import fingerprint as module
from clipline.data.store import write_store


def population(x=None, offsets=(0, 2, 3), ids=None, name="x"):
    x = np.arange(6.0).reshape(3, 2) if x is None else x
    return Population(np.array(offsets), {name: x}, None if ids is None else np.array(ids))


def test_it_is_the_checksum_of_names_forms_and_values():
    """By hand: a header for each array, then its bytes as they lie in memory."""
    x, offsets = np.arange(6.0).reshape(3, 2), np.array([0, 2, 3])
    header = repr(("offsets", "<i8", (3,), None)), repr(("field 'x'", "<f8", (3, 2), None))
    expected = hashlib.sha256(header[0].encode() + offsets.tobytes() + header[1].encode() + x.tobytes()).hexdigest()
    assert Population(offsets, {"x": x}).fingerprint() == expected


def test_any_change_changes_it():
    x = np.arange(6.0).reshape(3, 2)
    value = x.copy()
    value[1, 1] = np.nextafter(3.0, 4.0)
    others = [
        *map(population, (x, value, x[::-1], x.astype(np.float32), x.reshape(3, 2, 1))),
        *(population(offsets=offsets) for offsets in ((0, 1, 3), (0, 2, 2, 3))),
        *(population(ids=ids) for ids in ([1, 2], [1, 3], ["1", "2"], ["a", "bc"], [b"a", b"b"], [0.5, 2.0])),
        population(name="y"),
        Population(np.array([0, 2, 3]), {"x": x, "y": x}),
    ]
    assert len({other.fingerprint() for other in others}) == len(others)


def test_where_the_values_lie_makes_no_difference(tmp_path):
    x = np.arange(600.0).reshape(3, 200)
    same = population(x).fingerprint()
    assert population(np.asfortranarray(x)).fingerprint() == same
    assert population(np.repeat(x, 2, axis=1)[:, ::2]).fingerprint() == same
    assert Population.open(population(x).save(tmp_path / "store")).fingerprint() == same


@pytest.mark.parametrize("chunk", [1, 17, 64, 10**6])
def test_the_size_of_chunks_makes_no_difference(monkeypatch, chunk):
    same = small_population().fingerprint()
    monkeypatch.setattr(module, "_CHUNK", chunk)
    assert small_population().fingerprint() == same


# Files that are too large to be read ---------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store whose field is too large to be read, and the others are not."""
    chunk = (np.array([1, 1, 2]), {"x": np.arange(300.0).reshape(3, 100)})
    write_store(tmp_path / "store", [chunk], source="the test")
    monkeypatch.setattr(module, "LARGEST_READ", 2000)
    return tmp_path / "store"


def altered(path, time=None):
    """Change one value of a file, and perhaps its time."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns if time is None else time))


def test_of_a_large_file_size_time_and_checksum_are_taken_and_no_value(store):
    same = Population.open(store).fingerprint()
    altered(store / "field.x.npy")
    assert Population.open(store).fingerprint() == same
    altered(store / "field.x.npy", time=1)
    assert Population.open(store).fingerprint() != same
    assert Population.open(store).fingerprint(times=False) == Population.open(store).fingerprint(times=False)


def test_without_times_the_checksum_in_the_manifest_still_counts(store):
    same = Population.open(store).fingerprint(times=False)
    os.utime(store / "field.x.npy", ns=(1, 1))
    assert Population.open(store).fingerprint(times=False) == same
    manifest = json.loads((store / "population.json").read_text())
    manifest["sha256"]["field.x.npy"] = "0" * 64
    (store / "population.json").write_text(json.dumps(manifest))
    assert Population.open(store).fingerprint(times=False) != same


def test_small_files_beside_a_large_one_are_read(store):
    same = Population.open(store).fingerprint()
    altered(store / "user_ids.npy")
    assert Population.open(store).fingerprint() != same


def test_a_large_map_is_read_where_its_file_does_not_tell(store):
    """A map that was changed in memory, a part of a map, and one whose file is gone."""
    read = np.load(store / "field.x.npy")
    changing = np.load(store / "field.x.npy", mmap_mode="c")
    assert population(changing).fingerprint() == population(read).fingerprint()
    changing[0, 0] = 5
    assert population(changing).fingerprint() != population(read).fingerprint()
    opened = np.load(store / "field.x.npy", mmap_mode="r")
    assert population(opened[:, 10:]).fingerprint() == population(read[:, 10:]).fingerprint()
    assert population(opened).fingerprint() != population(read).fingerprint()
    (store / "field.x.npy").unlink()
    assert population(opened).fingerprint() == population(read).fingerprint()
