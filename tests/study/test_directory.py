import json
import shutil

import pytest
from study_task import seeds, tiny_task

from clipline.errors import RunError
from clipline.study.directory import StudyDirectory
from clipline.study.study import Study


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A study of three runs, not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "study"
    study = Study(folder, tiny_task())
    study.directory.note_experiment("fig9", {"scale": "smoke"})
    study.results(seeds(3))
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    return StudyDirectory(tmp_path / "copy")


def test_a_moved_study_is_the_same_study(copied):
    assert [record.settings["seed"] for record in Study(copied, never()).results(seeds(3))] == [0, 1, 2]
    assert copied.experiments == {"fig9": {"scale": "smoke"}}
    assert copied.entries()["asked"] == copied.ids()
    assert copied.check() == []


def never():
    from dataclasses import replace

    def load(settings):
        raise AssertionError("nothing is missing")

    return replace(tiny_task(), load=load)


def test_merging_takes_over_what_is_missing_and_changes_nothing_else(finished, tmp_path):
    here = Study(tmp_path / "here", tiny_task())
    here.results(seeds(1))
    own = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "here" / "runs").iterdir()}
    assert here.directory.merge(StudyDirectory(finished)) == 2
    assert here.directory.merge(StudyDirectory(finished)) == 0
    assert here.directory.ids() == StudyDirectory(finished).ids()
    assert here.directory.experiments == {"fig9": {"scale": "smoke"}}
    assert {name: (tmp_path / "here" / "runs" / name).stat().st_mtime_ns for name in own} == own
    assert len(Study(tmp_path / "here", never()).results(seeds(3))) == 3


def test_merging_names_a_damaged_run_and_takes_the_others(copied, tmp_path):
    bad = copied.ids()[1]
    (copied.path / "runs" / f"{bad}.json").write_text("{", encoding="utf-8")
    here = StudyDirectory(tmp_path / "here")
    with pytest.raises(RunError, match=f"{bad}.json' is no record of a run"):
        here.merge(StudyDirectory(copied.path))
    assert here.ids() == [run for run in copied.ids() if run != bad]


def test_a_changed_number_is_found(copied):
    path = copied.path / "runs" / f"{copied.ids()[0]}.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["rounds"]["accuracy"][-1] = 0.99
    path.write_text(json.dumps(content), encoding="utf-8")
    (problem,) = copied.check()
    assert "was changed after it was written" in problem


def test_a_run_under_the_name_of_another_is_found(copied):
    first, second, _ = copied.ids()
    shutil.copy(copied.path / "runs" / f"{first}.json", copied.path / "runs" / f"{second}.json")
    assert copied.check() == [f"'{copied.path}/runs/{second}.json' holds the run {first}: rename it to {first}.json"]


def test_a_number_without_the_runs_behind_it_is_found(copied):
    good, lost = copied.ids()[0], "0" * 20
    text = f"quantile,accuracy,runs\n0.1,0.5,{good}\n0.5,0.5,{good} {lost}\n0.9,0.5,\n"
    (copied.path / "fig9-tiny.csv").write_text(text, encoding="utf-8")
    (copied.path / "fig1.csv").write_text("clip,loss\n1,2\n", encoding="utf-8")  # made without runs
    assert copied.check() == [
        f"fig9-tiny.csv: line 3 names run {lost}, which has no sound record",
        "fig9-tiny.csv: line 4 names no run",
    ]


def test_a_crash_while_writing_leaves_no_record(copied, monkeypatch):
    record = copied.record(copied.ids()[0])
    (copied.path / "runs" / f"{record.id}.json").unlink()

    def crash(file, path):
        raise KeyboardInterrupt

    fresh = StudyDirectory(copied.path)
    monkeypatch.setattr("clipline.training.durable.sync", crash)
    with pytest.raises(KeyboardInterrupt):
        fresh.add(record)
    monkeypatch.undo()
    assert record.id not in fresh.ids()
    assert len(list((copied.path / "runs").iterdir())) == 3  # the file that was being written counts for nothing
    assert len(StudyDirectory(copied.path).records()) == 2
    assert StudyDirectory(copied.path).check() == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is damaged"),
        ('{"format": 99, "experiments": {}, "asked": []}', "must have format 1"),
        ('{"format": 1, "experiments": {}}', "is damaged"),
    ],
)
def test_a_study_of_another_kind_is_refused(tmp_path, text, says):
    (tmp_path / "study.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunError, match=says):
        StudyDirectory(tmp_path)
