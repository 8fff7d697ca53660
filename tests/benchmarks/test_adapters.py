"""The table of rounds with adapters, from systems that only say what they are told."""

from argparse import Namespace

import pytest
from samples import ROOT

SYSTEM = """
import json, os
print(json.dumps({{"ready": "9M parameters"}}), flush=True)
for end in {ends}:
    print(json.dumps({{"round": end, "peak_memory_bytes": 3 * 2**29}}), flush=True)
{then}
"""


@pytest.fixture
def adapters(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import adapters

    (tmp_path / "lora").mkdir()
    monkeypatch.setattr(adapters, "BENCHMARKS", tmp_path)
    return adapters


def row(adapters, ends, then=""):
    text = SYSTEM.format(ends=ends, then=then)
    (adapters.BENCHMARKS / "lora" / "loop_rounds.py").write_text(text, encoding="utf-8")
    return adapters.measure("loop", Namespace(gpu="tiny", device="cpu", rounds=7, peer_rounds=4, timeout=30.0))


def test_a_row_has_the_first_round_and_the_median_of_the_others(adapters):
    assert row(adapters, [5.0, 7.0, 8.0, 12.0]) == "| loop | 5.0 | 2 (1 to 4) | 1.5 GiB | 9M parameters |"


def test_rounds_before_the_time_is_up_count_and_the_row_says_so(adapters):
    ended = row(adapters, [5.0, 7.0], "os.kill(os.getpid(), 9)")  # as the timer does
    assert ended == "| loop | 5.0 | 2 (2 to 2) | 1.5 GiB | 9M parameters (ended after 2 of 4 rounds) |"


def test_a_system_that_fails_before_its_first_round_gives_its_last_words(adapters):
    assert row(adapters, [], "raise SystemExit('no pfl here')") == "| loop | - | - | - | 9M parameters (no pfl here) |"
