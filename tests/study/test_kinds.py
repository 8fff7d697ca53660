import json

from clipline.study import StudyDirectory
from clipline.study.directory import experiment_kinds


def test_the_papers_experiments_are_a_kind():
    assert list(experiment_kinds()) == ["paper"]


def test_experiments_of_no_installed_package_are_named_when_a_study_is_checked(clipline, tmp_path):
    StudyDirectory(tmp_path / "s").note_experiment("wheel-rides", {"kind": "invented"})
    StudyDirectory(tmp_path / "s").note_experiment("tune", {"task": "rides"})  # of clipline's own, without a kind
    code, out, _ = clipline("study", "check", "s")
    assert code == 0
    assert out.splitlines()[1:] == ["  of no installed package, so that only their runs were checked: wheel-rides"]
    assert json.loads((tmp_path / "s" / "study.json").read_text())["experiments"]["wheel-rides"]["kind"] == "invented"
