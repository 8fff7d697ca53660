"""The study of soundness: the script measures, and the figures stored before have every row."""

import json
import os
import subprocess
import sys

import pytest
from samples import ROOT

SCRIPTS = ROOT / "studies" / "soundness"


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


def test_the_stored_figures_of_before_have_every_row():
    record = json.loads((SCRIPTS / "before.json").read_text())
    assert len(record["figures"]) == 18
    assert not any("the attack failed" in str(value) for row in record["figures"].values() for value in row.values())
    assert record["figures"]["1"]["worst"] == pytest.approx(82)  # 41 users, each from one side to the other
    # 63 users who stay, each from -1/2 to 1/2 or back, and the half of the one who leaves.
    assert record["figures"]["15"] == {"one by one": 63.5, "stacked": 63.5}
    # 15 users who follow the last whole register of 16 numbers, and the half of the one who leaves.
    assert record["figures"]["16"]["adam"] == 15.5
