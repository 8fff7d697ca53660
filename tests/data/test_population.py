import zlib

import numpy as np
import pytest

from clipline import Population, SettingError
from clipline.data import population as population_module
from clipline.errors import PopulationError


def test_examples_are_grouped_by_user_and_keep_their_order():
    population = Population.from_arrays(["b", "a", "b", "c", "a"], x=[1, 2, 3, 4, 5])
    assert population.user_ids.tolist() == ["a", "b", "c"]
    assert [population.of(user)["x"].tolist() for user in range(3)] == [[2, 5], [1, 3], [4]]
    assert [user["x"].tolist() for user in population] == [[2, 5], [1, 3], [4]]
    assert (len(population), population.examples, population.size(1)) == (3, 5, 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Population.from_arrays([], x=[]), "population has 0 users but needs at least 1"),
        (lambda: Population.from_arrays([1, 2]), "population has 0 fields"),
        (lambda: Population.from_arrays([1, 2], x=[1, 2, 3]), "field 'x' has 3 rows but must have 2"),
        (lambda: Population.from_arrays([[1], [2]], x=[1, 2]), "user_ids mixes types or holds objects (list)"),
        (lambda: Population.from_arrays(np.ones((2, 1)), x=[1, 2]), "user_ids has shape (2, 1)"),
        (lambda: Population.from_arrays([1, None], x=[1, 2]), "user_ids has 1 of 2 ids missing"),
        (lambda: Population.from_arrays([1.0, float("nan")], x=[1, 2]), "user_ids has 1 of 2 ids missing"),
        (lambda: Population(np.array([1, 3]), {"x": np.zeros(3)}), "offsets start at 1"),
        (lambda: Population(np.array([0, 3, 2, 4]), {"x": np.zeros(4)}), "offsets fall somewhere but must never fall"),
        (lambda: Population.from_arrays([1, 2], known_users=["3"], x=[1, 2]), "both must be text or both numbers"),
        (lambda: Population(np.array([0, 1]), {"x": np.zeros(1)}, np.arange(5)), "user_ids has 5 entries"),
        (lambda: Population(np.array([0.0, 1.0]), {"x": np.zeros(1)}), "offsets are float64 of shape (2,)"),
        (lambda: Population([0, 1], {"x": np.zeros(1)}), "offsets are of type list"),
        (lambda: Population(np.array([0, 1]), None), "population has 0 fields"),
        (lambda: Population(np.array([0, 1]), {"x": [1]}), "field 'x' is of type list"),
        (lambda: Population(np.array([0, 1]), {3: np.zeros(1)}), "field 3 must be named by text"),
        (lambda: Population(np.array([0, 1]), {"x": np.zeros(1)}, ["a"]), "user_ids are of type list"),
        (lambda: Population.from_arrays([1, 2], known_users=3, x=[1, 2]), "known_users has shape ()"),
        (lambda: Population(np.array([0, 1]), {"x": np.array([None])}), "field 'x' is object but must hold numbers"),
        (lambda: Population(np.array([0, 1]), {"x": np.zeros(1, ">f4")}), "field 'x' is >f4 but must hold numbers"),
        (lambda: Population(np.array([0, 1]), {"x": np.zeros(1)}, np.array([None])), "user_ids mixes types"),
        (lambda: Population(np.array([0, 1]), {"x": np.zeros(1)}, np.array([np.nan])), "user_ids holds NaN"),
        (lambda: Population(np.array([0, 1]), {"x": np.zeros(1)}, np.array(["NaT"], "M8[s]")), "user_ids are datetime"),
        (lambda: Population.from_arrays([1, 2], known_users=[np.nan], x=[1, 2]), "known_users has 1 of 1 ids missing"),
        (lambda: Population.from_arrays([1, 2], x=[[1], [2, 3]]), "field 'x' cannot become a NumPy array"),
    ],
)
def test_data_that_is_no_population_is_refused_with_a_way_out(make, words):
    with pytest.raises(PopulationError) as error:
        make()
    assert words in str(error.value)
    assert ": " in str(error.value)


@pytest.mark.parametrize("ids", [["a", "b", "a"], [3, 1, 3], [0.0, 1.0, -0.0]])
def test_nobody_is_two_users(ids, tmp_path):
    fields = {"x": np.zeros(3)}
    with pytest.raises(PopulationError, match="user_ids name somebody twice"):
        Population(np.arange(4), fields, np.array(ids))
    path = Population(np.arange(4), fields, np.arange(3)).save(tmp_path / "p")
    np.save(path / "user_ids.npy", np.array(ids))
    with pytest.raises(PopulationError, match=r"p': user_ids name somebody twice"):
        Population.open(path)


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


