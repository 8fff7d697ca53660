import json

import pytest

from clipline.errors import RunError, SettingError
from clipline.privacy.events import FixedSizeSampling, GaussianEvent, NoSampling, PoissonSampling, Statistic
from clipline.privacy.ledger import Ledger, ledger_line

A = GaussianEvent(PoissonSampling(0.1), 1.0)
B = GaussianEvent(FixedSizeSampling(10, 100), 0.7)
C = GaussianEvent(NoSampling(), 0.0)


def test_equal_rounds_in_a_row_are_stored_once():
    ledger = Ledger().add(A, 1000).add(A).add(B).add(A, 2)
    assert ledger.entries == ((A, 1001), (B, 1), (A, 2))
    assert list(ledger.add(C)) == [*ledger, C]
    assert ledger.add(A, 0) == ledger  # which stays as it was
    assert ledger.events == {A: 1003, B: 1}
    assert ledger.rounds == 1004


@pytest.mark.parametrize("count", [-1, 1.0, True])
def test_a_number_of_rounds_that_is_not_one_is_refused(count):
    with pytest.raises(SettingError, match="count="):
        Ledger().add(A, count)


def write(tmp_path, *lines):
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_a_ledger_survives_its_file(tmp_path):
    ledger = Ledger().add(A, 3).add(B).add(C, 2).add(A)
    path = write(tmp_path, *(ledger_line(index, event) for index, event in enumerate(ledger)))
    assert Ledger.read(path) == ledger
    assert Ledger.read(write(tmp_path)) == Ledger()  # an empty file


def test_a_line_is_flat_json_with_version_and_round():
    entries = {"version": 1, "round": 4, "sampling": "poisson", "rate": 0.1, "noise_multiplier": 1.0}
    assert json.loads(ledger_line(4, A)) == entries


def changed(**entries):
    return json.dumps({**json.loads(ledger_line(1, A)), **entries})


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (ledger_line(1, A)[:20], "not a line of JSON"),
        ("", "not a line of JSON"),
        ("[1]", "must be a JSON object"),
        (changed(version=2), "version=2 must be 1"),
        (changed(round=0), "round=0 must be 1"),
        (changed(round=2), "round=2 must be 1, rounds count from 0 without a gap: restore"),
        (changed(clip=1.0), "unknown key 'clip'"),
        (changed(noise_multiplier=-1), "noise_multiplier=-1 must be"),
    ],
)
def test_a_broken_line_is_refused_with_its_file_and_number(tmp_path, second, message):
    path = write(tmp_path, ledger_line(0, A), second)
    with pytest.raises(RunError, match=f"ledger.jsonl, line 2: .*{message}"):
        Ledger.read(path)


def test_statistics_are_lines_of_their_own_and_no_rounds(tmp_path):
    ages, words = (GaussianEvent(NoSampling(), 20.0, Statistic(name, name)) for name in ("ages", "words"))
    ledger = Ledger().with_statistics([ages, words, ages]).with_statistics([words]).add(A, 3)
    assert list(ledger) == [ages, words, A, A, A]  # each once, however often it is handed in
    assert (ledger.rounds, ledger.releases) == (3, 5)
    path = write(tmp_path, *(ledger_line(index, event) for index, event in enumerate(ledger)))
    assert Ledger.read(path) == ledger
    with pytest.raises(RunError, match="rounds count from 0 without a gap"):  # a statistic that was cut out
        Ledger.read(write(tmp_path, *path.read_text().splitlines()[1:]))
    twice = GaussianEvent(NoSampling(), 2.0, Statistic("other", "ages"))
    with pytest.raises(SettingError, match="told apart from another statistic"):
        ledger.with_statistics([twice])
    with pytest.raises(SettingError, match="must be private statistics"):
        ledger.with_statistics([A])
