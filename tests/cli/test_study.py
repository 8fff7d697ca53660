import json
import sys

import pytest
from reported_runs import write_run
from study_task import seeds, tiny_task

from clipline.cli import main
from clipline.study.directory import StudyDirectory
from clipline.study.study import Study


@pytest.fixture
def study(tmp_path):
    study = Study(tmp_path / "study", tiny_task())
    study.results(seeds(2))
    return study


def called(monkeypatch, *words):
    """The exit code of `clipline study ...`."""
    monkeypatch.setattr(sys, "argv", ["clipline", "study", *map(str, words)])
    try:
        main()
    except SystemExit as end:
        return end.code
    return 0


def test_status_counts_runs(study, monkeypatch, capsys):
    folder = study.directory.path
    waiting, running, failing = (study.planned(spec).id for spec in seeds(5)[2:])
    study.directory.note_asked([waiting, running, failing])
    study.directory.note_experiment("fig9", {})
    study.directory.note_failure(failing, "seed 4", "Traceback\nValueError: no such luck\n")
    with study.directory.claims() as claims:
        assert claims.take(running)
        assert called(monkeypatch, "status", folder) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{folder}: 2 runs done, 1 running, 1 failed, 1 missing"
        assert lines[-1].split() == f"failed {failing} (seed 4): ValueError: no such luck".split()
        called(monkeypatch, "status", folder, "--json")
    answer = json.loads(capsys.readouterr().out)
    assert answer == {
        "done": 2, "running": 1, "failed": [failing], "missing": 1, "damaged": [], "outcomes": {"finished": 2},
        "experiments": {"fig9": {}},
    }  # fmt: skip


def test_check_ends_with_1_if_anything_is_wrong(study, monkeypatch, capsys):
    folder = study.directory.path
    assert called(monkeypatch, "check", folder) == 0
    assert capsys.readouterr().out == f"{folder}: 2 runs and 0 tables, 0 problems\n"
    path = folder / "runs" / f"{study.directory.ids()[0]}.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"seed": ', '"seed": 1'), encoding="utf-8")
    assert called(monkeypatch, "check", folder) == 1
    assert "was changed after it was written" in capsys.readouterr().err


def test_merge_brings_studies_together(study, monkeypatch, capsys, tmp_path):
    other = Study(tmp_path / "other", tiny_task())
    other.results(seeds(1, quantile=0.9))
    into = tmp_path / "both"
    assert called(monkeypatch, "merge", study.directory.path, other.directory.path, "--into", into) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{into}: 3 runs"
    assert StudyDirectory(into).check() == []
    for one, count in ((other.directory, 5), (StudyDirectory(into), 6)):
        one.note_experiment("fig7-handwriting", {"protocol": {"seeds": count}})
    assert called(monkeypatch, "merge", other.directory.path, "--into", into) == 0
    assert "fig7-handwriting is asked for otherwise there" in capsys.readouterr().out
    damaged = other.directory.path / "runs" / f"{other.directory.ids()[0]}.json"
    damaged.write_text("{", encoding="utf-8")
    assert called(monkeypatch, "merge", other.directory.path, "--into", into) == 1
    assert "is no record of a run" in capsys.readouterr().err
    assert called(monkeypatch, "status", other.directory.path) == 0  # what can be told is told
    assert "damaged: 1 of those done, which clipline study check names" in capsys.readouterr().out
    damaged.unlink()
    damaged.mkdir()
    assert called(monkeypatch, "merge", other.directory.path, study.directory.path, "--into", tmp_path / "new") == 1
    out, err = capsys.readouterr()
    assert "cannot be read (" in err
    assert out.splitlines()[-1] == f"{tmp_path / 'new'}: 2 runs"


def test_a_folder_that_is_no_study_is_refused(tmp_path, monkeypatch, capsys):
    for words in (["status", tmp_path], ["check", tmp_path], ["merge", tmp_path, "--into", tmp_path / "x"]):
        assert called(monkeypatch, *words) == 2
        assert "is no study" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_one_run_is_checked_too(clipline, tmp_path):
    run = write_run(tmp_path / "run", planned=30)
    code, out, err = clipline("study", "check", "run")
    assert (code, err) == (0, "")
    assert out.startswith("run: (epsilon ")
    assert "noise of a round, z               1\n" in out
    assert "  unfinished: 20 of 30 rounds\n" in out
    assert "  note: cohorts and noise come from the seed in settings.toml: keep that file secret\n" in out
    ledger = run / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"noise_multiplier": 1.0', '"noise_multiplier": 9.0'))
    code, out, err = clipline("study", "check", "run")
    assert code == 1
    assert out.startswith("run: No guarantee is on record: claim none.")
    assert "charges a noise multiplier of 9, settings.toml has 1" in err
