import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from samples import LOCAL, cross_entropy, linear_model, small_population

from clipline import Ledger, Population, Training
from clipline.errors import RunError
from clipline.tasks.handwriting.task import TASK
from clipline.training.directory_lock import DirectoryLock
from clipline.training.run_directory import CHECKPOINT, LEDGER, METRICS, RunDirectory


def training(noise_source="seed", rounds=6, population=None):
    return Training(
        linear_model(dtype=torch.float32),
        cross_entropy,
        population or small_population(),
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


def crashed_run(path, noise_source, after, population=None):
    """A run that dies once `after` rounds are written; gives its settings."""
    settings = TASK.settings.overridden({"noise_source": noise_source}, "the test")
    run = training(noise_source, population=population)
    with RunDirectory(path, settings, run) as directory:

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
    from clipline.training.checkpoint import save_checkpoint

    whole = RunDirectory(tmp_path / "other", settings, run)
    save_checkpoint(tmp_path / "r" / CHECKPOINT, states[2], str(whole.circumstances))  # three rounds
    directory, state = RunDirectory.reopen(tmp_path / "r", settings, run)
    assert (state.round_index, state.ledger.rounds) == (3, 4)
    result = training("system").run(observe=directory.write_round, state=state)
    directory.close()
    whole.close()
    assert result.guarantee.rounds == 7  # six that count and one that was released twice
    assert Ledger.read(tmp_path / "r" / LEDGER) == result.state.ledger


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path):
    settings = crashed_run(tmp_path / "r", "system", 4)
    with (tmp_path / "r" / LEDGER).open("a") as file:
        file.write('{"version": 1, "rou')
    directory, state = RunDirectory.reopen(tmp_path / "r", settings, training("system"))
    directory.close()
    assert state.ledger.rounds == 4
    assert Ledger.read(tmp_path / "r" / LEDGER).rounds == 4


def test_a_lost_ledger_is_restored_from_the_checkpoint(tmp_path):
    settings = crashed_run(tmp_path / "r", "seed", 4)
    (tmp_path / "r" / LEDGER).unlink()
    directory, state = RunDirectory.reopen(tmp_path / "r", settings, training())
    directory.close()
    assert Ledger.read(tmp_path / "r" / LEDGER) == state.ledger


def test_rounds_that_were_once_charged_stay_charged_when_a_replay_ends_early(tmp_path):
    settings = crashed_run(tmp_path / "r", "seed", 5)  # checkpoint at 4, five rounds in the ledger
    run = training(rounds=4)
    directory, state = RunDirectory.reopen(tmp_path / "r", settings, run)
    result = directory.charged(run.run(observe=directory.write_round, state=state), run)
    directory.close()
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


# What must be the same -----------------------------------------------------------------------------------------------

CHANGED = "the data have changed: restore them, or start a new run"


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def corrected(population, user=7):
    """The same population but for one value of one user, which is a little larger."""
    x = np.array(population.fields["x"])
    x[int(population.offsets[user]), 2] += 1e-9
    return Population(population.offsets, {**population.fields, "x": x}, population.user_ids)


@pytest.mark.parametrize("noise_source", ["seed", "system"])
def test_a_run_whose_data_were_corrected_in_one_value_of_one_user_is_not_resumed(tmp_path, noise_source):
    settings = crashed_run(tmp_path / "r", noise_source, 4)
    before, population = contents(tmp_path / "r"), corrected(small_population())
    with pytest.raises(RunError) as error:
        RunDirectory.reopen(tmp_path / "r", settings, training(noise_source, population=population))
    path = str(tmp_path / "r" / CHECKPOINT)
    assert str(error.value) == f"{path!r} cannot be resumed, {CHANGED}"  # and not a word more about them
    assert contents(tmp_path / "r") == before


