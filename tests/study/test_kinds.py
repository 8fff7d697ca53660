import json

from clipline.study import StudyDirectory


def test_experiments_of_no_installed_package_are_named_when_a_study_is_checked(clipline, tmp_path):
    StudyDirectory(tmp_path / "s").note_experiment("wheel-rides", {"kind": "invented"})
    StudyDirectory(tmp_path / "s").note_experiment("tune", {"task": "rides"})  # of clipline's own, without a kind
    out, _ = clipline.ok("study", "check", "s")
    assert out.splitlines()[1:] == ["  of no installed package, so that only their runs were checked: wheel-rides"]
    assert json.loads((tmp_path / "s" / "study.json").read_text())["experiments"]["wheel-rides"]["kind"] == "invented"
