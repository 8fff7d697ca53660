"""What is read from noisy sums, what it costs, and that a training counts it."""

import copy
import json
import math
import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch
from oracle_rows import gaussian_delta

import clipline as cl
from clipline.data.private_statistics import threshold_for
from clipline.errors import PopulationError, SettingError
from clipline.privacy import GaussianEvent, Ledger, NoSampling, PoissonSampling, account

RNG = np.random.default_rng(7)
USERS, ROWS = 2000, 6000
OWNERS = np.concatenate([np.arange(USERS), RNG.integers(0, USERS, ROWS - USERS)])
AGE = RNG.normal(40, 10, ROWS)
V = RNG.normal([1.0, -2.0], [0.5, 2.0], (ROWS, 2))
PEOPLE = cl.Population.from_arrays(OWNERS, age=AGE, v=V, y=(AGE > 40).astype(np.int64))
AGES = {"age": (0, 100)}


def over_users(values):
    """The mean over users of each user's own mean, by the definition."""
    return np.mean([values[user == OWNERS].mean(axis=0) for user in range(USERS)], axis=0)


def test_means_and_standard_deviations_come_near_the_truth():
    moments = cl.PrivateStatistics(seed=1).moments(PEOPLE, {**AGES, "v": (-10, 10)}, noise_multiplier=1.0)
    # Noise on a mean: half the range times sqrt(1 + 2 * 3) over 2000 users; five standard deviations are allowed.
    assert moments.noise_stddev["age"] == pytest.approx(50 * math.sqrt(7) / 2000, rel=0.01)
    mean, second = over_users(np.clip(AGE, 0, 100)), over_users(np.clip(AGE, 0, 100) ** 2)
    assert moments.mean["age"] == pytest.approx(mean, abs=5 * moments.noise_stddev["age"])
    assert moments.stddev["age"] == pytest.approx(math.sqrt(second - mean**2), rel=0.1)
    np.testing.assert_allclose(moments.mean["v"], over_users(V), atol=5 * moments.noise_stddev["v"])
    np.testing.assert_allclose(moments.stddev["v"], [0.5, 2.0], atol=0.3)
    assert moments.users == pytest.approx(USERS, abs=5 * math.sqrt(7))


def test_a_variance_below_its_noise_is_that_of_the_noise():
    """Else a field that drowned in noise would be divided by nearly nothing. 10 to the left of the middle, 0 to 40."""
    users = cl.Population.from_arrays(np.arange(2000), x=np.full(2000, 10.0))
    found = cl.PrivateStatistics(seed=1).moments(users, {"x": (0, 40)}, noise_multiplier=20.0)
    on_mean = 20 * math.sqrt(3) / found.users  # in halves of the range, where the middle is 0 and 10 is -0.5
    middle = (found.mean["x"] - 20) / 20
    assert found.mean["x"] == pytest.approx(10, abs=5 * 20 * on_mean)
    floor = 20 * math.sqrt(on_mean * math.hypot(0.5, 2 * middle))
    assert found.stddev["x"] >= floor * (1 - 1e-9)
    assert floor == pytest.approx(20 * math.sqrt(0.0173 * 1.118), rel=0.2)  # 2.8, where 0.02 was the least


def test_ranges_hold_the_quantiles_to_a_bin():
    ranges = cl.PrivateStatistics(seed=1).ranges(PEOPLE, AGES, noise_multiplier=1.0, quantiles=(0.1, 0.9), bins=50)
    low, high = np.quantile(AGE, [0.1, 0.9])  # about 27 and 53; a bin is 2 wide
    assert abs(ranges.low["age"] - low) <= 4
    assert abs(ranges.high["age"] - high) <= 4
    scaled = ranges.apply(PEOPLE)
    assert scaled.fields["age"][0] == pytest.approx(
        (PEOPLE.fields["age"][0] - ranges.low["age"]) / (ranges.high["age"] - ranges.low["age"])
    )


