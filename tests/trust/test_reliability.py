"""The script of the page on reliability, at its smallest: what it counts, and that it can count a loss."""

import json
import random

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


def test_damage_is_of_all_kinds(script):
    rng, data = random.Random(0), bytes(range(256)) * 8
    kinds = [script.damage(rng, data) for _ in range(60)]
    assert min(map(len, kinds)) < len(data) == max(map(len, kinds))
    assert any(bytes(512) in one for one in kinds)
    assert any(sum(a != b for a, b in zip(one, data, strict=False)) == 1 and len(one) == len(data) for one in kinds)


def test_the_page_tells_every_count(script, tmp_path, monkeypatch):
    part = {"date": "2026-11-19", "commit": "0123456789"}
    known = {
        "cuts": {"power cuts": 3, "undercharged": 1}, "kills": {"kills": 7}, "corruptions": {"finished: crashed": 2},
        "rounds": {"rounds": 10_000}, "edits": {"PASSED test_an_edit_of_one_file_is_found": 40, "FAILED test_x": 1},
        "fuzz": {"seed": 5, "kinds": 1, "counts": {"rides.csv": {"read": 4, "refused": 5, "found": 1}}},
        "audits": [{
            "noise": "1/4", "claimed": 2.0, "refuted": True, "released updates": [1.0, 3.0], "final model": [0.5, 2.5],
        }],
    }  # fmt: skip
    monkeypatch.setattr(script, "KEPT", tmp_path / "kept.json")
    script.KEPT.write_text(json.dumps({name: {"found": found, **part} for name, found in known.items()}))
    page = script.page()
    for line in (
        "| undercharged | 1 |", "| kills | 7 |", "| finished: crashed | 2 |", "| rounds | 10,000 |", "40 of its 41",
        "| rides.csv | 10 | 4 | 5 | 1 |", "| 1/4 | 2 | 1.00, 3.00 | 0.50, 2.50 | refuted |", "seeded breakages",
    ):  # fmt: skip
        assert line in page
