"""A table in words: every number where it belongs, noise never printed below itself."""

import pytest

from clipline.privacy import NoiseTable, Relation
from clipline.privacy.feasibility.noise_table import NoiseCell
from clipline.privacy.feasibility.table_text import table_text

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
    assert made().explained() == table_text(made(), explain=True)


def test_the_papers_convention_comes_with_a_warning():
    assert table_text(made(relation=Relation.PAPER)).startswith("WARNING, not a guarantee")


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999"), (1_000, "1.0k"), (1_299_999, "1.2M"), (27_777, "27k"), (3 * 10**9, "3.0G")]
)
def test_numbers_of_parameters_are_short_and_rounded_down(number, text):
    noise = 1000 / (number + 0.5) ** 0.5
    table = NoiseTable(9_000, 3.0, 1e-5, Relation.ADD_OR_REMOVE, "poisson", (NoiseCell(1000, 5, noise, noise),))
    assert rows(table_text(table), "most parameters")[0] == ["1,000", text]