def test_nothing_but_noise_still_gives_a_scale_inside_the_range():
    few = cl.Population.from_arrays([1, 2], age=[30.0, 50.0])
    for seed in range(20):
        statistics = cl.PrivateStatistics(seed=seed)
        moments = statistics.moments(few, AGES, noise_multiplier=1e6)
        assert 0 <= moments.mean["age"] <= 100
        assert 0 < moments.stddev["age"] <= 50.1
        ranges = statistics.ranges(few, AGES, noise_multiplier=1e6)
        assert 0 <= ranges.low["age"] < ranges.high["age"] <= 100


def test_a_vocabulary_shows_what_many_have_and_hides_what_one_has():
    cities = np.where(OWNERS % 2 == 0, "Bern", "Rome").astype(object)
    cities[0] = "user 0 alone lives here"
    cities[1:3] = None
    for candidates in (None, ["Bern", "Rome", "Oslo"]):
        words = cl.PrivateStatistics(seed=3).vocabulary(
            OWNERS, cities, noise_multiplier=2.0, most_per_user=2, candidates=candidates, name="city"
        )
        assert sorted(words) == ["Bern", "Rome"]
        assert sum(words.users) == pytest.approx(2000, abs=60)  # two noises of 2 sqrt(2) each
    lists = cl.PrivateStatistics(seed=3).vocabulary(
        np.arange(100), [[1, 2, 2], [2]] * 50, noise_multiplier=1.0, most_per_user=1
    )
    assert list(lists) == [2]  # each user counts for one token, the most frequent


def test_a_key_of_one_user_shows_as_rarely_as_promised():
    # 2000 users with a key each that nobody else has, at a threshold that one in a hundred passes: 20, give or take
    # sqrt(20); 0 or 45 and more come once in 10^6 seeds or less.
    words = cl.PrivateStatistics(seed=11).vocabulary(
        np.arange(2000), np.arange(2000), noise_multiplier=3.0, most_per_user=1, threshold_delta=0.01
    )
    assert 3 < len(words) < 45
    # One key: weight 1, noise 3, a tail of 1% at 2.3263 standard deviations.
    assert threshold_for(1, 3.0, 0.01) == pytest.approx(1 + 3 * 2.326348, abs=1e-4)
    # Four keys that share 1%: each 0.25094%, at 2.8061 standard deviations; weight 1 / 2.
    assert threshold_for(4, 3.0, 0.01) == pytest.approx(0.5 + 3 * 2.8061, abs=1e-3)


def test_statistics_compose_as_gaussians_and_thresholds_are_taken_off_delta():
    statistics = cl.PrivateStatistics()
    statistics.moments(PEOPLE, AGES, noise_multiplier=4.0)
    statistics.ranges(PEOPLE, AGES, noise_multiplier=3.0)
    mu = math.hypot(1 / 4, 1 / 3)
    guarantee = statistics.guarantee(delta=1e-6)
    assert gaussian_delta(mu, guarantee.epsilon) == pytest.approx(1e-6, rel=1e-6)
    assert (guarantee.rounds, guarantee.sampler, len(guarantee.statistics)) == (0, "none", 2)
    # Replacing a user moves each sum by two vectors.
    replaced = statistics.guarantee(delta=1e-6, relation="replace-one")
    assert gaussian_delta(2 * mu, replaced.epsilon) == pytest.approx(1e-6, rel=1e-6)
    statistics.vocabulary(OWNERS, OWNERS % 3, noise_multiplier=5.0, threshold_delta=4e-7)
    with_words = statistics.guarantee(delta=1e-6)
    mu = math.hypot(mu, 1 / 5)
    assert gaussian_delta(mu, with_words.epsilon) == pytest.approx(6e-7, rel=1e-5)  # 1e-6 less 4e-7
    replaced = statistics.guarantee(delta=1e-6, relation="replace-one")
    assert gaussian_delta(2 * mu, replaced.epsilon) == pytest.approx(2e-7, rel=1e-5)  # twice 4e-7 off
    with pytest.raises(SettingError, match=r"delta=3e-07 must be above the 4e-07 that thresholds"):
        statistics.guarantee(delta=3e-7)


def make(people, **options):
    return cl.Training(
        torch.nn.Linear(2, 2),
        lambda model, batch: torch.nn.functional.cross_entropy(model(batch["v"]), batch["y"], reduction="none"),
        people, rounds=3, cohort_size=20, local=cl.LocalSGD(lr=0.1), **options,
    )  # fmt: skip


