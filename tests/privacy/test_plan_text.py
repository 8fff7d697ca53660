"""A plan in words: complete, one screen, and no number printed below the computed one."""

import dataclasses
import re

import pytest

from clipline.privacy.plan_text import plan_text, text_curve
from clipline.privacy.planning import plan

KNOWN = {"population_size": 10_000, "cohort_size": 100, "rounds": 300, "noise_multiplier": 0.9}


@pytest.fixture(scope="module")
def known():
    return plan(**KNOWN)


def test_one_screen_says_everything(known):
    text = str(known)
    assert text == plan_text(known)
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 120
    for words in (
        "-DP for add-or-remove one user",
        "10,000",
        "give or take 9.95",
        "replace-one",
        "zero-out",
        "300 rounds",
    ):
        assert words in text
    assert "below Renyi's" in text


def row(text, name):
    (line,) = [line for line in text.splitlines() if line[2:20].strip() == name]
    return line


@pytest.mark.parametrize(
    ("asked", "marked"),
    [
        ("epsilon", []),  # stands in the first line
        ("noise_multiplier", ["noise multiplier"]),
        ("cohort_size", ["cohort size"]),
        ("rounds", ["rounds"]),
        ("scale", ["cohort size", "noise multiplier"]),
    ],
)
def test_what_was_asked_for_is_marked(known, asked, marked):
    lines = str(dataclasses.replace(known, found=asked)).splitlines()
    assert [line[2:20].strip() for line in lines if line.startswith("> ")] == marked


def test_the_numbers_of_a_row_are_those_of_the_settings(known):
    # By hand: 100 of 10,000 is a rate of 0.01, 3 rounds a user; sqrt(100 * 0.99) = 9.95; z_delta from Theorem 1 at
    # count_stddev 5 is 0.9 / sqrt(1 - 0.09^2) = 0.9036673.
    text = str(known)
    assert "100 expected, give or take 9.95 (one standard deviation), each user with chance 0.01" in row(
        text, "cohort size"
    )
    assert "a user takes part 3 times on average" in row(text, "rounds")
    assert "updates get 0.903668 (+0.41%), the count 5 users of noise" in row(text, "adaptive clip")
    assert "0.9037 clips a coordinate on the sum, 0.00904 clips on the mean update" in row(text, "noise")


def test_a_fixed_size_is_exact_and_needs_no_declared_number_of_users(known):
    assert "declared beforehand" in row(str(known), "population size")
    fixed = str(plan(**KNOWN, sampling="fixed"))
    assert "100 exactly" in row(fixed, "cohort size")
    assert "declared" not in row(fixed, "population size")


def test_an_epsilon_of_the_comparison_is_rounded_up(known):
    printed = re.findall(
        r"\d+\.\d+", "".join(line for line in str(known).splitlines() if line[4:].startswith(("poisson ", "fixed ")))
    )
    epsilons = [epsilon for _, _, epsilon in known.comparison]
    assert len(printed) == len(epsilons) == 6
    for text, epsilon in zip(printed, epsilons, strict=True):
        assert epsilon <= float(text) <= epsilon * 1.001


def test_the_tighter_accountant_is_named_with_what_the_other_says(known):
    line = row(str(known), "accountant")
    assert "privacy loss" in line
    assert "below Renyi's" in line
    by_renyi = dataclasses.replace(known, guarantee=dataclasses.replace(known.guarantee, accountant="renyi", order=3.0))
    assert row(str(by_renyi), "accountant").endswith("renyi, tighter here than the privacy loss")


def test_the_picture_of_the_curve_ends_full_and_is_labelled_at_both_ends(known):
    picture = text_curve(known.curve)
    assert picture[0].endswith("█")
    assert picture[-1].endswith("300 rounds")
    assert picture[-1].split("+")[1].startswith(f"{known.curve[0][0]}-")


def test_bars_are_as_high_as_their_numbers():
    # Heights 1, 2 and 4 of 4, in a picture of 4 lines: each bar fills that many lines.
    picture = text_curve(((1, 0.5), (2, 1.0), (4, 2.0)), height=4)
    bars = [line.split("|")[1] for line in picture[:-1]]
    assert [bar[0::5] for bar in bars] == ["  █", "  █", " ██", "███"]
    assert text_curve(((1, 0.25), (2, 1.0)), height=1)[0].split("|")[1] == "▂▂▂▂▂█████"  # a quarter is two eighths


def test_no_points_are_said_to_be_none():
    assert text_curve(()) == ["    none: not private"]
