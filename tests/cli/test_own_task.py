"""A model of one's own on data of one's own, by `clipline train FILE.py --data DATA`."""

import csv
import json
import os
import re
import shutil
import signal
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import load_file
from samples import ROOT

import clipline as cl
from clipline.data.population import Population
from clipline.data.store import write_store
from clipline.privacy.ledger import Ledger
from clipline.study.report.content import content
from clipline.study.report.reading import collect
from clipline.tasks.sweep import train_many
from clipline.tasks.task_file import own_task
from clipline.tasks.train_settings import TrainSettings
from clipline.training import callbacks
from clipline.training.callbacks import Callback
from clipline.training.progress import Progress

PAGE = (ROOT / "docs" / "howto" / "own_model.md").read_text()
TASK = """
import torch
from torch import nn

SETTINGS = {"rounds": 3, "cohort_size": 10, "client_lr": 0.1, "noise_multiplier": 0.8, "evaluate_every": 1}


def model():
    return nn.Linear(3, 2)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"].long())


def metrics(model, batch):
    return {"accuracy": (model(batch["x"]).argmax(dim=1) == batch["y"]).float()}
"""
WIDE = """

class wide:
    SETTINGS = {**SETTINGS, "rounds": 2}

    def model():
        return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
"""
FLAGS = ["--workers", 1, "--seed", 1, "--out", "run", "--json"]


def examples(users=80, seed=0):
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(users), 4)
    x = rng.normal(size=(len(ids), 3)).astype(np.float32)
    return ids, {"x": x, "y": (x[:, 0] > 0).astype(np.int64)}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A task file and its data in several forms."""
    path = tmp_path_factory.mktemp("data")
    (path / "mine.py").write_text(TASK)
    ids, fields = examples()
    lines = [{"user": int(i), "x": x.tolist(), "y": int(y)} for i, x, y in zip(ids, *fields.values(), strict=True)]
    (path / "table.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    np.savez(path / "table.npz", user=ids, **fields)
    write_store(path / "store", [(ids, fields)], source="by hand")
    Population.from_arrays(ids, **fields).save(path / "saved")
    write_store(path / "both" / "train", [(ids, fields)], source="by hand")
    others, tested = examples(7, seed=1)
    write_store(path / "both" / "test", [(others + 1000, tested)], source="by hand")
    return path


@pytest.fixture
def mine(clipline, files, tmp_path):
    """The command line in a folder with a copy of these."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    return clipline


def test_stores_whose_test_users_train_are_refused(mine, tmp_path):
    write_store(tmp_path / "same" / "train", [examples()], source="by hand")
    write_store(tmp_path / "same" / "test", [examples(7, seed=1)], source="by hand")
    err = mine.refused("train", "mine.py", "--data", "same", *FLAGS)
    assert "'same' has some user ids in both train and test" in " ".join(err.split())


