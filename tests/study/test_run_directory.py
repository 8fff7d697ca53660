import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from samples import LOCAL, cross_entropy, linear_model, small_population

from clipline import Ledger, Training
from clipline.errors import RunError
from clipline.study.run_directory import CHECKPOINT, LEDGER, METRICS, RunDirectory
from clipline.tasks.handwriting import TASK


def training(noise_source="seed", rounds=6):
    return Training(
        linear_model(dtype=torch.float32),
        cross_entropy,
        small_population(),
        rounds=rounds,
        cohort_size=20,
        local=LOCAL,
        seed=3,
        noise_multiplier=0.5,
        noise_source=noise_source,
        evaluate=lambda model: {"accuracy": 0.5},
        evaluate_every=2,
    )


class Crash(Exception):
    pass


def crashed_run(path, noise_source, after):
    """A run that dies once `after` rounds are written; gives its settings."""
    settings = TASK.settings.overridden({"noise_source": noise_source}, "the test")
    run = training(noise_source)
    directory = RunDirectory(path, settings, run)

    def observe(report, state):
        directory.write_round(report, state)
        if state.round_index == after:
            raise Crash

    with pytest.raises(Crash):
        run.run(observe=observe)
    return settings


@pytest.mark.parametrize("after", [3, 4, 5])
def test_a_crashed_run_replays_from_its_seed_and_charges_every_round_once(tmp_path, after):
    settings = crashed_run(tmp_path / "r", "seed", after)
    directory, state = RunDirectory.reopen(tmp_path / "r", settings, training())
    assert state.round_index == after - after % 2  # the last evaluated round
    result = training().run(observe=directory.write_round, state=state)
    directory.finish(result, "accuracy", "test")
    whole = training().run()
    assert torch.equal(result.state.params, whole.state.params)
    assert Ledger.read(tmp_path / "r" / LEDGER) == whole.state.ledger
    rounds = [json.loads(line)["round"] for line in (tmp_path / "r" / METRICS).read_text().splitlines()]
    assert rounds == list(range(6))


def test_rounds_that_cannot_be_replayed_stay_charged(tmp_path):
    settings = crashed_run(tmp_path / "r", "system", 4)
    # The checkpoint of round 4 was lost, its ledger line was not: the release may have been seen.
    (tmp_path / "r" / CHECKPOINT).unlink()
    run, states = training("system"), []
    run.run(observe=lambda report, state: states.append(state))
    from clipline.federated.checkpoint import save_checkpoint

    whole = RunDirectory(tmp_path / "other", settings, run)
    save_checkpoint(tmp_path / "r" / CHECKPOINT, states[2], whole.circumstances)  # three rounds
    directory, state = RunDirectory.reopen(tmp_path / "r", settings, run)
    assert (state.round_index, state.ledger.rounds) == (3, 4)
    result = training("system").run(observe=directory.write_round, state=state)
    assert result.guarantee.rounds == 7  # six that count and one that was released twice
    assert Ledger.read(tmp_path / "r" / LEDGER) == result.state.ledger


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path):
    settings = crashed_run(tmp_path / "r", "system", 4)
    with (tmp_path / "r" / LEDGER).open("a") as file:
        file.write('{"version": 1, "rou')
    _, state = RunDirectory.reopen(tmp_path / "r", settings, training("system"))
    assert state.ledger.rounds == 4
    assert Ledger.read(tmp_path / "r" / LEDGER).rounds == 4


def test_a_lost_ledger_is_restored_from_the_checkpoint(tmp_path):
    settings = crashed_run(tmp_path / "r", "seed", 4)
    (tmp_path / "r" / LEDGER).unlink()
    _, state = RunDirectory.reopen(tmp_path / "r", settings, training())
    assert Ledger.read(tmp_path / "r" / LEDGER) == state.ledger


def test_rounds_that_were_once_charged_stay_charged_when_a_replay_ends_early(tmp_path):
    settings = crashed_run(tmp_path / "r", "seed", 5)  # checkpoint at 4, five rounds in the ledger
    run = training(rounds=4)
    directory, state = RunDirectory.reopen(tmp_path / "r", settings, run)
    result = directory.charged(run.run(observe=directory.write_round, state=state), run)
    assert (result.state.round_index, result.guarantee.rounds) == (4, 5)
    assert Ledger.read(tmp_path / "r" / LEDGER).rounds == 5


def test_other_settings_than_those_of_the_checkpoint_are_refused(tmp_path):
    settings = crashed_run(tmp_path / "r", "seed", 4)
    other = settings.overridden({"client_lr": 0.4}, "the test")
    with pytest.raises(RunError, match=r"'client_lr = 0\.5' then, 'client_lr = 0\.4' now"):
        RunDirectory.reopen(tmp_path / "r", other, training())


def test_a_ledger_of_another_run_is_refused(tmp_path):
    settings = crashed_run(tmp_path / "r", "seed", 4)
    text = (tmp_path / "r" / LEDGER).read_text().replace('"noise_multiplier": 0.5', '"noise_multiplier": 700.0')
    (tmp_path / "r" / LEDGER).write_text(text)
    with pytest.raises(RunError, match="holds rounds of another run"):
        RunDirectory.reopen(tmp_path / "r", settings, training())


def test_damaged_metrics_do_not_stop_a_run_from_going_on(tmp_path):
    settings = crashed_run(tmp_path / "r", "seed", 4)
    with (tmp_path / "r" / METRICS).open("ab") as file:
        file.write(b'{"round": \xff\n not json \n')
    run = training()
    directory, state = RunDirectory.reopen(tmp_path / "r", settings, run)
    directory.finish(run.run(observe=directory.write_round, state=state), "accuracy", "test")
    assert (tmp_path / "r" / "curves.png").exists()


def test_a_finished_run_has_nothing_to_resume(tmp_path):
    settings = TASK.settings
    run = training()
    directory = RunDirectory(tmp_path / "r", settings, run)
    directory.finish(run.run(observe=directory.write_round), "accuracy", "test")
    with pytest.raises(RunError, match="finished, or never reached a checkpoint"):
        RunDirectory.reopen(tmp_path / "r", settings, run)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {**tensors, "params": tensors["params"][:3]},
        lambda tensors: {**tensors, "params": tensors["params"].double()},
        lambda tensors: {"params": tensors["params"]},
        lambda tensors: {**tensors, "server.momentum": tensors["server.momentum"][:3]},
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, change):
    settings = crashed_run(tmp_path / "r", "seed", 3)
    path = tmp_path / "r" / CHECKPOINT
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, path, metadata)
    with pytest.raises(RunError, match="holds tensors of another model: start the run again"):
        RunDirectory.reopen(tmp_path / "r", settings, training())


def test_lines_too_deep_for_python_are_damaged_lines(tmp_path):
    settings = crashed_run(tmp_path / "r", "seed", 3)
    (tmp_path / "r" / METRICS).write_text("[" * 100_000 + "\n")
    RunDirectory.reopen(tmp_path / "r", settings, training())
    assert (tmp_path / "r" / METRICS).read_text() == ""
    (tmp_path / "r" / LEDGER).write_text("[" * 100_000 + "\n")
    with pytest.raises(RunError, match="line 1: not a line of JSON"):
        RunDirectory.reopen(tmp_path / "r", settings, training())
