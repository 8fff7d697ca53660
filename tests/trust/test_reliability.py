"""The script of the page on reliability, at its smallest: what it counts, and that it can count a loss."""

import pytest
from samples import ROOT, load_script


@pytest.fixture(scope="module")
def script():
    return load_script(ROOT / "benchmarks" / "reliability.py")


def test_a_killed_run_ends_equal_to_the_bit_and_a_release_without_its_line_in_the_ledger_counts(
    script, tmp_path, monkeypatch
):
    monkeypatch.setattr(script, "ROUNDS", 6)
    found = script.kills(1, 3, tmp_path)
    assert (found["kills"], found["ended equal to the bit"]) == (1, 1)
    assert "undercharged" not in found
    monkeypatch.setattr(script, "charged", lambda path: 0)
    assert script.kills(1, 3, tmp_path)["undercharged"] > 0