def test_the_page_runs_as_printed(clipline, tmp_path, capsys):
    file, rides, *serving = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert file == (ROOT / "examples" / "own_task.py").read_text()
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "own_task.py").write_text(file)
    exec(compile(rides, "docs/howto/own_model.md", "exec"), {})
    *_, block = re.findall(r"^```\n(clipline .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    commands = block.splitlines()
    assert len(commands) == 3
    outs = []
    for command in commands:
        out, _ = clipline.ok(*command.split()[1:])
        outs.append(out)
    name, share = re.search(r"^result +(\S+) (\S+)", outs[0], re.MULTILINE).groups()
    assert name == "within_15_minutes"
    assert float(share) > 0.8  # the same hours for every ride: less than a third
    assert "zero-out one user (the number of users is public)" in outs[0]
    assert "not comparable" not in outs[0]
    assert "(epsilon 2.00, delta 0.000563)-DP for add-or-remove one user" in outs[2]
    scope = {}
    for block in serving:
        exec(compile(block, "docs/howto/own_model.md", "exec"), scope)
    rows = list(csv.DictReader((tmp_path / "rides.csv").read_text().splitlines()))
    assert len(scope["hours"]) == len(rows)
    errors = [abs(said - float(row["hours"])) for said, row in zip(scope["hours"], rows, strict=True)]
    assert sum(error < 0.25 for error in errors) / len(errors) > 0.8  # in the order of the rows, or it would be less
    assert "guarantee" in (tmp_path / "models" / "rides" / "card.json").read_text()
    assert "within_15_minutes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "users"), [("table.jsonl", 64), ("table.npz", 64), ("store", 64), ("saved", 64), ("both", 80)]
)
def test_all_forms_of_data_train(mine, tmp_path, data, users):
    column = ["--user-column", "user"] if data.startswith("table") else []
    out, _ = mine.ok("train", "mine.py", "--data", data, *column, *FLAGS)
    answer = json.loads(out)
    assert (answer["task"], answer["metric_name"], answer["rounds"]) == ("mine", "accuracy", 3)
    assert answer["metrics"]["accuracy"] == answer["metric"]
    assert (answer["relation"], answer["data"], answer["population_size"]) == ("zero-out", "own", None)
    assert answer["users"] == users  # 16 of 80 are measured on: a tenth, as a hash has it (one in 200 such is as large)
    settings = tomllib.loads((tmp_path / "run" / "settings.toml").read_text())
    assert (settings["task"], settings["data"], settings["client_lr"]) == ("mine.py", data, 0.1)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    metrics = ["accuracy", "loss"]  # the file's own first: reports begin with it
    assert list(last)[-4:] == [*metrics, *(f"last/{name}" for name in metrics)]  # of the average, and of the last model


def test_a_file_may_name_parameters_that_stay_with_their_user_and_flags_choose_the_optimiser(mine, tmp_path):
    text = TASK.replace("return nn.Linear(3, 2)", "return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))")
    text = text.replace("loss(model, batch):", "loss(model, batch, reference):\n    assert '0.bias' not in reference")
    (tmp_path / "mine.py").write_text(text + 'PERSONAL = ["0.bias"]\n')
    chosen = ["--client-optimiser", "adam", "--client-lr-schedule", "warmup:2,cosine", "--server-lr-schedule", "linear"]
    for rounds in (1, 3):
        flags = ["--data", "store", "--rounds", rounds, *chosen, *FLAGS[:4], "--out", f"run{rounds}"]
        mine.ok("train", "mine.py", *flags)
    one, three = (load_file(tmp_path / f"run{rounds}" / "model.safetensors") for rounds in (1, 3))
    assert [name for name in one if (one[name] == three[name]).all()] == ["0.bias"]
    settings = tomllib.loads((tmp_path / "run3" / "settings.toml").read_text())
    assert (settings["client_optimiser"], settings["server_lr_schedule"]) == ("adam", "linear")
    (tmp_path / "mine.py").write_text(TASK + 'PERSONAL = "bias"\n')
    err = mine.refused("train", "mine.py", "--data", "store", *FLAGS)
    assert "PERSONAL='bias' must be a list of parameters' names in 'mine.py'" in err


def test_flags_override_the_file_which_overrides_what_the_task_says(mine, tmp_path):
    (tmp_path / "c.toml").write_text("rounds = 2\nclient_lr = 0.3\nepsilon = 5.0\n")
    out, _ = mine.ok("train", "mine.py", "--config", "c.toml", "--data", "store", "--client-lr", 0.2, *FLAGS)
    settings = tomllib.loads((tmp_path / "run" / "settings.toml").read_text())
    assert (settings["rounds"], settings["client_lr"], settings["epsilon"]) == (2, 0.2, 5.0)
    assert "noise_multiplier" not in settings
    assert json.loads(out)["epsilon"] <= 5
    # A file that only the settings name is not run, as whoever wrote them chose it.
    err = mine.refused("train", "--config", "run/settings.toml", "--out", "again")
    assert "no code is run that you have not named" in err
    assert "clipline train mine.py --config run/settings.toml" in err
    assert not (tmp_path / "again").exists()
    mine.ok("train", "--model", "mine.py", "--config", "run/settings.toml", "--out", "again")
    err = mine.refused("train", "mine.py", "--model", "mine.py", "--data", "store")
    assert "--model 'mine.py' must be the file FILE.py of a task, in the place of TASK: give one of the two" in err


