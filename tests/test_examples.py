"""One example a job: each runs as it stands, is short, learns more than its baseline, and prints its guarantee.

Data are made with seed 0 and models start from torch's seed 0; cohorts and noise come from the system, as in the
examples. In 20 runs of each, errors were 3.8 to 4.4 minutes and 0.30 to 0.31 stars, and the accuracy 0.91 to 0.93:
the limits are several times these spreads away.
"""

import re
import runpy

import pytest
import torch
from samples import ROOT

EXAMPLES = ROOT / "examples"
# What the private model must reach, under that name in the file, and what its baseline has.
JOBS = {
    "table_regression": ("error", 6.0, "always", 20.0),
    "recommender": ("error", 0.45, "own_mean", 0.9),
}


def run(name, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        scope = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    out = capsys.readouterr().out
    assert re.search(r"^\(epsilon 4\.00, delta .*\)-DP for add-or-remove one user", out, re.MULTILINE)
    assert "seed" not in out.splitlines()[-1]  # the noise is from the system
    return scope, out


@pytest.mark.parametrize("name", JOBS)
def test_the_private_model_is_far_better_than_the_baseline_beside_it(name, monkeypatch, tmp_path, capsys):
    metric, reached, baseline, at_least = JOBS[name]
    scope, _ = run(name, monkeypatch, tmp_path, capsys)
    assert scope[metric] < reached
    assert scope[baseline] > at_least
    assert scope["saved"].guarantee.epsilon <= 4.0


def test_text_is_told_apart_far_above_guessing(monkeypatch, tmp_path, capsys):
    scope, out = run("text_classification", monkeypatch, tmp_path, capsys)
    assert scope["result"].metrics["accuracy"] > 0.85  # guessing: a third
    assert "on trains: travel" in out


@pytest.mark.parametrize("name", ["table_regression", "text_classification", "recommender"])
def test_an_example_is_short_and_has_cells(name):
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    assert len(re.findall(r"^# %% ", text, re.MULTILINE)) >= 4
    assert f"examples/{name}.py" in (ROOT / "docs" / "start" / "examples.md").read_text(encoding="utf-8")
