import io
import json
import tracemalloc

import numpy as np
import pytest

from clipline import Population
from clipline.errors import PopulationError


def test_examples_are_grouped_by_user_and_keep_their_order():
    population = Population.from_arrays(["b", "a", "b", "c", "a"], x=[1, 2, 3, 4, 5])
    assert population.user_ids.tolist() == ["a", "b", "c"]
    assert [population.of(user)["x"].tolist() for user in range(3)] == [[2, 5], [1, 3], [4]]
    assert (len(population), population.examples, population.size(1)) == (3, 5, 2)


def test_users_with_no_example_one_example_or_ten_thousand():
    ids = [7] + [3] * 10_000
    population = Population.from_arrays(ids, known_users=[1, 3, 7, 9], x=np.arange(10_001))
    assert population.user_ids.tolist() == [1, 3, 7, 9]
    assert [population.size(user) for user in range(4)] == [0, 10_000, 1, 0]
    assert population.of(2)["x"].tolist() == [0]
    assert population.of(0)["x"].shape == (0,)


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


def test_a_folder_in_use_is_not_written_to(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(PopulationError, match="is in use: give a folder that is new or empty"):
        Population.from_arrays([1], x=[1]).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_damaged_store_is_refused_with_the_reason(tmp_path):
    path = Population.from_arrays([1, 2], x=[1, 2]).save(tmp_path / "p")
    (path / "field.x.npy").unlink()
    with pytest.raises(PopulationError, match=r"field\.x\.npy.* cannot be opened"):
        Population.open(path)
    (path / "population.json").write_text("{")
    with pytest.raises(PopulationError, match="damaged"):
        Population.open(path)
    (path / "population.json").write_text(json.dumps({"version": 99}))
    with pytest.raises(PopulationError, match="version 99 but this clipline reads 1"):
        Population.open(path)
    with pytest.raises(PopulationError, match=r"holds no population\.json"):
        Population.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Population.from_arrays([], x=[]), "population has 0 users but needs at least 1"),
        (lambda: Population.from_arrays([1, 2]), "population has 0 fields"),
        (lambda: Population.from_arrays([1, 2], x=[1, 2, 3]), "field 'x' has 3 rows but must have 2"),
        (lambda: Population.from_arrays([1, 2], x=[1, 2], y=7), "field 'y' has 0 rows but must have 2"),
        (lambda: Population.from_arrays([[1], [2]], x=[1, 2]), "user_ids has shape (2, 1)"),
        (lambda: Population.from_arrays([1, None], x=[1, 2]), "user_ids mixes types or holds None"),
        (lambda: Population.from_arrays([1.0, float("nan")], x=[1, 2]), "user_ids holds NaN"),
        (lambda: Population(np.array([0, 3]), {"x": np.zeros(2)}), "field 'x' has 2 rows but must have 3"),
        (lambda: Population(np.array([1, 3]), {"x": np.zeros(3)}), "offsets start at 1"),
        (lambda: Population(np.array([0, 3, 2, 4]), {"x": np.zeros(4)}), "offsets fall somewhere but must never fall"),
        (lambda: Population.from_arrays([1, 2], known_users=["3"], x=[1, 2]), "both must be text or both numbers"),
        (lambda: Population(np.array([0, 1]), {"x": np.zeros(1)}, np.arange(5)), "user_ids has 5 entries"),
        (lambda: Population(np.array([0, -1, 1]), {"x": np.zeros(1)}), "offsets fall somewhere"),
        (lambda: Population(np.array([0, 3, 2], np.uint64), {"x": np.zeros(2)}), "offsets fall somewhere"),
        (lambda: Population(np.array([0, 2**64 - 1], np.uint64), {"x": np.zeros(1)}), "offsets fall somewhere"),
        (lambda: Population(np.array([0.0, 1.0]), {"x": np.zeros(1)}), "offsets are float64 of shape (2,)"),
        (lambda: Population(np.array([[0, 1]]), {"x": np.zeros(1)}), "offsets are int64 of shape (1, 2)"),
        (lambda: Population(np.array(7), {"x": np.zeros(1)}), "offsets are int64 of shape ()"),
        (lambda: Population([0, 1], {"x": np.zeros(1)}), "offsets are of type list"),
        (lambda: Population(None, {"x": np.zeros(1)}), "offsets are of type NoneType"),
        (lambda: Population(np.array([0, 1]), None), "population has 0 fields"),
        (lambda: Population(np.array([0, 1]), {"x": [1]}), "field 'x' is of type list"),
        (lambda: Population(np.array([0, 1]), {"x": np.array(1)}), "field 'x' is of type ndarray"),
        (lambda: Population(np.array([0, 1]), {3: np.zeros(1)}), "field 3 must be named by text"),
        (lambda: Population(np.array([0, 1]), {"x": np.array([None])}), "field 'x' is object but must hold numbers"),
        (lambda: Population(np.array([0, 1]), {"x": np.array(["a"])}), "field 'x' is <U1 but must hold numbers"),
        (lambda: Population(np.array([0, 1]), {"x": np.zeros(1, ">f4")}), "field 'x' is >f4 but must hold numbers"),
        (lambda: Population(np.array([0, 1]), {"x": np.zeros(1, "f4,i4")}), "but must hold numbers that torch knows"),
        (lambda: Population(np.array([0, 1]), {"x": np.zeros(1, np.longdouble)}), "must hold numbers that torch knows"),
        (lambda: Population(np.array([0, 1]), {"x": np.zeros(1)}, ["a"]), "user_ids are of type list"),
        (lambda: Population(np.array([0, 1]), {"x": np.zeros(1)}, np.array([[1]])), "user_ids has shape (1, 1)"),
        (lambda: Population(np.array([0, 1]), {"x": np.zeros(1)}, np.array([None])), "user_ids mixes types"),
        (lambda: Population(np.array([0, 1]), {"x": np.zeros(1)}, np.array([np.nan])), "user_ids holds NaN"),
        (lambda: Population(np.array([0, 1]), {"x": np.zeros(1)}, np.array(["NaT"], "M8[s]")), "user_ids are datetime"),
        (lambda: Population.from_arrays([1, 2], known_users=[np.nan], x=[1, 2]), "known_users holds NaN"),
        (lambda: Population.from_arrays([1, 2], known_users=3, x=[1, 2]), "known_users has shape ()"),
        (lambda: Population.from_arrays([1, 2], x=[[1], [2, 3]]), "field 'x' cannot become a NumPy array"),
        (lambda: Population.from_arrays([[1], [2, 3]], x=[1, 2]), "user_ids cannot become a NumPy array"),
    ],
)
def test_data_that_is_no_population_is_refused_with_a_way_out(make, words):
    with pytest.raises(PopulationError) as error:
        make()
    assert words in str(error.value)
    assert ": " in str(error.value)