def test_an_interrupted_run_of_ones_own_is_resumed(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(callbacks, "TensorBoard", lambda *_, **__: Callback())  # which need not be installed
    flags = ["train", "mine.py", "--data", "store", "--workers", 1, "--seed", 1, "--rounds", 9]
    mine(*flags, "--out", "whole")

    def interrupted(at_round, *flags):
        def interrupt(self, report, state):
            if report.round_index == at_round:  # once: the second Ctrl-C does not wait for the end of a round
                os.kill(os.getpid(), signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(Progress, "on_round", interrupt)
            return mine(*flags)[1]

    out = interrupted(0, *flags, "--out", "part")
    assert "\nresume     clipline train mine.py --resume part\n" in out
    (tmp_path / "store").rename(tmp_path / "moved")
    flags = ["--tensorboard", "--no-report"]  # which no file stores
    out = interrupted(4, "train", "mine.py", "--resume", "part", "--data", "moved", *flags)
    assert "resume     clipline train mine.py --resume part --data moved --tensorboard --no-report\n" in out
    code, _, err = mine("train", "mine.py", "--resume", "part", "--data", "moved")
    done = re.search(r"Poisson sampling, (\d) rounds", out).group(1)  # 5, or 6 if the metric came late
    assert re.search(rf"going on after {done} of 9 rounds; what was released so far spent epsilon [0-9.]+\n", err)
    assert code == 0, err
    assert Ledger.read(tmp_path / "part" / "ledger.jsonl").rounds == 9
    whole, part = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "part"))
    assert all((whole[name] == part[name]).all() for name in whole)


def test_a_run_is_resumed_from_another_folder_and_not_with_other_code(mine, tmp_path, monkeypatch):
    flags = ["train", "mine.py", "--data", "store", "--workers", 1, "--seed", 1, "--rounds", 9]

    def interrupt(self, report, state):
        if report.round_index == 0:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "on_round", interrupt)
        mine(*flags, "--out", "part")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "mine.py").write_text(TASK + "\n# another one\n")
    err = mine.refused("train", "inner/mine.py", "--resume", "part")
    assert err.endswith("cannot be resumed, the code of mine.py has changed: restore it, or start a new run\n")
    monkeypatch.chdir(tmp_path / "inner")
    mine.ok("train", "../mine.py", "--resume", "../part", "--data", "../store")
    assert Ledger.read(tmp_path / "part" / "ledger.jsonl").rounds == 9


def test_a_run_directory_has_no_file_run_that_was_not_named(mine, tmp_path):
    """Whoever wrote the directory chose the name in it, and may have put a file there."""
    mine("train", "mine.py", "--data", "store", "--workers", 1, "--seed", 1, "--out", "run")
    stored = (tmp_path / "run" / "settings.toml").read_text()
    (tmp_path / "run" / "settings.toml").write_text(stored.replace('"mine.py"', '"evil.py"'))
    (tmp_path / "evil.py").write_text(TASK + "\nopen('ran', 'w').close()\n")
    code, _, err = mine("train", "--resume", "run", "--tensorboard")
    assert (code, err.endswith("clipline train evil.py --resume run --tensorboard\n")) == (2, True)
    err = mine.refused("train", "--resume", "run", "--data", "store")
    assert "'evil.py', and no code is run that you have not named" in err
    assert err.endswith("clipline train evil.py --resume run\n")
    code, _, err = mine("train", "mine.py", "--resume", "run", "--data", "store")
    assert (code, "TASK 'mine.py' must be 'evil.py', which the run in 'run' was made with" in err) == (2, True)
    assert not (tmp_path / "ran").exists()