def test_a_training_counts_each_statistic_once_in_noise_ledger_guarantee_and_card(tmp_path):
    statistics = cl.PrivateStatistics()
    moments = statistics.moments(PEOPLE, {"v": (-10, 10)}, noise_multiplier=4.0)
    scaled = moments.apply(PEOPLE)
    privacy = cl.Privacy(epsilon=3.0, delta=1e-5)
    plain, charged = make(PEOPLE, privacy=privacy), make(scaled, privacy=privacy)
    assert charged.noise_multiplier > plain.noise_multiplier
    assert make(scaled, privacy=privacy, preprocessing=statistics).noise_multiplier == charged.noise_multiplier
    assert make(PEOPLE, privacy=privacy, preprocessing=moments).noise_multiplier == charged.noise_multiplier
    # All together within the budget, by an account of the plain events.
    ledger = Ledger().add(GaussianEvent(NoSampling(), 4.0))
    ledger = ledger.add(GaussianEvent(PoissonSampling(20 / USERS), charged.noise_multiplier), 3)
    epsilon = account(ledger, delta=1e-5, relation=charged.relation).epsilon
    assert charged.planned.epsilon == pytest.approx(epsilon, rel=1e-9)
    assert 2.99 < epsilon <= 3.0
    result = charged.run([cl.RunDirectory(tmp_path / "run")])
    assert (result.guarantee.rounds, result.guarantee.sampler) == (3, "poisson")
    assert "private statistics included: mean and standard deviation of v in -10 to 10 (noise multiplier 4)" in str(
        result
    )
    lines = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2, 3]
    written = Ledger.read(tmp_path / "run" / "ledger.jsonl")
    assert written == result.state.ledger
    assert (written.rounds, written.releases) == (3, 4)
    saved = cl.load(result.save(tmp_path / "saved"), torch.nn.Linear(2, 2), predict=lambda model, batch: batch["v"])
    assert saved.guarantee == result.guarantee
    assert '```json\n{"scale": {"v": [[' in (tmp_path / "saved" / "card.md").read_text()
    # New data are scaled as the training's were.
    predicted = saved.predict(pa.table({"v": [[1.0, -2.0]]}))
    np.testing.assert_allclose(predicted, [([1.0, -2.0] - moments.mean["v"]) / moments.stddev["v"]], rtol=1e-5)
    assert saved.predict({"v": [[1.0, -2.0]]}).tolist() == predicted.tolist()
    with pytest.raises(SettingError, match="columns by name where the training had column options"):
        saved.predict(np.ones((1, 2)))


def test_a_run_with_statistics_is_resumed_and_one_without_them_is_not(tmp_path):
    statistics = cl.PrivateStatistics()
    statistics.moments(PEOPLE, AGES, noise_multiplier=4.0)
    options = {"privacy": cl.Privacy(noise_multiplier=1.0, delta=1e-5), "seed": 3}

    class Stop(cl.Callback):
        stop_requested = False

        def on_round(self, report, state):
            self.stop_requested = True

    begun = make(PEOPLE, preprocessing=statistics, **options).run([cl.RunDirectory(tmp_path / "run"), Stop()])
    assert begun.stopped == "interrupted"
    with pytest.raises(cl.CliplineError, match="holds rounds of another run"):
        make(PEOPLE, **options).resume(tmp_path / "run")
    result = make(PEOPLE, preprocessing=statistics, **options).resume(tmp_path / "run")
    assert (result.guarantee.rounds, len(result.guarantee.statistics)) == (3, 1)
    assert Ledger.read(tmp_path / "run" / "ledger.jsonl") == result.state.ledger


