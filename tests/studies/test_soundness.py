"""The study of soundness: the script measures and writes its page, and its tools see what they should see."""

import json
import os
import subprocess
import sys
import warnings

import pytest
from samples import ROOT

SCRIPTS = ROOT / "studies" / "soundness"


@pytest.fixture(scope="module")
def study():
    """The script that runs the study; its modules are forgotten afterwards."""
    before = dict(sys.modules)
    sys.path.insert(0, str(SCRIPTS))
    try:
        with warnings.catch_warnings(action="ignore"):  # it scripts a function, which is an attack
            import run

        yield run
    finally:
        sys.path.remove(str(SCRIPTS))
        for name in sys.modules.keys() - before.keys():
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(SCRIPTS)):
                del sys.modules[name]


@pytest.fixture
def run(study, monkeypatch, capsys):
    """Run the script with these arguments; gives its exit code and its standard error."""

    def script(*arguments):
        monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
        try:
            code = study.main()
        except SystemExit as stop:
            code = stop.code
        return code, capsys.readouterr().err

    return script


def test_two_attacks_are_measured_and_say_on_which_commit(tmp_path):
    command = [sys.executable, str(SCRIPTS / "run.py"), "--only", "12,13", "--json", str(tmp_path / "figures.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "figures.json").read_text())
    assert record["commit"]
    assert set(record["figures"]) == {"12", "13"}
    for figure in record["figures"]["12"].values():
        assert figure in range(1, 21) or figure.startswith("refused: ")
    assert record["figures"]["13"]["falling"].startswith(("trains", "refused: "))


def test_the_page_sets_the_figures_of_two_commits_side_by_side(run, tmp_path):
    before = {"commit": "aaa", "versions": {"torch": "2.0"}, "seconds": 7, "figures": {"12": {"fixed": 1}}}
    figures = {"12": {"fixed": "refused: clip=5e-324 | <small>"}, "2a": {"stacked": 0.99999999, "workers": 1.00000002}}
    after = {"commit": "bbb", "date": "2026-11-16", "versions": {"torch": "2.1"}, "seconds": 8, "figures": figures}
    for name, record in (("before.json", before), ("after.json", after)):
        (tmp_path / name).write_text(json.dumps(record))
    code, said = run("--table", tmp_path / "before.json", tmp_path / "after.json", "--out", tmp_path / "page.md")
    assert code == 0, said
    lines = (tmp_path / "page.md").read_text().splitlines()
    head = "| different releases of 20, FixedClip(5e-324) | "
    assert head + r"1 | refused: clip=5e-324 \| &lt;small> | 20 |" in lines
    assert "| user removed, clips | not measured | 1 | at most 1 |" in lines
    assert "| the same by two workers, clips | not measured | 1 + 2e-08 | at most 1 |" in lines
    assert any("commit aaa, torch 2.0, 7 s" in line for line in lines)
    assert any("commit bbb, 2026-11-16, torch 2.1, 8 s" in line for line in lines)
    assert sum(line.startswith("## ") for line in lines) == 18
    assert lines.count("| what | before | after | the promise |") == 18


def test_the_stored_figures_of_before_have_every_row():
    record = json.loads((SCRIPTS / "before.json").read_text())
    assert len(record["figures"]) == 18
    assert not any("the attack failed" in str(value) for row in record["figures"].values() for value in row.values())
    assert record["figures"]["1"]["worst"] == pytest.approx(82)  # 41 users, each from one side to the other
    # 63 users who stay, each from -1/2 to 1/2 or back, and the half of the one who leaves.
    assert record["figures"]["15"] == {"one by one": 63.5, "stacked": 63.5}
    # 15 users who follow the last whole register of 16 numbers, and the half of the one who leaves.
    assert record["figures"]["16"]["adam"] == 15.5
