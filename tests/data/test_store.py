import itertools
import subprocess

import numpy as np
import pytest

from clipline import Population, __version__
from clipline.data.manifest import read_manifest, verify_store
from clipline.data.store import write_store
from clipline.errors import PopulationError


def rows_of(ids, start=0):
    """One chunk whose field says which row it was."""
    ids = np.asarray(ids)
    number = np.arange(start, start + len(ids))
    return ids, {"number": number, "square": np.stack([number, number**2], axis=1).astype(np.float32)}


def test_interleaved_users_come_out_grouped_and_each_in_the_order_given(tmp_path):
    write_store(tmp_path / "s", [rows_of([3, 1, 3, 2]), rows_of([1, 3, 9], start=4)], source="by hand")
    population = Population.open(tmp_path / "s")
    assert population.user_ids.tolist() == [1, 2, 3, 9]
    assert [population.of(i)["number"].tolist() for i in range(4)] == [[1, 4], [3], [0, 2, 5], [6]]
    assert population.of(2)["square"].tolist() == [[0, 0], [2, 4], [5, 25]]


@pytest.mark.parametrize("memory_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("text", [False, True])
def test_any_order_and_any_working_memory_equal_the_plain_grouping(tmp_path, memory_bytes, text):
    rng = np.random.default_rng(5)
    ids = np.concatenate([rng.integers(0, 40, 300), np.full(200, 7), [1000]])  # one large user, one of a single row
    rng.shuffle(ids)
    if text:
        ids = np.array([f"writer {i}" for i in ids])
    x = rng.integers(0, 255, (len(ids), 3, 2), dtype=np.uint8)
    y = rng.normal(size=len(ids))
    cuts = [0, 1, 1, 80, 400, len(ids)]  # an empty chunk among them
    chunks = [(ids[a:b], {"x": x[a:b], "y": y[a:b]}) for a, b in itertools.pairwise(cuts)]
    manifest = write_store(tmp_path / "s", chunks, source="rng", memory_bytes=memory_bytes)
    plain = Population.from_arrays(ids, x=x, y=y)
    stored = Population.open(tmp_path / "s")
    assert (manifest.users, manifest.examples) == (len(plain), len(ids))
    assert np.array_equal(stored.offsets, plain.offsets)
    assert np.array_equal(stored.user_ids, plain.user_ids)
    for name in ("x", "y"):
        assert stored.fields[name].dtype == plain.fields[name].dtype
        assert np.array_equal(stored.fields[name], plain.fields[name])


def test_ids_may_be_any_text_and_users_may_have_nothing(tmp_path):
    ids = np.array(["ジョン", "a/b", "..", "Ωmega", "ジョン"])
    write_store(tmp_path / "s", [rows_of(ids)], source="by hand", known_users=["silent", "a/b"])
    population = Population.open(tmp_path / "s")
    sizes = {str(user): population.size(i) for i, user in enumerate(population.user_ids)}
    assert sizes == {"ジョン": 2, "a/b": 1, "..": 1, "Ωmega": 1, "silent": 0}


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([], "by hand holds no example"),
        ([([], {"x": np.zeros(0)})], "user ids are float64"),
        ([(np.array([1]), {})], "0 fields"),
        ([(np.array([1]), {"x": np.float32(1)})], "field 'x' has 0 rows"),
        ([rows_of([1]), (np.array([1]), {"number": np.array([1])})], "field 'square' is in some rows"),
        ([(np.array([1]), {"x": np.zeros(1)}), (np.array([1]), {"x": np.zeros(1, int)})], "began with float64"),
        ([(np.array([1]), {"x": np.zeros((1, 2))}), (np.array([1]), {"x": np.zeros((1, 3))})], r"float64\[3\]"),
        ([(np.array([1]), {"../x": np.zeros(1)})], "cannot name a file"),
        ([(np.array([0.5]), {"x": np.zeros(1)})], "whole numbers or text"),
        ([(np.array(["a", None]), {"x": np.zeros(2)})], "drop the rows without a user"),
        ([(np.array([[1]]), {"x": np.zeros(1)})], "one axis"),
        ([(np.array([b"\xff"]), {"x": np.zeros(1)})], "not UTF-8"),
        ([rows_of([1]), rows_of(["a"])], "numbers in some rows and text in others"),
    ],
)
def test_what_cannot_be_stored_is_refused_and_leaves_nothing(tmp_path, chunks, words):
    with pytest.raises(PopulationError, match=words):
        write_store(tmp_path / "new" / "s", chunks, source="by hand")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "stop", [KeyboardInterrupt, ValueError("reader broke"), OSError(28, "No space left on device")]
)
def test_an_interruption_leaves_nothing(tmp_path, stop):
    def chunks():
        yield rows_of([1, 2])
        assert list(tmp_path.iterdir()) != []  # there is something to remove
        raise stop

    expected = PopulationError if isinstance(stop, OSError) else stop if isinstance(stop, type) else type(stop)
    with pytest.raises(expected):
        write_store(tmp_path / "s", chunks(), source="by hand")
    assert list(tmp_path.iterdir()) == []


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
    write_store(store, [rows_of(range(1000))], source="by hand")
    assert verify_store(store).users == 1000
    path = store / "field.square.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for largest in ({}, {"largest": len(data)}):
        with pytest.raises(PopulationError, match=r"field\.square\.npy' has checksum .* altered or damaged"):
            verify_store(store, **largest)
    assert verify_store(store, largest=len(data) - 1).users == 1000  # larger ones may be left unread
    path.unlink()
    with pytest.raises(PopulationError, match=r"field\.square\.npy' is missing"):
        verify_store(store, largest=1)
    with pytest.raises(PopulationError, match=r"field\.square\.npy.* cannot be opened"):
        Population.open(store)
    (store / "population.json").unlink()
    with pytest.raises(PopulationError, match=r"holds no population\.json"):
        verify_store(store)


def test_a_folder_in_use_is_refused_and_an_empty_one_is_taken(tmp_path):
    (tmp_path / "s").mkdir()
    write_store(tmp_path / "s", [rows_of([1])], source="by hand")
    before = (tmp_path / "s" / "population.json").read_bytes()
    with pytest.raises(PopulationError, match="in use"):
        write_store(tmp_path / "s", [rows_of([2])], source="by hand")
    assert (tmp_path / "s" / "population.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