def test_a_file_may_define_a_task(mine, tmp_path):
    (tmp_path / "helper.py").write_text("NAME = 'digits of few'\n")
    (tmp_path / "given.py").write_text(
        "from dataclasses import replace\nfrom helper import NAME\nfrom clipline import task_named\n"
        "base = task_named('handwriting')\n"
        "TASK = replace(base, name='few', title=NAME + ', {users} writers',\n"
        "    settings=replace(base.settings, population_size=60, cohort_size=6, rounds=1))\n"
    )
    out, err = mine.ok("train", "given.py", *FLAGS)
    assert "preparing digits of few, 60 writers" in err
    assert (json.loads(out)["task"], json.loads(out)["users"]) == ("few", 60)
    assert tomllib.loads((tmp_path / "run" / "settings.toml").read_text())["task"] == "given.py"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("def loss(model, batch)", "def cost(model, batch)", "must define loss(model, batch), and it does not"),
        ("def model()", "def module()", "must define model(), and it does not"),
        ("def loss(model, batch)", "def loss(batch)", "and its loss is called as loss(batch): change its arguments"),
        ("import torch\n", "import torsch\n", "cannot be run (line 2: ModuleNotFoundError: No module named 'torsch')"),
        ("return nn.Linear(3, 2)", "return nn.Linear(3, 2", "cannot be run (line 9: '(' was never closed): mend the"),
        ('"rounds": 3', '"ronds": 3', "SETTINGS of 'mine.py' has the unknown key 'ronds': did you mean 'rounds'?"),
        ('"rounds": 3, ', "", "rounds is missing: give --rounds, or rounds in SETTINGS of 'mine.py'"),
        ('"rounds": 3', '"rounds": 0', "rounds=0 must be a whole number at least 1"),
        ('return {"accuracy": ', "return (", "metrics(model, batch) gave Tensor but must give names and numbers"),
        (".float()}", ".float().mean()}", "metric 'accuracy' returned shape () but must return a tensor of shape (64"),
        (
            '["y"].long())',
            '["y"].long()).repeat(3)',
            "loss returned a tensor of shape (3,) but must return a tensor of one",
        ),
        ('batch["x"]), batch', 'batch["z"]), batch', "fails (line 13: KeyError: 'z'): the batch has the fields x, y"),
        ("nn.Linear(3, 2)", "nn.Linear(4, 2)", "loss(model, batch) of 'mine.py' fails (line 13: RuntimeError: mat1"),
        ('"accuracy":', '"clip":', "metric='clip' must be named other than round, clip, fraction_within"),
        ("def model()", "TASK = 3\ndef model()", "defines TASK and also model or loss, and one must be meant"),
        ("SETTINGS = {", "COLUMNS = {'fields': ['z']}\nSETTINGS = {", "has no field 'z'"),
        ("import torch\n", "import beside\n", "cannot be run (line 2: "),
        ("SETTINGS = {", "COLUMNS = {'fiels': []}\nSETTINGS = {", "COLUMNS of 'mine.py' has the unknown key 'fiels'"),
        ("SETTINGS = {", "COLUMNS = {'categories': {'y': [0]}}\nSETTINGS = {", "was made with other categories of 'y'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_sentence(mine, tmp_path, old, new, words):
    assert old in TASK
    text = TASK.replace(old, new)
    if new == "return (":
        text = text.replace(".float()}", ".float())")
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "beside.py").write_text("a = 1\nb = (\n")
    code, out, err = mine("train", "mine.py", "--data", "store", *FLAGS)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]
    assert "import beside" not in new or "beside.py', line 2: '(' was never closed" in err
    assert err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


COMMANDS = {
    "train": ["train", "{}", "--data", "store", *FLAGS],
    "plan": ["plan", "--model", "{}", "--population-size", 1000, "--epsilon", 4],
    "tune": ["tune", "{}", "--proxy", "store", "--epsilon", 4, "--users", 1000, "--rounds", 2, "--cohort-size", 5],
    "reproduce": ["reproduce", "fig3", "--task", "{}", "--data", "store"],
}


