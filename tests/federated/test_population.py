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


def test_opening_a_million_users_reads_next_to_nothing(tmp_path):
    users = 1_000_000
    path = Population(np.arange(users + 1), {"x": np.zeros(users, np.uint8)}).save(tmp_path / "p")
    tracemalloc.start()
    population = Population.open(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(population) == users
    assert population.of(999_999)["x"].tolist() == [0]
    assert peak < 200_000  # the offsets alone are 8 MB


def test_a_folder_in_use_is_not_written_to(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(PopulationError, match="is in use: give a folder that is new or empty"):
        Population.from_arrays([1], x=[1]).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_damaged_store_is_refused_with_the_reason(tmp_path):
    path = Population.from_arrays([1, 2], x=[1, 2]).save(tmp_path / "p")
    (path / "field.x.npy").unlink()
    with pytest.raises(PopulationError, match="incomplete"):
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
    ],
)
def test_data_that_is_no_population_is_refused_with_a_way_out(make, words):
    with pytest.raises(PopulationError) as error:
        make()
    assert words in str(error.value)
    assert ": " in str(error.value)


def test_the_largest_user_is_found_wherever_he_is():
    sizes = np.zeros(2**20 + 3, np.int64)
    for place in (0, 2**20 - 1, 2**20, len(sizes) - 1):
        some = sizes.copy()
        some[place] = 7
        some[5] = 3
        offsets = np.concatenate([[0], np.cumsum(some)])
        assert Population(offsets, {"x": np.zeros(offsets[-1])}).largest() == 7
