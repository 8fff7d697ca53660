import json
import os
import re
import shlex
import signal
import subprocess
import sys
from datetime import datetime

import pyarrow as pa
import pytest
from samples import ROOT
from tff_layouts import write_original

import clipline as cl
from clipline.cli.data import _in_flags
from clipline.data.manifest import verify_store
from clipline.data.population import Population
from clipline.errors import SettingError
from clipline_paper.data.catalogue import CATALOGUE


@pytest.fixture
def posts(tmp_path):
    lines = [{"author": f"a{i % 3}", "hours": [i, i + 1], "score": i / 2, "note": "text"} for i in range(30)]
    (tmp_path / "posts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_table_becomes_a_store(clipline, posts, tmp_path):
    out, err = clipline.ok(
        "data", "prepare", "table", "--from", "posts.jsonl", "--to", "posts", "--user-column", "author", "--fields",
        "hours, score", "--json",
    )  # fmt: skip
    answer = json.loads(out.splitlines()[-1])
    assert (answer["users"], answer["examples"], answer["fields"]) == (3, 30, ["hours", "score"])
    assert (answer["folder"], answer["source"]) == ("posts", "table from posts.jsonl")
    assert answer["bytes"] == sum(path.stat().st_size for path in (tmp_path / "posts").iterdir())
    assert err.splitlines() == ["reading 100%", "grouping 100%"]
    population = Population.open(tmp_path / "posts")
    assert population.of(1)["hours"].tolist() == [[i, i + 1] for i in range(1, 30, 3)]
    verify_store(tmp_path / "posts")


def test_a_known_data_set_is_prepared_listed_and_described(clipline, tmp_path):
    write_original(tmp_path / "clipline-data", "cifar100", "sqlite")
    out, _ = clipline.ok("data", "prepare", "cifar100", "--from", "clipline-data", "--to", "clipline-data/cifar100")
    assert "clipline-data/cifar100/train: 3 users, 4 examples of pixels, labels" in out
    assert "clipline-data/cifar100/test: 2 users, 2 examples of pixels, labels" in out
    assert "train on it: clipline train cifar100 --data clipline-data/cifar100" in out
    assert "note: train has 3 users where the published file has 500" in out
    assert "note: test has 2 users where the published file has 100" in out
    _, out, _ = clipline("data", "list", "--json")
    answer = json.loads(out)
    assert list(answer) == ["cifar100", "emnist", "shakespeare", "stackoverflow"]
    folder = "clipline-data/cifar100"
    assert answer["cifar100"]["prepared"] == [f"{folder}/test", f"{folder}/train"]
    assert answer["cifar100"]["files"] == ["clipline-data/cifar100.sqlite"]
    assert answer["emnist"]["prepared"] == answer["emnist"]["files"] == []
    assert answer["stackoverflow"]["splits"]["heldout"] == {"users": 38_758, "examples": 16_491_230}
    states = {task: state["data"] for entry in answer.values() for task, state in entry["state"].items()}
    _, out, _ = clipline("tasks", "--json")
    assert states == {task["name"]: task["data"] for task in json.loads(out) if task["name"] != "handwriting"}
    assert sorted(states) == ["cifar100", "emnist_ae", "emnist_cr", "shakespeare", "so_lr", "so_nwp"]
    assert [task for task, state in states.items() if state != "stand-in"] == ["cifar100"]
    _, out, _ = clipline("data", "list")
    assert "cifar100: photographs" in out
    assert f"for      cifar100: present, 3 users, original, {folder}" in out
    assert f"present  {folder}.sqlite, {folder}/test, {folder}/train" in out
    assert out.count("nothing in clipline-data") == 3
    for known in CATALOGUE.values():
        assert known.downloads[0].url in out


def test_one_split_alone_goes_straight_into_the_folder(clipline, tmp_path):
    write_original(tmp_path / "files", "cifar100", "hdf5")
    command = "data prepare cifar100 --from files/fed_cifar100_test.h5 --to one --split test --json"
    out, _ = clipline.ok(*shlex.split(command))
    answer = json.loads(out)
    assert (answer["users"], answer["folder"], answer["source"]) == (
        2, "one", "cifar100 test from fed_cifar100_test.h5",
    )  # fmt: skip
    assert len(Population.open(tmp_path / "one")) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("prepare tabel --from posts.jsonl --to new", "did you mean 'table'?"),
        ("prepare table --from posts.jsonl --to new", "give --user-column"),
        ("prepare table --from posts.jsonl --to new --user-column auhtor", "'auhtor': did you mean 'author'?"),
        ("prepare table --from posts.jsonl --to new --user-column author", "field 'note' is text but must be numbers"),
        ("prepare table --from posts.jsonl --to used --user-column author", "'used' is in use"),
        ("prepare table --from posts.jsonl --to posts.jsonl/new --user-column author", "cannot be written"),
        ("prepare shakespeare --from posts.jsonl --to new", "neither SQLite with all splits nor one of"),
        ("prepare so_nwp --from posts.jsonl --to new", "neither stackoverflow.word_count nor"),
        ("prepare so_lr --from posts.jsonl --to new --words posts.jsonl", "has 30 entries but the first 10000 are"),
        ("prepare emnist --from fed_emnist_train.h5 --to new", "'fed_emnist_test.h5' is missing"),
        ("prepare emnist --from fed_emnist_train.h5 --to new --fields label", "must be left out for 'emnist'"),
        ("fetch mnist --to new", "did you mean 'emnist'?"),
        ("fetch emnist --to posts.jsonl", "is a file: give a folder"),
    ],
)
def test_bad_input_is_one_sentence_exit_code_2_and_nothing_made(clipline, posts, tmp_path, arguments, words):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("keep me")
    (tmp_path / "fed_emnist_train.h5").write_text("never opened")
    (tmp_path / "mine.h5").write_text("never opened")
    before = sorted(tmp_path.rglob("*"))
    err = clipline.refused("data", *arguments.split())
    assert words in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


