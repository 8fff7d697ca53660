import subprocess

import numpy as np
import pytest

from clipline import __version__
from clipline.data.manifest import read_manifest, verify_store
from clipline.data.store import write_store
from clipline.errors import PopulationError


def rows_of(ids):
    """One chunk with two fields."""
    number = np.arange(len(ids))
    return np.asarray(ids), {"number": number, "square": np.stack([number, number**2], axis=1).astype(np.float32)}


def test_the_manifest_says_what_is_there(tmp_path):
    write_store(tmp_path / "s", [rows_of([2, 1])], source="somewhere.csv")
    manifest = read_manifest(tmp_path / "s")
    assert (manifest.users, manifest.examples, manifest.source) == (2, 2, "somewhere.csv")
    assert manifest.made_by == f"clipline {__version__}"
    files = sorted(path.name for path in (tmp_path / "s").iterdir())
    assert files == ["field.number.npy", "field.square.npy", "offsets.npy", "population.json", "user_ids.npy"]
    assert sorted(manifest.sha256) == [name for name in files if name != "population.json"]
    system = subprocess.run(["sha256sum", tmp_path / "s" / "offsets.npy"], capture_output=True, text=True, check=True)
    assert system.stdout.split()[0] == manifest.sha256["offsets.npy"]


def test_a_flipped_bit_a_lost_file_and_a_lost_manifest_are_noticed(tmp_path):
    store = tmp_path / "s"
    write_store(store, [rows_of([2, 1])], source="by hand")
    assert verify_store(store).users == 2
    path = store / "field.square.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(PopulationError, match=r"field\.square\.npy' has checksum .* altered or damaged"):
        verify_store(store)
    path.unlink()
    with pytest.raises(PopulationError, match=r"field\.square\.npy' is missing"):
        verify_store(store)
    (store / "population.json").unlink()
    with pytest.raises(PopulationError, match=r"holds no population\.json"):
        verify_store(store)


def test_large_files_may_be_left_unread_but_must_be_there(tmp_path):
    store = tmp_path / "s"
    write_store(store, [rows_of(range(1000))], source="by hand")
    large = store / "field.square.npy"
    large.write_bytes(b"?" * 20_000)
    with pytest.raises(PopulationError, match="has checksum"):
        verify_store(store)
    assert verify_store(store, largest=19_999).users == 1000
    with pytest.raises(PopulationError, match="has checksum"):
        verify_store(store, largest=20_000)
    large.unlink()
    with pytest.raises(PopulationError, match="is missing"):
        verify_store(store, largest=1)
