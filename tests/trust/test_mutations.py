"""A check that cannot fail is worth nothing: the code is broken in known ways, and each must be noticed."""

import warnings

import pytest
from trust.mutations import MUTATIONS, PAGE, outcomes


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_seeded_breakage_is_caught(mutation):
    with warnings.catch_warnings(action="ignore"), mutation.applied():
        found = list(outcomes(mutation.caught_by))
    assert [passed for _, passed, _ in found] == [False]
    assert "Error" not in found[0][2], "caught by what it measures, and not by a crash"


def test_breakages_leave_nothing_behind():
    with MUTATIONS[0].applied():
        pass
    with warnings.catch_warnings(action="ignore"):
        ((_, passed, _),) = outcomes(MUTATIONS[0].caught_by)
    assert passed


def test_the_page_has_every_breakage():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "**caught**" in line]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [mutation.name for mutation in MUTATIONS]