@pytest.mark.parametrize("kind", ["renamed", "moved rows", "another type", "another field name"])
def test_a_run_on_other_users_or_other_fields_is_not_resumed(tmp_path, kind):
    settings = crashed_run(tmp_path / "r", "seed", 4)
    same = small_population()
    offsets, fields, ids = same.offsets.copy(), dict(same.fields), same.user_ids.copy()
    if kind == "renamed":
        ids[3] = 1000
    elif kind == "moved rows":
        offsets[5] -= 1  # a row of one user now belongs to the next
    elif kind == "another type":
        fields["x"] = fields["x"].astype(np.float32)
    else:
        fields["z"] = fields["y"]
    with pytest.raises(RunError, match=CHANGED):
        RunDirectory.reopen(tmp_path / "r", settings, training(population=Population(offsets, fields, ids)))


def test_equal_data_are_resumed_wherever_they_lie(tmp_path):
    population = small_population()
    settings = crashed_run(tmp_path / "r", "seed", 4, Population.open(population.save(tmp_path / "store")))
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    for same in (Population.open(tmp_path / "elsewhere"), population):
        directory, state = RunDirectory.reopen(tmp_path / "r", settings, training(population=same))
        directory.close()
        assert state.round_index == 4


def test_the_folder_of_the_data_and_what_changes_no_release_may_differ(tmp_path):
    settings = crashed_run(tmp_path / "r", "seed", 4)
    other = replace(settings, data="elsewhere", workers=2, unprivate_timing=True)
    directory, state = RunDirectory.reopen(tmp_path / "r", other, training())
    directory.close()
    assert state.round_index == 4


@pytest.mark.parametrize(
    ("target", "value", "words"),
    [
        ("numpy.__version__", "0.9", r"'numpy version: .*' then, 'numpy version: 0\.9' now"),
        ("torch.__version__", "0.9.0", r"'torch version: .*' then, 'torch version: 0\.9\.0' now"),
        ("clipline.training.circumstances.__version__", "0.9", r"then, 'clipline version: 0\.9' now"),
        ("torch.backends.cpu.get_cpu_capability", lambda: "ABACUS", "'device in use: cpu, .* ABACUS' now"),
    ],
)  # fmt: skip
def test_another_version_or_processor_is_refused_by_name(tmp_path, monkeypatch, target, value, words):
    settings = crashed_run(tmp_path / "r", "seed", 4)
    monkeypatch.setattr(target, value)
    with pytest.raises(RunError, match=words):
        RunDirectory.reopen(tmp_path / "r", settings, training())


def test_another_engine_and_other_routines_are_refused_by_name(tmp_path):
    settings = crashed_run(tmp_path / "r", "seed", 4)
    run = training()
    run.algorithm = replace(run.algorithm, clients=run.plain)
    with pytest.raises(RunError, match="'engine in use: Stacked' then, 'engine in use: OneByOne' now"):
        RunDirectory.reopen(tmp_path / "r", settings, run)
    run = training()
    run.plain.noted = {"weight"}  # as where a parameter has row_fields
    with pytest.raises(RunError, match="'C routines: not in use' then, 'C routines: in use' now"):
        RunDirectory.reopen(tmp_path / "r", settings, run)


def test_the_first_line_that_differs_is_named_however_many_lines_there_are(tmp_path):
    settings = crashed_run(tmp_path / "r", "seed", 4)
    with pytest.raises(RunError, match=r"'nothing' then, 'delta = 1e-05' now"):
        RunDirectory.reopen(tmp_path / "r", replace(settings, delta=1e-5), training())


def test_a_new_run_does_not_wait_for_the_fingerprint_but_its_first_checkpoint_does(tmp_path, monkeypatch):
    import threading

    may_end = threading.Event()
    monkeypatch.setattr(Population, "fingerprint", lambda self: "f" * 64 if may_end.wait(60) else "late")
    run = training()
    with RunDirectory(tmp_path / "r", TASK.settings, run) as directory:

        def observe(report, state):
            if state.round_index == 2:  # the first that is evaluated
                assert not (tmp_path / "r" / CHECKPOINT).exists()
                may_end.set()
            directory.write_round(report, state)

        run.run(observe=observe)
    assert b"unprivate data fingerprint: ffff" in (tmp_path / "r" / CHECKPOINT).read_bytes()