def test_a_store_keeps_scale_and_charge_and_so_do_halves(tmp_path):
    statistics = cl.PrivateStatistics()
    moments = statistics.moments(PEOPLE, {"v": (-10, 10)}, noise_multiplier=4.0)
    scaled = moments.apply(PEOPLE)
    opened = cl.Population.open(scaled.save(tmp_path / "store"))
    assert opened.charges == scaled.charges == (moments.event,) == opened.split(test=10)[0].charges
    assert opened.column_options == scaled.column_options
    frame = pa.table({"u": OWNERS, "v": V.tolist(), "city": (OWNERS % 2).astype(str)})
    words = statistics.vocabulary(OWNERS, frame["city"], noise_multiplier=2.0)
    made = cl.Population.from_dataframe(frame, user="u", scale=moments, categories={"city": words})
    assert set(made.charges) == {words.event, moments.event}
    np.testing.assert_array_equal(made.fields["v"], scaled.fields["v"])
    with pytest.raises(PopulationError, match="field 'v' has a scale already"):
        moments.apply(scaled)


def test_budgets_that_statistics_have_spent_are_refused():
    statistics = cl.PrivateStatistics(seed=1)
    statistics.moments(PEOPLE, AGES, noise_multiplier=0.5)
    with pytest.raises(SettingError, match=r"epsilon=3.0 must be above the .* that private statistics took before"):
        make(PEOPLE, privacy=cl.Privacy(epsilon=3.0, delta=1e-5), preprocessing=statistics)
    free = make(PEOPLE, privacy=cl.Privacy(noise_multiplier=1.0, delta=1e-5), preprocessing=statistics)
    assert free.planned.from_seed  # though the training itself has no seed
    with_state = free.run(state=make(PEOPLE, privacy=cl.Privacy(noise_multiplier=1.0, delta=1e-5)).init())
    assert with_state.guarantee.epsilon == free.planned.epsilon  # whose ledger did not have them
    assert "whoever knows it can subtract the noise" in str(free.planned)
    for wrong in (3, [3], None):
        with pytest.raises(SettingError, match=r"preprocessing=(3|None) must be private statistics"):
            make(PEOPLE, privacy=cl.Privacy(noise_multiplier=1.0), preprocessing=wrong)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda s: s.moments(PEOPLE, {"agee": (0, 1)}, noise_multiplier=1), "ranges name 'agee', .* mean 'age'"),
        (lambda s: s.moments(PEOPLE, {"age": (5, 5)}, noise_multiplier=1), "high of 'age'=5 must be .* above 5"),
        (lambda s: s.moments(PEOPLE, {"age": (0, math.inf)}, noise_multiplier=1), "high of 'age'=inf"),
        (lambda s: s.moments(PEOPLE, {"age": 5}, noise_multiplier=1), r"ranges\['age'\]='int' must be \(low, high\)"),
        (lambda s: s.moments(PEOPLE, {}, noise_multiplier=1), "a dict with at least 1 field"),
        (lambda s: s.moments(PEOPLE, AGES, noise_multiplier=0), "noise_multiplier=0 must be a finite number above 0"),
        (lambda s: s.ranges(PEOPLE, AGES, noise_multiplier=1, quantiles=(0.9, 0.1)), r"quantiles\[1\]=0.1 must be"),
        (lambda s: s.vocabulary([1, 2], ["a"], noise_multiplier=1), "values are 1 but user_ids are 2"),
        (lambda s: s.vocabulary([1], ["a"], noise_multiplier=1, threshold_delta=0), "threshold_delta=0 must be"),
        (lambda s: s.vocabulary([1], [4711.25], noise_multiplier=1), "values hold float but keys are text"),
        (lambda s: s.vocabulary([1], [[["4711"]]], noise_multiplier=1, candidates=["a"]), "values hold list but keys"),
        (lambda s: s.vocabulary([1], [[("4711", [])]], noise_multiplier=1, candidates=["a"]), "values hold tuple but"),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused_and_not_charged(ask, words):
    statistics = cl.PrivateStatistics()
    with pytest.raises((PopulationError, SettingError), match=words) as error:
        ask(statistics)
    assert "4711" not in str(error.value)
    assert len(statistics) == 0


def test_gaps_of_pandas_are_left_out_of_a_vocabulary():
    pandas = pytest.importorskip("pandas")
    column = pandas.Series(["a", pandas.NA, "b"] * 40, dtype="string")
    words = cl.PrivateStatistics(seed=1).vocabulary(range(120), column, noise_multiplier=0.1)
    assert sorted(words) == ["a", "b"]