WRONG = {
    "nowhere.py": "'nowhere.py' must be the path of a Python file, and there is none",
    "mine.py:wid": "and there is none: did you mean 'wide'?",
    "broken.py": "'broken.py' cannot be run (line 1: invalid syntax): mend the file",
    "three.py": "model() of 'three.py' gave int but must give a torch.nn.Module: return one (line 8)",
    "so_lr.py": "'so_lr.py' must be named other than 'so_lr', a task of clipline: rename the file",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_what_is_wrong_with_a_file(mine, tmp_path, command):
    (tmp_path / "mine.py").write_text(TASK + WIDE)
    (tmp_path / "broken.py").write_text("import = 3\n")
    (tmp_path / "three.py").write_text(TASK.replace("return nn.Linear(3, 2)", "return 3"))
    (tmp_path / "so_lr.py").write_text(TASK)
    for task, words in WRONG.items():
        code, out, err = mine(*(str(word).format(task) for word in COMMANDS[command]))
        assert (code, out) == (2, "")
        assert words in err.splitlines()[-1]
        assert "Traceback" not in err


def test_one_file_may_hold_several_tasks(mine, tmp_path):
    (tmp_path / "mine.py").write_text(TASK + WIDE)
    out, _ = mine.ok("train", "mine.py:wide", "--data", "store", *FLAGS)
    answer = json.loads(out)
    assert (answer["task"], answer["rounds"], answer["metric_name"]) == ("mine-wide", 2, "accuracy")
    assert len(load_file(tmp_path / "run" / "model.safetensors")) == 4  # two layers
    saved = cl.load("run", model="mine.py:wide")
    assert len(saved.model) == 2
    assert saved.card["task"]["name"] == "mine.py:wide"
    out, _ = mine.ok("plan", "--model", "mine.py:wide", "--population-size", 1000, "--epsilon", 4, "--json")
    assert json.loads(out)["parameters"] == 3 * 5 + 5 + 5 * 2 + 2
    settings = TrainSettings(
        task="mine.py:wide", data="store", rounds=1, cohort_size=9, client_lr=0.1, epsilon=9.0, seed=1
    )
    results = train_many([settings, replace(settings, seed=2)])
    assert [result.state.round_index for result in results] == [1, 1]


def test_a_table_is_read_as_the_file_says_in_training_and_in_prediction(mine, tmp_path):
    rows = [
        f"{user},{'red' if user % 2 else ''},2026-01-0{1 + user % 9},{user if user % 5 else ''},nothing"
        for user in range(60)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["user,y,when,x,note", *rows]) + "\n")
    columns = (
        'COLUMNS = {"fields": ["y", "when", "x"], "categories": {"y": ["red"]}, "fill": {"x": 7},\n'
        '           "timestamps": {"when": "days since 2026-01-01"}}\n'
    )
    text = TASK.replace('batch["x"]', 'torch.stack([batch["x"].float(), batch["when"], batch["x"].float()], 1)')
    text += '\n\ndef predict(model, batch):\n    return torch.stack([batch["y"], batch["when"], batch["x"]], 1)\n'
    (tmp_path / "mine.py").write_text(columns + text)
    mine.ok("train", "mine.py", "--data", "t.csv", "--user-column", "user", *FLAGS)
    # Not listed is 1, the first of January is 0, and a gap is 7.
    assert cl.load("run", model="mine.py").predict("t.csv")[:2].tolist() == [[1, 0, 7], [0, 1, 1]]


def test_a_plan_counts_the_users_who_would_train(mine, tmp_path):
    for data, flags in (("store", []), ("table.npz", ["--user-column", "user"])):
        mine.ok("train", "mine.py", "--data", data, *flags, "--workers", 1, "--rounds", 1, "--out", data + ".run")
    out, _ = mine.ok("plan", "--config", "store.run/settings.toml", "--json")
    assert json.loads(out)["population_size"] == 64  # 16 of the 80 are measured on
    err = mine.refused("plan", "--config", "table.npz.run/settings.toml")
    assert "plan counts no users in the table 'table.npz': give --population-size" in err


