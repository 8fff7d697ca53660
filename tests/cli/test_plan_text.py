"""Plans, tables and remedies in words: complete, and no number printed below the computed one."""

import dataclasses
import math
import re

import pytest

from clipline.cli.plan_text import noise_rows, plan_text, remedy_rows, table_text
from clipline.privacy import NoiseTable, Relation
from clipline.privacy.feasibility import NoiseCell, Remedies
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
    for words in ("-DP for add-or-remove one user", "10,000", "replace-one", "zero-out", "300 rounds"):
        assert words in text
    assert "below Renyi's" in text


def row(text, name):
    (line,) = [line for line in text.splitlines() if line[2:20].strip() == name]
    return line


def test_what_was_asked_for_is_marked(known):
    for asked, marked in (("epsilon", []), ("rounds", ["rounds"]), ("scale", ["cohort size", "noise multiplier"])):
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


def test_an_epsilon_of_the_comparison_is_rounded_up(known):
    printed = re.findall(
        r"\d+\.\d+", "".join(line for line in str(known).splitlines() if line[4:].startswith(("poisson ", "fixed ")))
    )
    epsilons = [epsilon for _, _, epsilon in known.comparison]
    assert len(printed) == len(epsilons) == 6
    for text, epsilon in zip(printed, epsilons, strict=True):
        assert epsilon <= float(text) <= epsilon * 1.001


CELLS = (
    NoiseCell(100, 50, 0.5001, 0.6),
    NoiseCell(100, 150, 0.8, 0.9),
    NoiseCell(1000, 50, 1.2, 1.5),
    NoiseCell(1000, 150, 2.0, 2.5),
)


def made(parameters=None, relation=Relation.ADD_OR_REMOVE):
    return NoiseTable(20_000, 3.0, 1e-5, relation, "poisson", CELLS, parameters)


def rows(text, heading):
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if heading in line)
    return [line.split() for line in lines[start + 2 : start + 4]]


def test_noise_stands_by_cohort_and_rounds_and_is_rounded_up():
    text = table_text(made())
    assert rows(text, "noise multiplier") == [["100", "0.501", "0.800"], ["1,000", "1.20", "2.00"]]
    # By hand: (100 / 0.6)^2 = 27,777; (100 / 0.9)^2 = 12,345; (1000 / 1.5)^2 = 444,444; (1000 / 2.5)^2 = 160,000.
    assert rows(text, "most parameters") == [["100", "27k", "12k"], ["1,000", "444k", "160k"]]
    assert "50 rounds   150 rounds" in text


def test_noise_on_a_model_is_marked_by_its_verdict():
    # By hand, sqrt(40,000) = 200: 0.6 / 100 * 200 = 1.2, 1.8, 0.3, 0.5; with 200,000 (447.2): 2.69, 4.03, 0.671, 1.12.
    assert rows(table_text(made(40_000)), "noise on the mean") == [["100", "1.2?", "1.8?"], ["1,000", "0.30", "0.50"]]
    text = table_text(made(200_000))
    assert rows(text, "noise on the mean") == [["100", "2.7x", "4.1x"], ["1,000", "0.68", "1.2?"]]
    assert "50 rounds: 1,000 users a round" in text
    assert "150 rounds: " not in text
    assert rows(table_text(made(400)), "noise on the mean")[0] == ["100", "0.12+", "0.18+"]


def test_a_table_without_hope_says_so_of_its_best():
    text = table_text(made(10_000_000))
    assert "none is feasible. The least noise, 1,000 users a round for 50 rounds" in text
    assert "hopeless: the noise is 4.8 times the longest possible mean update" in text  # 0.0015 * 3162.3 = 4.74


def test_explanations_are_extra_lines():
    plain, explained = table_text(made(40_000)).splitlines(), table_text(made(40_000), explain=True).splitlines()
    assert [line for line in explained if not line.startswith(" " * 22)] == plain
    assert sum("takes part with chance 0.005" in line for line in explained) == 2  # 100 of 20,000, in both blocks
    assert str(made()) == table_text(made())


FOUND = Remedies(1.0, 12_341, (1_234_567, 30_001), 98_765, None, 7.123)


def test_remedies_are_rounded_to_the_side_that_works():
    said = remedy_rows(FOUND, 20_000, 1000)
    assert said["larger cohort"] == "of 12,400 of the same 20,000 users: 12.4 times the work"
    assert said["more users"] == "1,240,000, with 30,100 a round"
    assert said["fewer parameters"] == "at most 98,700 trained"
    assert said["weaker promise"] == "epsilon 7.13"


def test_what_does_not_help_is_said_not_to():
    said = remedy_rows(Remedies(1.0, None, None, 0, None, math.inf), 20_000, 1000)
    assert said["larger cohort"] == "none is enough: not even all 20,000 users in every round"
    assert said["more users"] == said["fewer parameters"] == "no number is enough"
    assert said["weaker promise"].endswith("promises little")


def test_noise_is_told_against_the_longest_and_against_a_typical_update():
    # By hand, 1 / 0.02 = 50 users: sqrt(0.02 + 0.98 / 50) = 0.19900; 0.398 / 0.199 = 2.0.
    said = noise_rows(0.3979, 1000, 50)
    assert said["can it train?"].startswith("feasible: the noise is 0.40 times the longest possible mean update")
    assert "the noise is 2.0 times a mean update of 0.2 clips" in said["typical update"]
    assert "cosine of 0.02" in said["typical update"]
