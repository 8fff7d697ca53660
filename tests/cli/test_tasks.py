import json
import re

import pytest
from safetensors import safe_open

from clipline.tasks import task_names


def test_every_task_is_listed_with_what_the_paper_prints(clipline):
    out, _ = clipline.ok("tasks", "--json")
    listed = {task["name"]: task for task in json.loads(out)}
    assert tuple(listed) == task_names()
    wanted = {"name", "parameters", "users", "rounds", "client_lr", "server_lr", "clip_min", "clip_max", "data"}
    assert all(wanted <= set(task) for task in listed.values())
    assert listed["so_lr"]["parameters"] == 5_000_500
    assert listed["so_lr"]["client_lr"] == 10**2.5
    assert (listed["cifar100"]["clip_min"], listed["cifar100"]["clip_max"]) == (0.75, 2.2)
    assert {task["data"] for task in listed.values()} == {"embedded", "stand-in"}


def test_the_list_is_a_table(clipline):
    code, out, _ = clipline("tasks")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["name", "parameters", "users", "rounds", "client_lr", "server_lr", "data"]
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[1:]] == list(task_names())
    assert lines[-2].split() == [
        "so_lr", "5,000,500", "342,477", "1,500", "316", "1.78", "1,000", "stand-ins",
    ]  # fmt: skip


def test_a_stand_in_is_called_one_wherever_a_result_shows(clipline, tmp_path):
    few = ["--population-size", 6, "--cohort-size", 3, "--rounds", 1, "--test-users", 2, "--sampling", "fixed"]
    out, err = clipline.ok("train", "emnist_ae", *few, "--evaluate-on", "test", "--out", "run")
    assert "preparing stand-in for EMNIST-62 by writer: 6 drawn writers" in err
    assert re.search(r"^result +mean_squared_error 0\..* outside the training population \(test\)$", out, re.MULTILINE)
    assert "\ndata       a stand-in" in out
    with safe_open(tmp_path / "run" / "model.safetensors", framework="numpy") as file:
        assert file.metadata()["data"] == "stand-in"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cifar100", "--classes", "10"], "--classes 10 must be left out, as task 'cifar100' has no such setting"),
        (["handwriting", "--test-users", "10"], "--test-users 10 must be left out"),
        (["so_lr", "--test-users", "1"], "--test-users 1 must be a whole number at least 2"),
        (["so_lr", "--evaluate-on", "train"], "--evaluate-on 'train' must be one of validation, test, original"),
        (["emnist"], "did you mean 'emnist_"),
    ],
)
def test_what_a_task_has_not_is_refused_in_one_sentence(clipline, tmp_path, arguments, words):
    err = clipline.refused("train", *arguments, "--out", "run")
    assert words in err.splitlines()[-1]
    assert not (tmp_path / "run").exists()
