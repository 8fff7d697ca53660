"""`tests/versions.sh`, as far as it can be tried without making an environment, which takes minutes."""

import subprocess
import sys

import pytest
from package_files import files_in
from samples import ROOT, SOURCE


@pytest.mark.parametrize("arguments", [[], ["latest"]])
def test_an_unknown_word_is_answered_by_the_usage(arguments):
    run = subprocess.run([ROOT / "tests" / "versions.sh", *arguments], capture_output=True, text=True)
    assert run.returncode == 2
    assert "tests/versions.sh lowest|newest|wheel|sdist [arguments of pytest]" in run.stderr


def test_a_file_that_a_packager_missed_is_seen(tmp_path):
    here = files_in(SOURCE)
    assert {"py.typed", "study/report/assets/page.html"} <= here
    assert not [file for file in here if file.endswith(".pyc")]
    (tmp_path / "clipline").mkdir()
    (tmp_path / "clipline" / "new.css").write_text("")
    script = [sys.executable, ROOT / "tests" / "package_files.py", tmp_path / "clipline"]
    run = subprocess.run(script, capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE.parent)})
    assert run.returncode == 1
    assert "missing in the package: ['new.css']" in run.stderr
