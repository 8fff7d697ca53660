"""Remedies in words: rounded to the safe side, and honest where there is none."""

import math

from clipline.privacy.feasibility.remedies import Adapters, Remedies
from clipline.privacy.feasibility.remedy_text import noise_rows, remedy_rows, row_lines

FOUND = Remedies(1.0, 12_341, (1_234_567, 30_001), 98_765, None, 7.123)


def texts(rows):
    return {name: text for name, text, _ in rows}


def test_remedies_are_rounded_to_the_side_that_works():
    said = texts(remedy_rows(FOUND, 20_000, 1000))
    assert said["larger cohort"] == "of 12,400 of the same 20,000 users: 12.4 times the work"
    assert said["more users"] == "1,240,000, with 30,100 a round"
    assert said["fewer parameters"] == "at most 98,700 trained"
    assert said["weaker promise"] == "epsilon 7.13"


def test_what_does_not_help_is_said_not_to():
    said = texts(remedy_rows(Remedies(1.0, None, None, 0, None, math.inf), 20_000, 1000))
    assert said["larger cohort"] == "none is enough: not even all 20,000 users in every round"
    assert said["more users"] == said["fewer parameters"] == "no number is enough"
    assert said["weaker promise"].endswith("promises little")


def test_adapters_are_named_where_the_matrices_are_known():
    adapters = Remedies(1.0, None, (1, 1), 9, Adapters(4, 24, 12_000), 1.0)
    assert texts(remedy_rows(adapters, 9, 3))["adapters"] == (
        "of rank 4 on its 24 matrices, the rest frozen: 12,000 trained"
    )


def test_noise_is_told_against_the_longest_and_against_a_typical_update():
    # By hand, 1 / 0.02 = 50 users: sqrt(0.02 + 0.98 / 50) = 0.19900; 0.398 / 0.199 = 2.0.
    said = texts(noise_rows(0.3979, 1000, 50))
    assert said["can it train?"].startswith("feasible: the noise is 0.40 times the longest possible mean update")
    assert "the noise is 2.0 times a mean update of 0.2 clips" in said["typical update"]
    assert "cosine of 0.02" in said["typical update"]


def test_lines_mark_what_was_found_and_explain_if_asked():
    rows = [("a", "text", "why"), ("b", "more", "how")]
    assert row_lines(rows, explain=False, found=("b",)) == ["  a" + " " * 17 + "text", "> b" + " " * 17 + "more"]
    assert [line.strip() for line in row_lines(rows, explain=True)][1::2] == ["why", "how"]


def test_a_lower_server_rate_is_advised_where_noise_is_not_small():
    assert "server rate" not in texts(noise_rows(0.2, 1000, 50))
    assert texts(noise_rows(0.21, 1000, 50))["server rate"].startswith("may have to be lower")