def test_the_largest_user_is_found_wherever_he_is():
    sizes = np.zeros(2**20 + 3, np.int64)
    for place in (0, 2**20 - 1, 2**20, len(sizes) - 1):
        some = sizes.copy()
        some[place] = 7
        some[5] = 3
        offsets = np.concatenate([[0], np.cumsum(some)])
        assert Population(offsets, {"x": np.zeros(offsets[-1])}).largest() == 7


# Splits by user ------------------------------------------------------------------------------------------------------


def people(ids, seed=0):
    """Users with these ids and one to five rows each, which say whose they are; rows in a random order."""
    rng = np.random.default_rng(seed)
    owners = np.repeat(np.asarray(ids), np.arange(len(ids)) % 5 + 1)
    rng.shuffle(owners)
    return Population.from_arrays(owners, x=np.arange(len(owners)), code=[hash_of(owner) for owner in owners])


def hash_of(owner):
    return zlib.crc32(str(owner).encode())


NAMES = {"text": [f"rider {i}" for i in range(400)], "numbers": list(range(1000, 1400)), "negative": range(-400, 0)}


@pytest.mark.parametrize("ids", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("test", [0.1, 0.5, 0.97, 1, 40, 399])
def test_everybody_is_in_one_half_with_all_rows_and_nobody_in_both(ids, test):
    population = people(ids)
    train, tested = population.split(test=test, seed=3)
    assert sorted([*train.user_ids.tolist(), *tested.user_ids.tolist()]) == sorted(ids)
    for half in (train, tested):
        for place, user in enumerate(half.user_ids.tolist()):
            whole = population.of(population.user_ids.tolist().index(user))
            assert half.of(place)["x"].tolist() == whole["x"].tolist()  # all rows, in their order
            assert set(half.of(place)["code"].tolist()) == {hash_of(user)}  # and nobody else's


def test_a_fraction_is_a_chance_and_a_whole_number_is_exact():
    """20,000 users at 0.1: 2000 give or take 42; five deviations miss once in two million seeds."""
    population = Population(np.arange(20_001), {"x": np.zeros(20_000)}, np.arange(20_000))
    for seed in range(3):
        assert abs(len(population.split(test=0.1, seed=seed)[1]) - 2000) < 5 * 43
        assert len(population.split(test=np.int64(123), seed=seed)[1]) == 123
    first, second = (set(population.split(test=0.1, seed=seed)[1].user_ids.tolist()) for seed in (0, 1))
    assert abs(len(first & second) - 200) < 75  # seeds are independent: a hundredth is in both, give or take 14


def test_the_same_seed_gives_the_same_halves_whatever_the_order_of_the_rows():
    one, other = people(NAMES["text"], seed=0), people(NAMES["text"][::-1], seed=1)
    for test in (0.2, 60):
        assert [half.user_ids.tolist() for half in one.split(test=test, seed=5)] == [
            half.user_ids.tolist() for half in other.split(test=test, seed=5)
        ]
    assert one.split(seed=5)[1].user_ids.tolist() != one.split(seed=6)[1].user_ids.tolist()


def test_who_is_removed_moves_nobody_else():
    names = NAMES["text"]
    whole = set(people(names).split(test=0.3)[1].user_ids.tolist())
    for gone in (0, 17, 399):
        rest = [name for name in names if name != names[gone]]
        assert set(people(rest).split(test=0.3)[1].user_ids.tolist()) == whole - {names[gone]}


def test_with_a_whole_number_who_is_removed_moves_at_most_one_other():
    names = NAMES["text"]
    whole = set(people(names).split(test=40)[1].user_ids.tolist())
    for gone in range(0, 400, 23):
        rest = [name for name in names if name != names[gone]]
        others = set(people(rest).split(test=40)[1].user_ids.tolist())
        assert len(others - whole) == (names[gone] in whole)


def test_users_without_ids_are_split_by_place_which_becomes_their_id():
    offsets = np.arange(201) * 2
    train, test = Population(offsets, {"x": np.arange(400)}).split(test=0.25, seed=1)
    named_train, named_test = Population(offsets, {"x": np.arange(400)}, np.arange(200)).split(test=0.25, seed=1)
    for half, named in ((train, named_train), (test, named_test)):
        assert half.user_ids.tolist() == named.user_ids.tolist()
        assert [half.of(i)["x"].tolist() for i in range(len(half))] == [[2 * i, 2 * i + 1] for i in half.user_ids]


def test_users_without_rows_are_split_too():
    population = Population.from_arrays([1, 1, 2], known_users=range(100), x=[[1, 2], [3, 4], [5, 6]])
    train, test = population.split(test=50)
    assert (len(train), len(test)) == (50, 50)
    assert train.examples + test.examples == 3
    assert train.fields["x"].shape[1:] == test.fields["x"].shape[1:] == (2,)


@pytest.mark.parametrize("in_memory", [0, 1 << 30])
@pytest.mark.parametrize("copy_bytes", [1, 100, 1 << 20])
def test_a_large_store_is_split_in_pieces_and_on_disk(tmp_path, monkeypatch, in_memory, copy_bytes):
    population = people(NAMES["numbers"])
    plain = population.split(test=0.4, seed=2)
    monkeypatch.setattr(population_module, "_IN_MEMORY", in_memory)
    monkeypatch.setattr(population_module, "_COPY_BYTES", copy_bytes)
    opened = Population.open(population.save(tmp_path / "p")).split(test=0.4, seed=2)
    for half, other in zip(plain, opened, strict=True):
        assert half.fingerprint() == other.fingerprint()
        assert isinstance(other.fields["x"], np.memmap) == (in_memory == 0)


@pytest.mark.parametrize("test", [0.0, 1.0, -0.1, float("nan"), "0.1", True, 0, 400, -1, None])
def test_a_share_or_number_out_of_range_is_refused(test):
    with pytest.raises(SettingError, match="test="):
        people(NAMES["text"]).split(test=test)


def test_an_empty_half_is_refused_with_a_way_out():
    with pytest.raises(PopulationError, match="test=1e-09 of 400 users leaves nobody to test on: give a whole number"):
        people(NAMES["text"]).split(test=1e-9)
    half, _ = people(NAMES["text"]).split(test=0.2, seed=5)
    with pytest.raises(PopulationError, match="or another seed than 5 if these users are half of a split by it"):
        half.split(test=0.1, seed=5)
    assert len(half.split(test=0.1, seed=6)[1]) > 0
    with pytest.raises(PopulationError, match=r"test=0\.999999999 of 400 users leaves nobody to train on"):
        people(NAMES["text"]).split(test=1 - 1e-9)
    with pytest.raises(PopulationError, match="population has 1 user but a split needs at least 2"):
        people(["me"]).split()
    assert [len(half) for half in people(["me", "you"]).split(test=1)] == [1, 1]


def test_a_population_is_shown_without_anybodys_data():
    population = Population.from_arrays([7, 7, 9], x=[[0.25, 0.5], [1.0, 2.0], [3.0, 4.0]], y=[1, 2, 3])
    assert repr(population) == "Population(2 users, 3 examples of x float64[2], y int64)"


def test_a_subset_is_the_chosen_users_with_all_their_rows():
    population = people(NAMES["text"])
    for chosen in ([17, 3, 250], np.isin(np.arange(400), [3, 17, 250])):
        some = population.subset(chosen)
        assert some.user_ids.tolist() == population.user_ids[[3, 17, 250]].tolist()
        assert [one["x"].tolist() for one in some] == [population.of(i)["x"].tolist() for i in (3, 17, 250)]
    bare = Population(np.arange(0, 21, 2), {"x": np.arange(20)}).subset([9, 4])
    assert bare.user_ids.tolist() == [4, 9]  # their place is what their randomness is keyed by
    for wrong in ([], [1, 1], [400], [-1], [0.5], [True, False], [[1]], "a"):
        with pytest.raises(PopulationError, match="users "):
            population.subset(wrong)


def test_an_id_that_is_no_whole_number_changes_nobody_elses_identity():
    x = np.arange(5.0)[:, None]
    whole = Population.from_arrays(np.array([-1, 2, 3, 2**40, 5]), x=x)
    among_fractions = Population.from_arrays(np.array([-1, 2, 3, 2**40, 5.5]), x=x)
    users = [one.user_ids.tolist().index(number) for one in (whole, among_fractions) for number in (-1, 2, 3, 2**40)]
    assert whole.identities(np.array(users[:4])).tolist() == among_fractions.identities(np.array(users[4:])).tolist()
    assert among_fractions.identities(np.arange(5)).tolist() != whole.identities(np.arange(5)).tolist()
    as_text = Population.from_arrays(["-1", "2", "3", str(2**40), "A5"], x=x)
    places = np.array([as_text.user_ids.tolist().index(str(number)) for number in (-1, 2, 3, 2**40)])
    assert as_text.identities(places).tolist() == whole.identities(np.array(users[:4])).tolist()