def test_a_fingerprint_that_fails_is_no_checkpoint_without_one(tmp_path, monkeypatch):
    def fails(self):
        raise OSError("the drive is gone")

    monkeypatch.setattr(Population, "fingerprint", fails)
    run = training()
    with RunDirectory(tmp_path / "r", TASK.settings, run) as directory, pytest.raises(OSError, match="the drive is"):
        run.run(observe=directory.write_round)
    assert not (tmp_path / "r" / CHECKPOINT).exists()


def test_a_finished_run_keeps_no_fingerprint(tmp_path):
    run = training()
    directory = RunDirectory(tmp_path / "r", TASK.settings, run)
    directory.finish(run.run(observe=directory.write_round), "accuracy", "test")
    fingerprint = small_population().fingerprint().encode()
    assert not any(fingerprint in file for file in contents(tmp_path / "r").values())


# Time ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [False, True])
def test_seconds_are_stored_only_where_the_settings_ask_for_them(tmp_path, asked):
    run = training()
    directory = RunDirectory(tmp_path / "r", replace(TASK.settings, unprivate_timing=asked), run)
    result = run.run(observe=directory.write_round)
    directory.finish(result, "accuracy", "test")
    lines = [json.loads(line) for line in (tmp_path / "r" / METRICS).read_text().splitlines()]
    names = {"round", "clip", "fraction_within", "epsilon", "delta"} | ({"unprivate_seconds"} if asked else set())
    assert [line.keys() - {"accuracy"} for line in lines] == [names] * 6
    if asked:
        assert [line["unprivate_seconds"] for line in lines] == [round(r.unprivate_seconds, 6) for r in result.reports]


# The lock ------------------------------------------------------------------------------------------------------------

TAKEN = "another process is at work there"


def test_a_run_directory_is_locked_until_it_is_finished_or_closed(tmp_path):
    run = training()
    directory = RunDirectory(tmp_path / "r", TASK.settings, run)
    before = contents(tmp_path / "r")
    with pytest.raises(RunError, match=TAKEN):
        RunDirectory.reopen(tmp_path / "r", TASK.settings, run)
    assert contents(tmp_path / "r") == before
    directory.finish(run.run(observe=directory.write_round), "accuracy", "test")
    DirectoryLock(tmp_path / "r").close()


def test_an_empty_folder_in_which_another_process_begins_is_refused_and_stays_empty(tmp_path):
    with DirectoryLock(tmp_path), pytest.raises(RunError, match=TAKEN):
        RunDirectory(tmp_path, TASK.settings, training())
    assert list(tmp_path.iterdir()) == []
    RunDirectory(tmp_path, TASK.settings, training()).close()


def test_who_is_refused_does_not_keep_the_lock(tmp_path):
    settings = crashed_run(tmp_path / "r", "seed", 4)
    with pytest.raises(RunError, match="the data have changed") as kept:  # and with it the frames of the call
        RunDirectory.reopen(tmp_path / "r", settings, training(population=corrected(small_population())))
    directory, _ = RunDirectory.reopen(tmp_path / "r", settings, training())
    directory.close()
    assert kept


def test_the_lock_that_was_taken_before_reading_the_settings_is_handed_on(tmp_path):
    settings = crashed_run(tmp_path / "r", "seed", 4)
    lock = DirectoryLock(tmp_path / "r")
    directory, _ = RunDirectory.reopen(tmp_path / "r", settings, training(), lock)
    with pytest.raises(RunError, match=TAKEN):
        DirectoryLock(tmp_path / "r")
    directory.close()
    DirectoryLock(tmp_path / "r").close()


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
