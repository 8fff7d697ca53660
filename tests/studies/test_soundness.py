"""The study of soundness: the script measures and writes its page, and its tools see what they should see."""

import json
import math
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
from samples import ROOT

SCRIPTS = ROOT / "studies" / "soundness"


@pytest.fixture(scope="module")
def study():
    """The modules of the study by name, forgotten afterwards."""
    before = dict(sys.modules)
    sys.path.insert(0, str(SCRIPTS))
    try:
        with warnings.catch_warnings(action="ignore"):  # it scripts a function, which is an attack
            import run

        yield {**{part.__name__: part for part in run.PARTS}, "run": run, "attack": sys.modules["attack"]}
    finally:
        sys.path.remove(str(SCRIPTS))
        for name in sys.modules.keys() - before.keys():
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(SCRIPTS)):
                del sys.modules[name]


@pytest.fixture
def tools(study):
    """The modules with the arithmetic of the attacks."""
    return study["attack"], study["arithmetic"], study["relation"]


@pytest.fixture
def run(study, monkeypatch, capsys):
    """Run the script with these arguments; gives its exit code and its standard error."""

    def script(*arguments):
        monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
        try:
            code = study["run"].main()
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


def test_rows_that_do_not_exist_are_refused_with_those_that_do(run, tmp_path):
    code, said = run("--only", "12,99", "--json", tmp_path / "figures.json")
    assert code == 2
    assert "the rows are 1, 2a, 2b, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15" in said
    assert not (tmp_path / "figures.json").exists()


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


def test_the_clips_near_a_norm_leave_out_no_number_even_at_a_power_of_two(study):
    near = study["stacks"]._neighbours(2.0)
    assert near[study["stacks"].ULPS] == 2.0
    assert near[1:] == [math.nextafter(clip, math.inf) for clip in near[:-1]]


def test_the_area_counts_pairs_in_order_and_ties_by_half(tools):
    attack, _, _ = tools
    assert attack.area([2, 3], [1, 2]) == 3.5 / 4


def test_draws_lie_on_the_lattice_and_shifted_draws_do_not(tools):
    _, arithmetic, _ = tools
    stddev, divisor = 37.0, 20
    draws = np.random.default_rng(5).standard_normal(100_000)
    found, looked_at = arithmetic.impossible(stddev * draws / divisor, divisor, stddev)
    assert looked_at > 20
    assert found == 0
    found, looked_at = arithmetic.impossible((stddev * draws + 0.3) / divisor, divisor, stddev)
    assert found > looked_at / 2
    grid = 2.0**-16  # 2^-21.2 of the deviation
    rounded = np.round((stddev * draws + 0.3) / grid) * grid
    assert arithmetic.impossible(rounded / divisor, divisor, stddev)[0] == 0


def test_the_mixture_is_that_of_the_sum_over_who_came(tools):
    _, _, relation = tools
    grid = np.linspace(-4, 4, 9)
    # Two others at rate 1/4, a target that always pulls by -1: sums -1, 0, 1 with chances 9/16, 6/16, 1/16.
    ours = relation._mixture(grid, 2, 0.25, [(1.0, -1.0)], 2.0)
    normal = [np.exp(-((grid - place) ** 2) / 8) / math.sqrt(8 * math.pi) for place in (-1, 0, 1)]
    np.testing.assert_allclose(ours, (9 * normal[0] + 6 * normal[1] + normal[2]) / 16, rtol=1e-12)
