"""`clipline tune` at the least scale: a linear model of one's own, and the commands that follow."""

import importlib.util
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import tomllib

import numpy as np
import pytest
from samples import ROOT

import clipline as cl
from clipline.cli.tune import command
from clipline.privacy.banded_noise import lasting_share
from clipline.privacy.noise_split import default_count_stddev
from clipline.study.directory import StudyDirectory

TASK = """
from torch import nn

SETTINGS = {"rounds": 10, "client_lr": 0.3, "batch_size": 4, "clip_start": 0.1}


def model():
    return nn.Linear(3, 2)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"].long(), reduction="none")


def metrics(model, batch):
    return {"accuracy": (model(batch["x"]).argmax(dim=1) == batch["y"]).float()}
"""
ASKED = ["--epsilon", 4, "--users", 100_000, "--proxy", "proxy.npz", "--user-column", "user", "--cohort-size", 20]
FLAGS = ["--workers", 1, "--out", "tuned"]


def table(path, users=120, seed=0, first=0):
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(first, first + users), 4)
    x = rng.normal(size=(len(ids), 3)).astype(np.float32)
    np.savez(path, user=ids, x=x, y=(x[:, 0] > 0).astype(np.int64))


@pytest.fixture
def mine(clipline, tmp_path):
    (tmp_path / "mine.py").write_text(TASK, encoding="utf-8")
    table(tmp_path / "proxy.npz")
    table(tmp_path / "private.npz", seed=1, first=1000)
    return clipline


def planned(run):
    code, out, err = run("plan", "--config", "tuned/final.toml", "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.filterwarnings("ignore::clipline.federated.sampling.DeclaredUsersWarning")
def test_a_task_of_ones_own_from_the_search_to_the_final_training(mine, tmp_path):
    out, err = mine.ok("tune", "mine.py", *ASKED, *FLAGS, "--data", "private.npz")
    assert "clipline train mine.py --config tuned/final.toml" in out
    for step in ("step 1 of 3", "step 2 of 3", "step 3 of 3"):
        assert step in err
    final = tomllib.loads((tmp_path / "tuned/final.toml").read_text(encoding="utf-8"))
    facts = json.loads((tmp_path / "tuned/tune.json").read_text(encoding="utf-8"))
    plan = planned(mine)
    assert plan["epsilon"] <= 4
    assert plan["relation"] == "add-or-remove"
    assert plan["population_size"] == 100_000
    # (m, z) are those of the trial, both times alpha: of banded noise what stays in the models is.
    alpha = final["cohort_size"] / 20
    assert alpha == facts["alpha"] >= 1
    assert final["noise"] == "banded"
    share = lasting_share(final["rounds"], final["bands"])
    assert final["noise_multiplier"] * share == pytest.approx(alpha * facts["noise_borne"])
    assert share < 1
    assert final["count_stddev"] == default_count_stddev(final["cohort_size"], final["noise_multiplier"])
    assert final["data"] == "private.npz"
    assert final["max_epsilon"] == 4
    assert "seed" not in final
    # Every number has its run, and the study that they are in holds together.
    study = StudyDirectory.existing(tmp_path / "tuned")
    assert study.check() == []
    assert {one["run"] for one in facts["rates"] + facts["noises"]} == set(study.ids())
    assert len(facts["rates"]) >= 9
    page = (tmp_path / "tuned/tune.html").read_text(encoding="utf-8")
    assert "What to run next" in page
    assert f"{facts['chosen']['client_lr']:.3g}" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    # Asked once more, nothing is run again.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "tuned/runs").iterdir()}
    code, again, _ = mine("tune", "mine.py", *ASKED, *FLAGS, "--data", "private.npz")
    assert (code, again) == (0, out)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "tuned/runs").iterdir()} == before
    # Another question takes the same runs and leaves the files of the first one as they are. More noise may be tried.
    kept = {name: (tmp_path / "tuned" / name).read_bytes() for name in ("final.toml", "tune.json", "tune.html")}
    other = [*ASKED, *FLAGS, "--data", "private.npz", "--epsilon", 1, "--independent-noise"]
    out, _ = mine.ok("tune", "mine.py", *other)
    name = "final-epsilon-1-noise-independent.toml"
    assert f"clipline train mine.py --config tuned/{name}" in out
    stricter = tomllib.loads((tmp_path / "tuned" / name).read_text(encoding="utf-8"))
    assert (stricter["max_epsilon"], stricter["noise"]) == (1, "independent")
    assert stricter["count_stddev"] == stricter["cohort_size"] / 20
    assert "tune-epsilon-1-noise-independent.html" in (tmp_path / "tuned" / name).read_text(encoding="utf-8")
    assert {name: (tmp_path / "tuned" / name).read_bytes() for name in kept} == kept
    assert planned(mine)["epsilon"] == plan["epsilon"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "tuned/runs").iterdir()}.items() >= before.items()
    # And what it wrote trains: on the private users, with the promise that was asked for.
    flags = ["--config", "tuned/final.toml", "--workers", 1, "--out", "trained", "--json"]
    out, _ = mine.ok("train", "mine.py", *flags)
    assert json.loads(out.splitlines()[-1])["epsilon"] <= 4
    mine.ok("report", "tuned")