SLOW = """
import sys, time
import numpy as np
from clipline.data import store
def slow(*_, **__):
    while True:
        yield np.arange(100), {"x": np.zeros((100, 100))}
        print("going", flush=True)
        time.sleep(0.05)
store.read_table = slow
sys.argv = ["clipline", "data", "prepare", "table", "--from", "a.csv", "--to", "store", "--user-column", "u"]
from clipline.cli import main
main()
"""


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_preparation_leaves_nothing(tmp_path, stop):
    with subprocess.Popen(
        [sys.executable, "-c", SLOW], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells let their background jobs ignore it
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "going\n"
        assert list(tmp_path.iterdir()) != []
        os.kill(process.pid, stop)
        _, err = process.communicate(timeout=20)
    assert process.returncode != 0
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_the_page_on_data_runs_as_printed(clipline, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "howto" / "data.md").read_text()
    python = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    shell = re.findall(r"^```\n(clipline .*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(python) == 3
    exec(compile(python[0], "docs/howto/data.md", "exec"), {})
    commands = [line for block in shell for line in block.splitlines() if "emnist" not in line]
    assert len(commands) >= 2
    for command in commands:
        clipline.ok(*command.split()[1:])
    for block in python[1:]:
        exec(compile(block, "docs/howto/data.md", "exec"), {})


RIDES = """rider,city,zip,start,age,late
ann,Rome,007,2026-01-01 06:00:00,,1
bob,Oslo,8,2026-01-02 00:00:00,30,0
ann,,007,2026-01-03 00:00:00,50,1
cem,Bern,9,2025-12-31 12:00:00,20,0
"""
TASK = """import torch

SETTINGS = {"rounds": 1, "cohort_size": 2, "client_lr": 0.01, "epsilon": 8.0, "delta": 0.01}


def model():
    return torch.nn.Linear(4, 1)


def predict(model, batch):
    return torch.stack([batch[name].float() for name in ("city", "zip", "start", "age")], dim=1)


def loss(model, batch):
    return (model(predict(model, batch))[:, 0] - batch["late"]).square()
"""


def test_column_options_go_from_the_command_line_through_the_store_to_predictions(clipline, tmp_path):
    (tmp_path / "rides.csv").write_text(RIDES)
    (tmp_path / "task.py").write_text(TASK)
    clipline.ok(
        "data", "prepare", "table", "--from", "rides.csv", "--to", "rides", "--user-column", "rider", "--categories",
        "city=Bern, Rome", "--categories", "zip=9,007", "--timestamps", "start=hours since 2026-01-01", "--fill",
        "age=40", "--missing", "0",
    )  # fmt: skip
    store = Population.open(tmp_path / "rides")
    assert store.column_options == {
        "missing": 0,
        "fill": {"age": 40},
        "categories": {"city": ["Bern", "Rome"], "zip": ["9", "007"]},
        "timestamps": {"start": "hours since 2026-01-01"},
    }
    # By hand: Rome is 1, what is not listed 2; zip is text, so that 007 is not 7; ann's first age is a gap.
    assert store.of(0)["city"].tolist() == [1, 2]
    assert store.of(0)["zip"].tolist() == [1, 1]
    assert store.of(0)["start"].tolist() == [6.0, 48.0]
    assert store.of(0)["age"].tolist() == [40, 50]
    clipline.ok("train", "task.py", "--data", "rides", "--out", "run", "--no-report")
    (tmp_path / "new.csv").write_text(
        "zip,start,age,city\n007,2026-01-01 01:30:00,,Bern\n7,2025-12-31 00:00:00,21,Rome\n"
    )
    expected = [[0, 1, 1.5, 40], [1, 2, -24, 21]]
    saved = cl.load(tmp_path / "run", model="task.py")
    assert saved.predict(tmp_path / "new.csv").tolist() == expected
    rows = {"zip": ["007", "7"], "start": [datetime(2026, 1, 1, 1, 30), datetime(2025, 12, 31)], "age": [None, 21],
            "city": ["Bern", "Rome"]}  # fmt: skip
    assert saved.predict(rows).tolist() == saved.predict(pa.table(rows)).tolist() == expected
    assert saved.predict(store)[0].tolist() == [1, 1, 6, 40]  # a population has its codes already
    other = Population.from_dataframe(pa.table({"rider": [1], "city": [3]}), user="rider")
    with pytest.raises(SettingError, match="column options of 'city'='others' must be those of the training"):
        saved.predict(other)


def test_lists_of_a_table_get_a_width_from_the_command_line(clipline, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"u": "a", "t": [1, 2, 3]}\n{"u": "b", "t": [4]}\n')
    command = ["data", "prepare", "table", "--from", "t.jsonl", "--to", "t", "--user-column", "u"]
    assert "lists of 1 to 3 entries in 't': give them one width with --lengths t=128" in clipline.refused(*command)
    clipline.ok(*command, "--lengths", "t=2", "--pad", "-1")
    people = Population.open(tmp_path / "t")
    assert people.fields["t"].tolist() == [[1, 2], [4, -1]]
    assert people.fields["t_length"].tolist() == [2, 1]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            'fill={column: 0}, or missing="zero-update" keeps them',
            "--fill COLUMN=0, or --missing zero-update keeps them",
        ),
        ("""timestamps={'t': "hours since 2026-01-01"} counts""", '--timestamps "t=hours since 2026-01-01" counts'),
        ("categories={column: [values]} or", "--categories COLUMN=A,B,... or"),
        ("one width with lengths={'t': 128}", "one width with --lengths t=128"),
        ("'a.csv' has no rows", "'a.csv' has no rows"),
    ],
)
def test_a_message_in_pythons_words_becomes_one_in_flags(said, expected):
    with pytest.raises(SettingError) as error, _in_flags():
        raise SettingError(said)
    assert str(error.value) == expected
