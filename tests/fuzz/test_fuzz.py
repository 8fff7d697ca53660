"""A few inputs for every reader, and all that were ever found. `python -m tests.fuzz` goes on for longer."""

import json
import os
import random
import signal
from collections import Counter

import pytest
import torch
from fuzz import fuzzing
from fuzz.fuzzing import Finding, Target, batch, cases, changed_tensors, lay, outcome, signed
from fuzz.targets import targets

from clipline.errors import CliplineError
from clipline.training.durable import save_tensors


@pytest.fixture(scope="module")
def all_targets():
    return targets()


def test_readers_read_or_refuse_whatever_they_are_given(all_targets, tmp_path):
    said, counts = [], Counter()
    for target in all_targets:
        came, found = batch(target, 0, -(-12 // target.slow), tmp_path / "work")
        counts.update(came)
        said += [f"{one.target}: {one.what}" for one in found]
    assert said == []
    assert counts["read"] > 20
    assert counts["refused"] > 50


def test_what_was_found_stays_mended(all_targets, tmp_path):
    for target, file, data in cases(all_targets):
        lay(target, tmp_path / "case", file, data)
        assert outcome(target, tmp_path / "case") in ("read", "refused"), (target.name, file)


def test_good_files_are_read(all_targets, tmp_path):
    for target in all_targets:
        lay(target, tmp_path / "good", "", b"")
        assert outcome(target, tmp_path / "good") == "read", target.name


def told(read):
    return Target("made up", {"a.txt": b"good"}, read)


def crash(folder):
    os.kill(os.getpid(), signal.SIGKILL)


def raising(error):
    def read(folder):
        raise error

    return read


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (raising(ValueError("x")), "ValueError at ?: 'x'"),
        (raising(CliplineError("")), "a refusal of 0 letters"),
        (lambda folder: print("\x1b[31m"), "control character '\\x1b'"),
        (lambda folder: bytearray(8 << 30), "MemoryError"),
        (crash, "the process ended: 9"),
    ],
)
def test_what_should_not_happen_is_found(read, what, tmp_path):
    counts, found = batch(told(read), 0, 1, tmp_path / "work")
    assert counts == {"found": 1}
    assert what in found[0].what


def test_a_finding_is_kept_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzzing, "CASES", tmp_path)
    target = told(raising(ValueError("x")))
    Finding("made up", "ValueError", "a.txt", b"bad").keep()
    assert [*cases([target])] == [(target, "a.txt", b"bad")]


def test_inputs_follow_from_a_seed_and_differ(all_targets):
    for target in all_targets:
        first, again = ([*fuzzing.inputs(target, 5, 10)] for _ in range(2))
        assert first == again
        assert len({data for _, data in first}) > 5


def test_a_damaged_header_gets_a_checksum_that_fits(tmp_path):
    save_tensors({"a": torch.ones(3)}, tmp_path / "a.safetensors", {"card": json.dumps({"x": [1, 2]})})
    data = (tmp_path / "a.safetensors").read_bytes()
    assert signed(data) == data
    other = changed_tensors(random.Random(1), data)
    assert other != data
    assert signed(other) == other