def test_a_figure_of_the_paper_is_made_of_a_file(mine, tmp_path):
    flags = ["--rounds", 3, "--cohort-size", 8, "--clip-start", 0.3]
    command = ["reproduce", "fig3", "--task", "mine.py", "--data", "store", "--out", "study", *flags]
    out, _ = mine.ok(*command)
    assert "fig3, mine, scale smoke:" in out
    rows = list(csv.DictReader((tmp_path / "study" / "fig3-mine.csv").read_text().splitlines()))
    assert {row["quantile"] for row in rows} == {"", "0.1", "0.5", "0.9"}
    code, out, err = mine("study", "check", "study")
    assert (code, err) == (0, "")
    assert "7 runs and 1 tables, 0 problems" in out
    assert mine(*command)[0] == 0  # nothing is left to train
    (tmp_path / "mine.py").write_text(TASK.replace("nn.Linear(3, 2)", "nn.Linear(3, 2, bias=False)"))
    assert "holds fig3-mine of a file that has changed since: give another --out" in mine.refused(*command)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mine.py"], "--data is missing: 'mine.py' generates no users: give --data DIR or FILE"),
        (
            ["mine.py", "--data", "nowhere"],
            "--data 'nowhere' does not exist or is no regular file: give a table (.parquet, .csv",
        ),
        (
            ["mine.py", "--data", "tabel.npz"],
            "--data 'tabel.npz' does not exist or is no regular file: did you mean 'table.npz'?",
        ),
        (["mine.py", "--data", "empty"], "--data 'empty' must be a folder made by clipline data prepare, or a table"),
        (["mine.py", "--data", "table.npz"], "--user-column is missing for the table 'table.npz'"),
        (["mine.py", "--data", "table.npz", "--user-column", "usr"], "has no user column 'usr': did you mean 'user'?"),
        (
            ["mine.py", "--data", "store", "--evaluate-on", "best"],
            "--evaluate-on 'best' must be one of validation, test",
        ),
        (
            ["handwriting", "--user-column", "user"],
            "--user-column 'user' must be left out, as task 'handwriting' has no",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_refused_in_one_sentence(mine, tmp_path, arguments, words):
    (tmp_path / "empty").mkdir()
    code, out, err = mine("train", *arguments, *FLAGS)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_a_file_says_which_way_a_metric_is_better_and_the_report_goes_by_it(mine, tmp_path):
    (tmp_path / "mine.py").write_text(TASK + '\nBETTER = {"accuracy": "lower"}\n')
    assert mine("train", "mine.py", "--data", "store", *FLAGS)[0] == 0
    assert own_task("mine.py", {"data": "store", "seed": 0}).better == {"accuracy": "lower"}  # which tune goes by
    (shown,) = content(collect([tmp_path / "run"]))["runs"]
    assert shown["best"]["accuracy"] == min(shown["metrics"]["accuracy"]["y"])


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (7, "field 'y' holds values up to 7, and loss(model, batch) of 'mine.py' takes 0 to 1 (IndexError: Target 7 "),
        (-1, "field 'y' holds -1, and loss(model, batch) of 'mine.py' takes none below 0 (IndexError: Target -1 is"),
    ],
)
def test_one_label_that_the_model_has_no_class_for_is_refused_before_anything_is_trained(mine, tmp_path, label, words):
    ids, fields = examples()
    fields["y"][0] = label  # of one user among 80, whether trained or tested on
    np.savez(tmp_path / "table.npz", user=ids, **fields)
    err = mine.refused("train", "mine.py", "--data", "table.npz", "--user-column", "user", *FLAGS)
    assert words in err.splitlines()[-1]
    assert not (tmp_path / "run").exists()