@pytest.mark.parametrize("ids", [["a", "b", "a"], [3, 1, 3], [2, 2, 5], [0.0, 1.0, -0.0], [b"a", b"c", b"a"]])
def test_nobody_is_two_users(ids, tmp_path):
    fields = {"x": np.zeros(3)}
    with pytest.raises(PopulationError, match="user_ids name somebody twice"):
        Population(np.arange(4), fields, np.array(ids))
    path = Population(np.arange(4), fields, np.arange(3)).save(tmp_path / "p")
    np.save(path / "user_ids.npy", np.array(ids))
    with pytest.raises(PopulationError, match=r"p': user_ids name somebody twice"):
        Population.open(path)


@pytest.mark.parametrize("ids", [["c", "a", "b"], [3, 1, 2], [0.5, 0.25, 0.125]])
def test_distinct_ids_may_come_in_any_order(ids):
    assert Population(np.arange(4), {"x": np.zeros(3)}, np.array(ids)).user_ids.tolist() == ids


@pytest.mark.parametrize("place", [1, 2**16 - 1, 2**16, 2**16 + 1, 2**17 + 2])
def test_an_offset_or_id_out_of_order_is_found_wherever_it_is(place, tmp_path):
    users = 2**17 + 3
    offsets, ids = np.arange(users + 1), np.arange(users)
    path = Population(offsets, {"x": np.zeros(users, np.uint8)}, ids).save(tmp_path / "p")
    offsets[place] += 2  # the next one is lower now
    np.save(path / "offsets.npy", offsets)
    with pytest.raises(PopulationError, match="p': offsets fall somewhere"):
        Population.open(path)
    np.save(path / "offsets.npy", np.arange(users + 1))
    ids[place] = 0
    np.save(path / "user_ids.npy", ids)
    with pytest.raises(PopulationError, match="user_ids name somebody twice"):
        Population.open(path)


