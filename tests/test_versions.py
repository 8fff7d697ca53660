"""Pins, their hashes and `tests/versions.sh`, as far as can be tried without an environment; and pages on safety."""

import re
import subprocess
import sys

from package_files import files_in
from samples import ROOT, SOURCE

from clipline.trust import self_test


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


def test_every_pin_has_a_hash():
    pins = re.findall(r"^[\w.-]+==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    hashed = (ROOT / "constraints-hashes.txt").read_text()
    assert re.findall(r"^([\w.-]+==\S+) \\\n    --hash=sha256:[0-9a-f]{64}", hashed, re.MULTILINE) == pins
    assert len(pins) > 50


def test_every_check_that_the_page_of_pitfalls_names_exists():
    page = (ROOT / "docs" / "explanation" / "pitfalls.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"`(test_\w+)`", page)
    assert len(names) > 20
    assert [name for name in names if f"def {name}(" not in tests] == []
    checks = [name for name, _ in self_test.checks()]
    noticed = re.findall(r"\*Noticed by\*([^.]*)", " ".join(page.split()))
    named = [name for by in noticed for name in re.findall(r'"([^"]+)"', by)]
    assert len(named) > 10
    assert [name for name in named if not any(check.startswith(name) for check in checks)] == []