def test_too_few_users_end_in_a_refusal_with_what_would_do_and_a_page(mine, tmp_path):
    asked = ["--epsilon", 0.5, "--users", 30, "--proxy", "proxy.npz", "--user-column", "user", "--cohort-size", 20]
    err = mine.refused("tune", "mine.py", *asked, *FLAGS, "--runs", 1, "--degradation", "0%")
    last = err[err.index("error: ") :]
    for words in ("--epsilon 0.5", "30 users", "--users ", "--epsilon "):
        assert words in last
    assert not (tmp_path / "tuned/final.toml").exists()
    assert "cannot be met" in (tmp_path / "tuned/tune.html").read_text(encoding="utf-8")
    # One of the ways out, in the same folder: the search is there already.
    users = int(last.split("--users ")[1].split(":")[0])
    ids = StudyDirectory.existing(tmp_path / "tuned").ids()
    asked[3] = users
    mine.ok("tune", "mine.py", *asked, *FLAGS, "--runs", 1, "--degradation", "0%")
    assert planned(mine)["epsilon"] <= 0.5
    assert set(ids) <= set(StudyDirectory.existing(tmp_path / "tuned").ids())


def test_a_search_on_the_private_data_is_charged_as_a_whole(mine, tmp_path):
    asked = ["--epsilon", 4, "--users", 120, "--data", "private.npz", "--user-column", "user", "--cohort-size", 20]
    asked += ["--delta", 0.004, "--relation", "zero-out"]
    flags = ["--private-search", "--noise-multiplier", 0.95, "--reach", 1]
    out, _ = mine.ok("tune", "mine.py", *asked, *FLAGS, *flags)
    facts = json.loads((tmp_path / "tuned/tune.json").read_text(encoding="utf-8"))
    price = facts["private_search"]
    assert price["epsilon_of_one_run"] < price["epsilon"] <= 4
    assert planned(mine)["epsilon"] == pytest.approx(price["epsilon_of_one_run"])  # of what final.toml trains
    assert "search and final training together" in out
    assert (facts["final"]["delta"], facts["final"]["relation"]) == (0.004, "zero-out")
    # Seeds draw the noise: they are for the owner alone.
    assert "seed" not in facts["final"]
    for name in ("tuned/final.toml", "tuned/private/drawn.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    seed = tomllib.loads((tmp_path / "tuned/final.toml").read_text(encoding="utf-8"))["seed"]
    for name in ("tuned/tune.json", "tuned/tune.html"):
        assert str(seed) not in (tmp_path / name).read_text(encoding="utf-8")
    # The final training is the chosen run, made again: the same metric, to the last digits.
    final = ["--config", "tuned/final.toml", "--workers", 1, "--out", "trained", "--json"]
    out, _ = mine.ok("train", "mine.py", *final)
    record = StudyDirectory.existing(tmp_path / "tuned/private").record(facts["chosen"]["run"])
    assert json.loads(out.splitlines()[-1])["metric"] == pytest.approx(record.final["accuracy"])
    # Asked again it keeps what it drew.
    mine.ok("tune", "mine.py", *asked, *FLAGS, *flags)
    assert json.loads((tmp_path / "tuned/tune.json").read_text(encoding="utf-8")) == facts
    # Asked for another epsilon, other cohorts would get noise from the same seeds.
    assert "asked otherwise" in mine.refused("tune", "mine.py", *asked, "--epsilon", 8, *FLAGS, *flags)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["--delta", 2], ("--delta 2", "below 1")),
        (["--users", 19], ("--users 19", "at least the cohort of the trial, 20", "--cohort-size")),
        (["--degradation", "half"], ("--degradation 'half'", "5%")),
        (["--proxy", "missing.npz"], ("--proxy 'missing.npz'", "a folder made by")),
        (["--data", "proxy.npz"], ("--proxy 'proxy.npz'", "--private-search")),
        (["--search", "annealing"], ("--search 'annealing'", "grid")),
        (["--private-search"], ("--proxy 'proxy.npz'", "--private-search")),
        (["--better", "longer"], ("--better 'longer'", "lower")),
        (["--out", "mine.py"], ("--out 'mine.py'", "folder")),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(mine, tmp_path, changed, words):
    before = sorted(tmp_path.iterdir())
    code, out, err = mine("tune", "mine.py", *ASKED, *FLAGS, *changed)
    assert (code, out) == (2, "")
    for word in words:
        assert word in err
    assert "Traceback" not in err
    assert "step 1" not in err
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_not_there_is_refused_with_a_way_out(mine):
    for arguments, words in (
        ("handwriting --users 1000", "epsilon is missing"),
        ("handwriting --epsilon 4", "users is missing"),
        ("handwriting --epsilon 4 --users 1000 --relation paper", "--relation 'paper'"),
        ("handwriting --epsilon 4 --users 1000 --proxy proxy.npz", "--proxy 'proxy.npz'"),
        ("mine.py --epsilon 4 --users 1000", "--proxy is missing: 'mine.py' generates no users: give --proxy"),
        ("mine.py --epsilon 4 --users 1000 --proxy prox.npz", "--proxy 'prox.npz' does not"),
        ("missing.toml --epsilon 4 --users 1000", "missing.toml' does not exist"),
    ):
        assert words in mine.refused("tune", *arguments.split(), "--cohort-size", 20)