def test_parts_of_a_statistic_carry_its_charge():
    statistics = cl.PrivateStatistics(seed=1)
    town = np.array(["Bern", "Rome", "Oslo"])[OWNERS % 3]
    towns = statistics.vocabulary(OWNERS, town, noise_multiplier=2.0)
    first = towns[:2]
    assert (len(first), first.event, first.users) == (2, towns.event, towns.users[:2])
    made = cl.Population.from_arrays(OWNERS, town=town, categories={"town": first})
    assert made.charges == (towns.event,)
    for released in (
        statistics.moments(PEOPLE, AGES, noise_multiplier=4.0), statistics.ranges(PEOPLE, AGES, noise_multiplier=4.0),
    ):  # fmt: skip
        whole = cl.Population.from_arrays(OWNERS, age=AGE, scale=released)
        for part in ({"age": released["age"]}, dict(released), copy.deepcopy(dict(released))):
            scaled = cl.Population.from_arrays(OWNERS, age=AGE, scale=part)
            assert scaled.charges == (released.event,)
            np.testing.assert_array_equal(scaled.fields["age"], whole.fields["age"])
        assert pickle.loads(pickle.dumps(released["age"])).event == released.event


def test_a_statistic_of_examples_is_for_no_training_of_users_nor_the_other_way_round(tmp_path):
    options = {"privacy": cl.Privacy(noise_multiplier=1.0, delta=1e-5)}
    ones, statistics = cl.Population.one_each(v=V, y=(AGE > 40).astype(np.int64)), cl.PrivateStatistics(seed=1)
    moments = statistics.moments(ones, {"v": (-10, 10)}, noise_multiplier=4.0)
    scaled = cl.Population.open(moments.apply(ones).save(tmp_path / "store"))
    assert scaled.example_level
    words = statistics.vocabulary(None, OWNERS % 3, noise_multiplier=4.0)
    assert "one example" in str(make(scaled, preprocessing=words, **options).planned)
    assert statistics.guarantee(delta=1e-5).example_level
    for wrong in (statistics, words):
        with pytest.raises(SettingError, match="must be user-level, as this training is, and it is example-level"):
            make(PEOPLE, preprocessing=wrong, **options)
    with pytest.raises(SettingError, match="must be user-level"):
        make(cl.Population.from_arrays(OWNERS, v=V, y=AGE > 40, scale=moments), **options)
    statistics.vocabulary(OWNERS, OWNERS % 3, noise_multiplier=4.0)
    with pytest.raises(SettingError, match="must be example-level, as this training is, and it is user-level"):
        make(ones, preprocessing=statistics, **options)
    with pytest.raises(SettingError, match="all of one unit of privacy"):
        statistics.guarantee(delta=1e-5)


def test_with_one_seed_another_question_is_another_release_with_other_noise():
    def released(ask):
        return ask(cl.PrivateStatistics(seed=7)).event

    asks = [
        lambda s: s.moments(PEOPLE, {"age": (0, 1000000)}, noise_multiplier=2.0),
        lambda s: s.moments(PEOPLE, {"age": (0, 1000001)}, noise_multiplier=2.0),  # the same in six digits
        lambda s: s.ranges(PEOPLE, AGES, noise_multiplier=2.0, bins=8),
        lambda s: s.ranges(PEOPLE, AGES, noise_multiplier=2.0, bins=64),
        lambda s: s.ranges(PEOPLE, AGES, noise_multiplier=2.0, bins=64, quantiles=(0.1, 0.9)),
        *(
            lambda s, options=options: s.vocabulary(OWNERS, OWNERS % 3, noise_multiplier=2.0, **options)
            for options in ({}, {"name": "job"}, {"most_per_user": 2}, {"size": 2}, {"candidates": [0, 1]},
                            {"candidates": [0, 2]}, {"threshold_delta": 1.00000001e-8})
        ),
    ]  # fmt: skip
    events = [released(ask) for ask in asks]
    assert len({event.statistic.identity for event in events}) == len(asks)
    assert [released(ask) for ask in asks] == events
    one, other = (
        cl.PrivateStatistics(seed=7).vocabulary(OWNERS, OWNERS % 3, noise_multiplier=2.0, name=name).users
        for name in ("town", "job")
    )
    assert set(one).isdisjoint(other)
