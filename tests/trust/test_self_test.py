import json
import warnings

import numpy as np
import pytest
from click.testing import CliRunner

from clipline.cli.selftest import command
from clipline.trust import self_test as module
from clipline.trust.self_test import Checked, checks, self_test

OWN = """
import torch


class wide:
    def model():
        return torch.nn.Linear(2, 1)

    def loss(model, batch):
        return (model(torch.stack([batch["km"], batch["age"]], 1)).squeeze(1) - batch["fare"]).square()


class coupled:
    def model():
        return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))

    loss = wide.loss
"""


def test_sound_code_passes_all_checks_on_this_machine():
    heard = []
    found = self_test(tell=heard.append)
    assert [(one.name, one.measured) for one in found if one.passed is False] == []
    assert heard == found
    assert sum(one.by_chance for one in found) < 1e-6


def test_one_line_a_check_and_an_exit_code(monkeypatch):
    two = [("good", lambda folder: (True, "1 of 1")), ("bad", lambda folder: (False, "0 of 1", 1e-7))]
    monkeypatch.setattr(module, "checks", lambda own, thorough: iter(two))
    said = CliRunner().invoke(command, standalone_mode=False)
    assert said.return_value == 1
    assert said.output.splitlines()[:2] == ["pass  good: 1 of 1", "FAIL  bad: 0 of 1"]
    assert "1 FAILED" in said.output
    answer = json.loads(CliRunner().invoke(command, ["--json"], standalone_mode=False).output)
    assert answer["passed"] is False
    assert [one["by_chance"] for one in answer["checks"]] == [0.0, 1e-7]


def test_a_check_that_raises_has_failed(monkeypatch):
    def raising(folder):
        raise ZeroDivisionError("no users")

    monkeypatch.setattr(module, "checks", lambda own, thorough: iter([("odd", raising)]))
    assert self_test() == [Checked("odd", False, "ZeroDivisionError: no users")]


@pytest.mark.parametrize("name", ["wide", "coupled"])
def test_ones_own_model_is_checked_too(tmp_path, name):
    from clipline.cli.selftest import subject_of_file

    (tmp_path / "rides.py").write_text(OWN, encoding="utf-8")
    rows = np.random.default_rng(0).normal(size=(40, 3)).round(3)
    lines = [f"{number % 20},{km},{age},{fare}" for number, (km, age, fare) in enumerate(rows)]
    (tmp_path / "rides.csv").write_text("rider,km,age,fare\n" + "\n".join(lines), encoding="utf-8")
    given = {"data": str(tmp_path / "rides.csv"), "user_column": "rider"}
    own = subject_of_file(f"{tmp_path / 'rides.py'}:{name}", given)
    found = {name: run for name, run in checks(own) if name.startswith("own model")}
    assert len(found) >= 3
    for number, (check, run) in enumerate(found.items()):
        (place := tmp_path / f"{number}").mkdir()
        with warnings.catch_warnings(action="ignore"):
            passed, measured, *_ = run(place)
        assert passed, (check, measured)
        assert "1.000" in measured or "differ" in measured