def test_small_whole_numbers_are_offsets_too():
    population = Population(np.array([0, 2, 2, 5], np.uint8), {"x": np.arange(5)})
    assert population.offsets.dtype == np.int64
    assert [population.of(user)["x"].tolist() for user in range(3)] == [[0, 1], [], [2, 3, 4]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "holds no JSON object"),
        ("null", "holds no JSON object"),
        ("7", "holds no JSON object"),
        ("[" * 100_000, "is damaged"),
        ("\ufeff{}", "is damaged"),
        (b"\xff\xfe", "is damaged"),
        ("", "is damaged"),
        ("9" * 5000, "is damaged"),
        ({}, "has version None"),
        ({"version": 1, "user_ids": True}, "must say fields, a list of names"),
        ({"version": 1, "fields": ["x"]}, "must say fields, a list of names"),
        ({"version": 1, "fields": 3, "user_ids": True}, "must say fields, a list of names"),
        ({"version": 1, "fields": "x", "user_ids": True}, "must say fields, a list of names"),
        ({"version": 1, "fields": ["x"], "user_ids": "no"}, "user_ids, true or false"),
        ({"version": 1, "fields": [1], "user_ids": True}, "field 1 cannot name a file"),
        ({"version": 1, "fields": [["x"]], "user_ids": True}, "field ['x'] cannot name a file"),
        ({"version": 1, "fields": ["../x"], "user_ids": True}, "field '../x' cannot name a file"),
        ({"version": 1, "fields": ["/x"], "user_ids": True}, "field '/x' cannot name a file"),
        ({"version": 1, "fields": [""], "user_ids": True}, "field '' cannot name a file"),
        ({"version": 1, "fields": ["x\0"], "user_ids": True}, "cannot name a file"),
        ({"version": 1, "fields": ["\ud800"], "user_ids": True}, "cannot name a file"),
        ({"version": 1, "fields": ["x", "x"], "user_ids": True}, "field 'x' comes twice"),
        ({"version": 1, "fields": [], "user_ids": True}, "population has 0 fields"),
        ({"version": 1, "fields": ["y" * 400], "user_ids": True}, "cannot be opened"),
    ],
)
def test_a_manifest_that_is_none_is_refused_with_the_reason(content, words, tmp_path):
    path = Population.from_arrays([1, 2], x=[1, 2]).save(tmp_path / "p")
    content = json.dumps(content) if isinstance(content, dict) else content
    (path / "population.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PopulationError) as error:
        Population.open(path)
    assert words in str(error.value)


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
        b"",
        b"\0" * 64,
        archive(),
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1000,), }"),
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (10**30,), }"),
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1" + "0" * 30 + ",), }"),
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }"),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"),
        npy("{'descr': 'what', 'fortran_order': False, 'shape': (1,), }"),
        npy("{'descr': " + "-" * 9000 + "1, 'fortran_order': False, 'shape': (1,), }"),
        npy("{"),
        npy("[]"),
    ],
)
@pytest.mark.parametrize("name", ["offsets", "field.x", "user_ids"])
def test_a_damaged_array_is_refused(name, content, tmp_path):
    path = Population.from_arrays([1, 2], x=[1, 2]).save(tmp_path / "p")
    (path / f"{name}.npy").write_bytes(content)
    with pytest.raises(PopulationError, match=rf"{name}\.npy' cannot be opened"):
        Population.open(path)


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path):
    path = Population.from_arrays([1, 2], x=[1, 2]).save(tmp_path / "p")
    for name in ("field.x.npy", "population.json"):
        (path / name).unlink()
        (path / name).mkdir()
        with pytest.raises(PopulationError, match=rf"{name}.*Is a directory"):
            Population.open(path)


def test_only_what_can_be_opened_again_is_saved(tmp_path):
    for name in ("../x", "a/b", ""):
        population = Population(np.array([0, 1]), {name: np.zeros(1)})
        with pytest.raises(PopulationError, match="cannot name a file"):
            population.save(tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_the_largest_user_is_found_wherever_he_is():
    sizes = np.zeros(2**20 + 3, np.int64)
    for place in (0, 2**20 - 1, 2**20, len(sizes) - 1):
        some = sizes.copy()
        some[place] = 7
        some[5] = 3
        offsets = np.concatenate([[0], np.cumsum(some)])
        assert Population(offsets, {"x": np.zeros(offsets[-1])}).largest() == 7
