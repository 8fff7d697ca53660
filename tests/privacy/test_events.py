import pytest

from clipline.errors import SettingError
from clipline.privacy.events import (
    FixedSizeSampling,
    GaussianEvent,
    GroupedPoissonSampling,
    NoSampling,
    PoissonSampling,
    Statistic,
    TruncatedPoissonSampling,
)
from clipline.privacy.noise_split import split_noise

EVENTS = [
    GaussianEvent(NoSampling(), 0.0),
    GaussianEvent(PoissonSampling(0.1), 1.3958),
    GaussianEvent(FixedSizeSampling(100, 3400), 0.513),
    GaussianEvent(GroupedPoissonSampling(0.1, 12, 5), 0.9),
    GaussianEvent(TruncatedPoissonSampling(0.1, 3400, 400), 0.7),
    GaussianEvent(NoSampling(), 20.0, Statistic("vocabulary of city", "0f", 1e-8, True)),
    GaussianEvent(NoSampling(), 20.0, Statistic("vocabulary of city", "0f", 1e-8, True, example_level=True)),
]


def test_samplings_describe_themselves():
    assert str(PoissonSampling(0.01)) == "Poisson sampling at rate 0.01"
    assert str(FixedSizeSampling(100, 10000)) == "fixed-size sampling, 100 of 10000 users"
    assert "every user" in str(NoSampling())
    assert [kind.name for kind in (NoSampling, PoissonSampling, FixedSizeSampling)] == ["none", "poisson", "fixed"]
    assert (NoSampling().rate, PoissonSampling(0.25).rate, FixedSizeSampling(25, 100).rate) == (1, 0.25, 0.25)


def test_an_event_survives_json_which_is_flat():
    assert [GaussianEvent.from_json(event.to_json()) for event in EVENTS] == EVENTS
    assert EVENTS[0].to_json() == {"sampling": "none", "noise_multiplier": 0.0}
    assert EVENTS[1].to_json() == {"sampling": "poisson", "rate": 0.1, "noise_multiplier": 1.3958}
    sizes = {"cohort_size": 100, "population_size": 3400}
    assert EVENTS[2].to_json() == {"sampling": "fixed", **sizes, "noise_multiplier": 0.513}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"sampling": "poison", "rate": 0.1, "noise_multiplier": 1}, "sampling='poison'.*did you mean 'poisson'"),
        (
            {"rate": 0.1, "noise_multiplier": 1},
            "sampling=None must be one of none, poisson, grouped-poisson, truncated-poisson, fixed",
        ),
        ({"sampling": "none", "rate": 0.1, "noise_multiplier": 1}, "unknown key 'rate' in an event with none sampling"),
        ({"sampling": "poisson", "noise_multiplier": 1}, "rate is missing"),
        ({"sampling": "poisson", "rate": "0.1", "noise_multiplier": 1}, "rate='0.1' must be a finite number"),
        ({"sampling": "fixed", "cohort_size": 2.0, "population_size": 9, "noise_multiplier": 1}, "cohort_size=2.0"),
    ],
)
def test_json_that_no_event_wrote_is_refused(entries, message):
    with pytest.raises(SettingError, match=message):
        GaussianEvent.from_json(entries)


@pytest.mark.parametrize("rate", [0, -0.1, 1.01, float("nan"), float("inf"), True, "half"])
def test_a_rate_outside_its_limits_is_refused(rate):
    with pytest.raises(SettingError, match=r"rate=.*above 0 and at most 1.*such as 0.01"):
        PoissonSampling(rate)


def test_a_cohort_that_cannot_be_drawn_is_refused():
    for kind, numbers, name in (
        (FixedSizeSampling, (0, 5), "cohort_size=0"), (FixedSizeSampling, (6, 5), "cohort_size=6"),
        (TruncatedPoissonSampling, (0, 9, 3), "rate=0"), (TruncatedPoissonSampling, (0.5, 9, 0), "cap=0"),
    ):  # fmt: skip
        with pytest.raises(SettingError, match=name):
            kind(*numbers)


@pytest.mark.parametrize("noise_multiplier", [-1, float("inf"), float("nan"), None])
def test_a_noise_multiplier_that_is_not_a_number_from_zero_up_is_refused(noise_multiplier):
    with pytest.raises(SettingError, match=r"noise_multiplier=.*at least 0.*or 0 for no privacy"):
        GaussianEvent(NoSampling(), noise_multiplier)


def test_a_sampling_given_by_name_is_refused_with_those_that_exist():
    with pytest.raises(SettingError, match=r"sampling='poisson'.*PoissonSampling\(rate\)"):
        GaussianEvent("poisson", 1.0)


def test_pitfall_the_accountant_cannot_be_handed_the_noise_of_the_updates_alone():
    with pytest.raises(SettingError, match=r"DeltaNoise.*must be that of the whole round.*join_noise"):
        GaussianEvent(NoSampling(), split_noise(1.0, 5.0))


@pytest.mark.parametrize(
    "odd",
    [
        None, [], "x", {"name": "x"}, {"name": "", "identity": "y"}, {"name": "\x1b[31m", "identity": "y"},
        {"name": "x" * 1000, "identity": "y"}, {"name": "x", "identity": 3}, {"name": "x", "identity": "y", "more": 1},
        {"name": "x", "identity": "y", "threshold_delta": -1}, {"name": "x", "identity": "y", "threshold_delta": 0.5},
        {"name": "x", "identity": "y", "from_seed": 1},
    ],
)  # fmt: skip
def test_a_statistic_that_cannot_have_been_released_is_refused(odd):
    with pytest.raises(SettingError, match=r"statistic|threshold_delta|from_seed"):
        GaussianEvent.from_json({"sampling": "none", "noise_multiplier": 1.0, "statistic": odd})
