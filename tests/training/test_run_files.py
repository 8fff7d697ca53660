import json

import pytest
from samples import small_training

from clipline import Evaluate, RunDirectory
from clipline.errors import RunError
from clipline.training.run_files import is_run_directory, read_facts, read_run


@pytest.fixture
def run(tmp_path):
    measuring = Evaluate(lambda model: {"accuracy": 0.5}, every=1)
    small_training(3).run([measuring, RunDirectory(tmp_path / "r", facts={"data": "own"})])
    return tmp_path / "r"


def test_a_run_is_read_as_it_was_written(run):
    training = small_training(3)
    read = read_run(run)
    assert is_run_directory(run)
    assert (read.settings["rounds"], read.settings["local.lr"], read.facts) == (3, training.local.lr, {"data": "own"})
    assert not any(name.startswith("facts") for name in (*read.settings, *read.notes))
    assert (read.notes["delta"], read.notes["parameters"]) == (training.delta, training.dim)
    assert [(one["round"], one["accuracy"]) for one in read.rounds] == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert read.ledger == training.init().ledger.add(training.algorithm.event, 3)
    assert (read.card["stopped"], read.card["guarantee"]["rounds"], read.problems) == ("finished", 3, [])
    assert read_facts(run) == {"data": "own"}


def test_what_is_cut_short_belongs_to_a_round_that_was_never_released(run):
    for name in ("metrics.jsonl", "ledger.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"round": 3, "ver')
    read = read_run(run)
    assert (len(read.rounds), read.ledger.rounds, read.problems) == (3, 3, [])


LATER = json.dumps({"round": 1, "clip": 7.0, "fraction_within": None}) + "\n"


def test_what_cannot_be_read_is_left_out_and_named(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('no json\n[1]\n{"round": -1}\n' + LATER)
    (run / "ledger.jsonl").write_text("{}\n")
    (run / "settings.toml").write_text("= broken")
    (run / "model.safetensors").write_text("none")
    read = read_run(run)
    assert (read.settings, read.ledger, read.card) == ({}, None, {})
    assert [one["clip"] for one in read.rounds][1] == 7.0  # a round that comes twice counts as it came last
    settings, ledger, metrics = read.problems
    assert settings.startswith("settings.toml cannot be read")
    assert ledger.startswith("ledger.jsonl cannot be read")
    assert metrics == "3 of 7 lines of metrics.jsonl are damaged and left out"
    with pytest.raises(RunError, match="restore it, or give the facts again"):
        read_facts(run)


def test_a_folder_without_a_run(tmp_path):
    assert not is_run_directory(tmp_path)
    assert read_facts(tmp_path) == {}
    assert len(read_run(tmp_path).problems) == 3