def test_a_file_of_settings_tunes_its_task(mine, tmp_path):
    settings = 'task = "mine.py"\ndata = "private.npz"\nuser_column = "user"\nepsilon = 4.0\npopulation_size = 100000\n'
    (tmp_path / "mine.toml").write_text(settings + "rounds = 4\nclient_lr = 0.1\ncohort_size = 50\n", encoding="utf-8")
    flags = ["--proxy", "proxy.npz", "--cohort-size", 20, "--runs", 3, "--independent-noise"]
    flags += ["--search", "optuna"] if importlib.util.find_spec("optuna") else []
    mine.ok("tune", "mine.toml", *flags, *FLAGS)
    final = tomllib.loads((tmp_path / "tuned/final.toml").read_text(encoding="utf-8"))
    assert (final["data"], final["rounds"], final["population_size"]) == ("private.npz", 4, 100_000)
    assert planned(mine)["epsilon"] <= 4


def test_the_answer_of_another_file_of_the_same_name_is_kept(mine, tmp_path):
    for folder in ("visits", "rides"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"{TASK}\n# {folder}\n", encoding="utf-8")
    asked = [*ASKED, "--workers", 1, "--rounds", 3, "--runs", 1, "--independent-noise"]
    mine.ok("tune", "visits/mine.py", *asked)
    final = tmp_path / "tune/mine/final.toml"
    before = final.read_bytes()
    refusal = "'tune/mine' holds the tuning of visits/mine.py: give --out DIR"
    assert refusal in mine.refused("tune", "rides/mine.py", *asked)
    assert final.read_bytes() == before
    # The same file by another path goes on, as does a copy of the same code where the first one is gone.
    mine.ok("tune", str(tmp_path / "visits/mine.py"), *asked)
    (tmp_path / "visits").rename(tmp_path / "moved")
    mine.ok("tune", "moved/mine.py", *asked)
    (tmp_path / "moved").rename(tmp_path / "again")
    assert "holds the tuning of moved/mine.py" in mine.refused("tune", "rides/mine.py", *asked)


def test_killed_and_asked_again_it_repeats_no_run(mine, tmp_path):
    arguments = [*ASKED, *FLAGS, "--rounds", 20, "--runs", 3, "--independent-noise"]
    command = [sys.executable, "-m", "clipline", "tune", "mine.py", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    runs, deadline = tmp_path / "tuned/runs", time.monotonic() + 60
    while not (runs.is_dir() and any(runs.glob("*.json"))):
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path: path.stat().st_mtime_ns for path in runs.glob("*.json")}
    assert before
    mine.ok("tune", "mine.py", *arguments)
    after = {path: path.stat().st_mtime_ns for path in runs.glob("*.json")}
    assert before.items() <= after.items()
    assert StudyDirectory.existing(tmp_path / "tuned").check() == []


def test_the_page_names_flags_that_exist():
    page = (ROOT / "docs" / "howto" / "tune.md").read_text(encoding="utf-8")
    named = {flag for flag in re.findall(r"--[a-z]+(?:-[a-z]+)*", page) if flag != "--config"}  # of plan and train
    known = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    assert len(named) > 15
    assert named <= known


def test_data_made_by_private_statistics_are_refused_as_their_cost_would_be_left_out(mine, tmp_path):
    people = cl.Population.from_table(tmp_path / "private.npz", user="user")
    moments = cl.PrivateStatistics().moments(people, {"x": (-5, 5)}, noise_multiplier=20.0)
    moments.apply(people).save(tmp_path / "scaled")
    err = mine.refused("tune", "mine.py", "--data", "scaled", "--private-search", "--epsilon", 4, "--users", 1000)
    assert "--data 'scaled' must be made without private statistics, which tune does not count" in err


def test_private_data_in_another_file_are_no_proxy(mine, tmp_path):
    mine.ok("data", "prepare", "table", "--from", "private.npz", "--to", "store", "--user-column", "user")
    asked = [*ASKED, *FLAGS]
    asked[asked.index("proxy.npz")] = "private.npz"
    err = mine.refused("tune", "mine.py", *asked, "--data", "store")
    assert "--proxy 'private.npz' must be other data than the private ones" in err
    assert not (tmp_path / "tuned").exists()
