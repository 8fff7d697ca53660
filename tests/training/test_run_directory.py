import json
import os
import re
import shutil
import signal
import tomllib
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from samples import LOCAL, cross_entropies, small_population
from samples import linear_float32 as linear

from clipline import FixedClip, Population, QuantileClip, ServerSGD, Training, run_together
from clipline.errors import ModuleError, RunError, SettingError
from clipline.federated.clip_controllers import ClipState
from clipline.privacy import Ledger
from clipline.training.callbacks import Callback, StopOnInterrupt
from clipline.training.checkpoint import (
    Circumstances,
    DamagedCheckpointWarning,
    load_checkpoint,
    model_fingerprint,
)
from clipline.training.durable import DirectoryLock, partial_path, save_tensors
from clipline.training.evaluation import Evaluate
from clipline.training.options import Compute, Privacy
from clipline.training.run_directory import (
    CHECKPOINT,
    CURVES,
    KEY,
    LEDGER,
    METRICS,
    MODEL,
    OLDER,
    SETTINGS,
    RunDirectory,
    check_free,
    directory_first,
)


def training(noise_source="seed", rounds=6, population=None, **changes):
    privacy = Privacy(noise_multiplier=0.5, noise_source=noise_source)
    settings = {"local": LOCAL, "seed": 3, "privacy": privacy, "server": ServerSGD()}
    return Training(
        changes.pop("model", None) or linear(),
        cross_entropies,
        population or small_population(),
        rounds=rounds,
        cohort_size=20,
        **{**settings, **changes},
    )


def measured():
    return Evaluate(lambda model: {"accuracy": 0.5}, every=2)


class Crash(Exception):
    pass


class Crashing(Callback):
    """Fails once this many rounds are written."""

    def __init__(self, after):
        self.after = after

    def on_round(self, report, state):
        if state.round_index == self.after:
            raise Crash


class StopAtOnce(Callback):
    stop_requested = True


class Each(Callback):
    """Calls a function after every round."""

    def __init__(self, function):
        self.on_round = function


def crashed_run(path, noise_source="seed", after=4, population=None, **given):
    """A run that dies once `after` rounds are written."""
    with pytest.raises(Crash):
        training(noise_source, population=population).run([RunDirectory(path, **given), measured(), Crashing(after)])


def reopened(path, run, **given):
    """The state that a resume would begin with."""
    with closing(RunDirectory(path, **given)) as directory:
        return directory.reopen(run)


def circumstances(noise_source="seed"):
    return str(Circumstances(training(noise_source)))


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# New runs -----------------------------------------------------------------------------------------------------------


def test_a_run_of_the_library_leaves_everything_that_a_reviewer_needs(real_curves, tmp_path):
    directory = RunDirectory(tmp_path / "r", facts={"task": "rides", "measured_on": "other riders"})
    result = training().run([measured(), directory])
    assert sorted(file.name for file in (tmp_path / "r").iterdir()) == [CURVES, LEDGER, METRICS, MODEL, SETTINGS]
    assert (tmp_path / "r" / CURVES).stat().st_size > 10_000  # a figure
    assert Ledger.read(tmp_path / "r" / LEDGER) == result.state.ledger
    assert [line["round"] for line in lines(tmp_path / "r" / METRICS)] == list(range(6))
    assert [line.get("accuracy") for line in lines(tmp_path / "r" / METRICS)] == [None, 0.5] * 3
    assert torch.equal(load_file(tmp_path / "r" / MODEL)["weight"], result.model.weight)
    with safe_open(tmp_path / "r" / MODEL, "pt") as file:
        kept = {"guarantee": str(result.guarantee), "task": "rides", "measured_on": "other riders"}
        stored = file.metadata()
    card = json.loads(stored.pop("card"))
    assert len(stored.pop("checksum")) == 64
    assert stored == kept
    assert (card["facts"], card["metrics"]) == ({"task": "rides", "measured_on": "other riders"}, {"accuracy": 0.5})


def test_without_a_seed_noise_comes_from_the_system_and_the_run_can_be_resumed(tmp_path):
    def unseeded():
        privacy = Privacy(noise_multiplier=0.5)
        return Training(
            linear(), cross_entropies, small_population(), rounds=6, cohort_size=20, local=LOCAL, privacy=privacy
        )

    with pytest.raises(Crash):
        unseeded().run([RunDirectory(tmp_path / "r"), Crashing(4)])
    settings = tomllib.loads((tmp_path / "r" / SETTINGS).read_text())
    assert settings["privacy"]["noise_source"] == "system"
    assert "seed" not in settings
    result = unseeded().resume(tmp_path / "r")  # made anew, as another process would
    assert (result.state.round_index, result.stopped) == (6, "finished")
    assert Ledger.read(tmp_path / "r" / LEDGER).rounds == result.guarantee.rounds == 6  # a checkpoint after each round
    with safe_open(tmp_path / "r" / MODEL, "pt") as file:
        assert "seed" not in file.metadata()["guarantee"]


def test_a_path_that_is_none_is_refused_in_a_sentence():
    for path in (None, 3, ""):
        with pytest.raises(SettingError, match=r"path=.* must be the path of a folder: give RunDirectory\('runs"):
            RunDirectory(path)
        with pytest.raises(SettingError, match="must be the path of a folder"):
            training().resume(path)


def test_the_settings_describe_the_training_and_what_followed(tmp_path):
    run = training(clip=QuantileClip(0.7), server=ServerSGD(0.5), compute=Compute(row_fields={}))
    run.run([RunDirectory(tmp_path / "r", facts={"data": "drawn"})])
    text = (tmp_path / "r" / SETTINGS).read_text()
    settings = tomllib.loads(text)
    if os.name == "posix":
        assert (tmp_path / "r" / SETTINGS).stat().st_mode & 0o077 == 0  # who reads the seed can subtract the noise
    assert (settings["rounds"], settings["cohort_size"], settings["seed"]) == (6, 20, 3)
    assert settings["local"] == {
        "type": "LocalSGD", "lr": 0.2, "batch_size": 8, "epochs": 1, "reduction": "mean", "weight_decay": 0.0,
        "proximal": 0.0, "momentum": 0.0,
    }  # fmt: skip
    assert settings["clip"] == {
        "type": "QuantileClip", "quantile": 0.7, "start": 0.1, "lr": 0.2, "rule": "geometric", "clamp_fraction": False,
    }  # fmt: skip
    assert settings["server"] == {"type": "ServerSGD", "lr": 0.5, "momentum": 0.9}
    assert settings["privacy"] == {
        "type": "Privacy", "noise_multiplier": 0.5, "sampling": "poisson", "noise_source": "seed",
    }  # fmt: skip
    assert settings["compute"]["engine"] == "auto"
    assert settings["facts"] == {"data": "drawn"}
    assert "# count_stddev = 2.665" in text  # resolved; 20 / 20 would cost 3.3% of noise
    assert "# users = 60" in text


def test_a_declared_number_of_users_keeps_the_real_one_out_of_the_settings(tmp_path):
    privacy = Privacy(noise_multiplier=0.5, population_size=59)
    training(privacy=privacy).run([RunDirectory(tmp_path / "r")])
    text = (tmp_path / "r" / SETTINGS).read_text()
    assert "population_size = 59" in text
    assert "users" not in text


class OwnClip:
    """A controller that somebody has written: always the same clip."""

    needs_fraction = False

    def __init__(self, clip):
        self.clip, self._seen = clip, torch.zeros(1)

    def init(self):
        return ClipState(self.clip)

    def update(self, state, release):
        return ClipState(self.clip, state.round_index + 1)


def test_an_own_controller_is_recorded_and_compared_by_class_and_numbers(tmp_path):
    training(clip=OwnClip(0.25)).run([RunDirectory(tmp_path / "r")])
    assert tomllib.loads((tmp_path / "r" / SETTINGS).read_text())["clip"] == {
        "type": f"{OwnClip.__module__}.OwnClip",
        "clip": 0.25,
    }
    with pytest.raises(Crash):
        training(clip=OwnClip(0.25)).run([RunDirectory(tmp_path / "c"), measured(), Crashing(4)])
    with pytest.raises(RunError, match=r"'clip\.clip = 0\.25' then, 'clip\.clip = 0\.5' now"):
        reopened(tmp_path / "c", training(clip=OwnClip(0.5)))


def test_settings_that_are_handed_in_are_stored_as_they_are(tmp_path):
    training().run([RunDirectory(tmp_path / "r", settings='task = "mine"\n')])
    assert (tmp_path / "r" / SETTINGS).read_text().startswith('task = "mine"\n\n# Resolved when the run began:\n')


def test_a_folder_in_use_is_refused_and_stays_as_it_was(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(RunError, match="must be a folder that is new or empty, and it holds files: give another"):
        training().run([RunDirectory(tmp_path)])
    assert contents(tmp_path) == {"mine.txt": b"keep me"}


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_done(tmp_path):
    (tmp_path / "file").write_text("keep me")
    with pytest.raises(RunError, match=r"cannot be made, as nothing can be written into .*file': give a folder"):
        check_free(tmp_path / "file" / "deep" / "run")
    check_free(tmp_path / "new" / "run")
    assert contents(tmp_path) == {"file": b"keep me"}


def test_the_ledger_is_written_before_any_other_callback_hears_of_the_round(tmp_path):
    seen = []

    def look(report, state):
        seen.append(Ledger.read(tmp_path / "r" / LEDGER).rounds - state.ledger.rounds)

    training().run([Each(look), RunDirectory(tmp_path / "r"), measured()])  # whatever the order of the list
    assert len(seen) == 6
    assert min(seen) >= 0  # the next round may be on record too


def test_the_ledger_line_comes_before_the_metrics_line_and_the_checkpoint(tmp_path, monkeypatch):
    def fails(report, timing):
        raise Crash

    monkeypatch.setattr("clipline.training.run_directory.round_json", fails)
    with pytest.raises(Crash):
        training("system").run([RunDirectory(tmp_path / "r")])
    assert Ledger.read(tmp_path / "r" / LEDGER).rounds == 1
    assert (tmp_path / "r" / METRICS).read_text() == ""
    assert load_checkpoint(tmp_path / "r" / CHECKPOINT, "cpu", circumstances("system")).round_index == 0


def test_a_run_from_a_given_state_begins_with_the_ledger_of_that_state(tmp_path):
    states = {}
    training().run([Each(lambda report, state: states.setdefault(state.round_index, state))])
    result = training().run([RunDirectory(tmp_path / "r")], state=states[4])
    assert Ledger.read(tmp_path / "r" / LEDGER) == result.state.ledger
    assert [line["round"] for line in lines(tmp_path / "r" / METRICS)] == [4, 5]


@pytest.mark.parametrize("every", [1, 3])
def test_without_metrics_there_is_a_checkpoint_every_so_many_rounds(tmp_path, every):
    with pytest.raises(Crash):
        training().run([RunDirectory(tmp_path / "r", checkpoint_every=every), Crashing(5)])
    assert reopened(tmp_path / "r", training()).round_index == 5 - 5 % every


def test_a_run_that_fails_in_its_first_round_can_be_resumed(tmp_path):
    class Fails(Callback):
        def on_release(self, state):
            raise Crash

    with pytest.raises(Crash):
        training().run([RunDirectory(tmp_path / "r"), Fails()])
    result = training().resume(tmp_path / "r")
    assert torch.equal(result.state.params, training().run().state.params)
    assert result.guarantee.rounds == 6


@pytest.mark.parametrize("damaged", [(CHECKPOINT,), (CHECKPOINT, OLDER)])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_every_round_stays_charged(tmp_path, damaged):
    crashed_run(tmp_path / "r", "seed", 5)  # checkpoints at 2 and 4, five rounds charged
    for name in damaged:
        path = tmp_path / "r" / name
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    if len(damaged) == 2:
        with pytest.raises(RunError, match="is damaged, its checksum is that of other content: start the run again"):
            training().resume(tmp_path / "r")
        return
    with pytest.warns(DamagedCheckpointWarning, match="goes on from the checkpoint before it, after 2 rounds"):
        result = training().resume(tmp_path / "r", [StopAtOnce()])
    assert (result.state.round_index, result.guarantee.rounds) == (2, 5)
    assert Ledger.read(tmp_path / "r" / LEDGER).rounds == 5
    assert torch.equal(training().resume(tmp_path / "r").state.params, training().run().state.params)


def test_what_cut_writes_left_is_gone_after_a_resume_and_at_the_end(tmp_path):
    crashed_run(tmp_path / "r")
    left = [partial_path(tmp_path / "r" / CHECKPOINT), tmp_path / "r" / ".tmpX7ab3Q"]  # the second is safetensors'
    for path in left:
        path.write_text("private")
    reopened(tmp_path / "r", training())
    assert not [path for path in left if path.exists()]

    def cut(report, state):
        for path in left:
            path.write_text("private")

    training().resume(tmp_path / "r", [Each(cut)])
    assert sorted(file.name for file in (tmp_path / "r").iterdir()) == [CURVES, LEDGER, METRICS, MODEL, SETTINGS]


@pytest.mark.parametrize("rounds", [6, 100])  # charged one by one; and ahead
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda file: file.unlink(), "is gone"),
        (lambda file: file.write_text(file.read_text() + file.read_text()), r"has [\d,]+ bytes, and this run has"),
        (lambda file: file.write_text(""), "has 0 bytes, and this run has written"),
    ],
)
def test_a_ledger_that_is_changed_under_the_run_ends_it(tmp_path, rounds, change, words):
    def changed(report, state):
        if state.round_index == 3:
            change(tmp_path / "r" / LEDGER)

    with pytest.raises(RunError, match=rf"ledger.jsonl' was changed under the run: it {words}.*rounds were charged"):
        training(rounds=rounds).run([RunDirectory(tmp_path / "r"), Each(changed)])
    assert not (tmp_path / "r" / MODEL).exists()
    assert (tmp_path / "r" / CHECKPOINT).exists()


# Resume -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [3, 4, 5])
def test_a_crashed_run_replays_from_its_seed_and_charges_every_round_once(tmp_path, after):
    crashed_run(tmp_path / "r", "seed", after)
    assert reopened(tmp_path / "r", training()).round_index == after - after % 2  # the last evaluated round
    result = training().resume(tmp_path / "r", [measured()])
    whole = training().run()
    assert torch.equal(result.state.params, whole.state.params)
    assert result.guarantee == whole.guarantee
    assert Ledger.read(tmp_path / "r" / LEDGER) == whole.state.ledger
    assert [line["round"] for line in lines(tmp_path / "r" / METRICS)] == list(range(6))
    assert sorted(file.name for file in (tmp_path / "r").iterdir()) == [CURVES, LEDGER, METRICS, MODEL, SETTINGS]


def test_rounds_that_cannot_be_replayed_stay_charged(tmp_path):
    crashed_run(tmp_path / "r", "system", 4)
    written = Ledger.read(tmp_path / "r" / LEDGER).rounds  # 4, or 5 where the next had been released
    # The last checkpoint and the key were lost, the ledger's lines were not: the releases may have been seen.
    (tmp_path / "r" / CHECKPOINT).unlink()
    (tmp_path / "r" / KEY).unlink()
    with pytest.warns(DamagedCheckpointWarning, match="after 2 rounds"):
        state = reopened(tmp_path / "r", training("system"))
    assert (state.round_index, state.ledger.rounds) == (2, written)
    result = training("system").resume(tmp_path / "r")
    assert result.guarantee.rounds == 6 + written - 2  # six that count, and those that were released twice
    assert Ledger.read(tmp_path / "r" / LEDGER) == result.state.ledger


def run_under(key, rounds=6):
    """What an uninterrupted run under this key gives."""
    whole = training("system", rounds)
    whole.key.restore(key)
    return whole._run([], None, again=True)


def test_a_run_from_the_system_keeps_its_key_until_it_has_finished_and_goes_on_bit_for_bit(tmp_path):
    run = training("system")
    with pytest.raises(Crash):
        run.run([RunDirectory(tmp_path / "r"), Crashing(5)])  # its only checkpoint is that of round 0
    stored = tmp_path / "r" / KEY
    digits, drawn_at, _ = stored.read_text().split()
    key = bytes.fromhex(digits)
    assert (len(key), drawn_at) == (32, "0")
    assert run.key.unprivate_bytes != key  # the process holds it no more
    if os.name == "posix":
        assert stored.stat().st_mode & 0o077 == 0
    told = [(tmp_path / "r" / name).read_bytes() for name in (SETTINGS, LEDGER, METRICS, CHECKPOINT)]
    assert not any(key in text or digits.encode() in text for text in told)
    result, whole = training("system").resume(tmp_path / "r"), run_under(key)
    assert torch.equal(result.state.params, whole.state.params)
    assert result.guarantee == whole.guarantee
    assert Ledger.read(tmp_path / "r" / LEDGER).rounds == 6
    assert sorted(file.name for file in (tmp_path / "r").iterdir()) == [CURVES, LEDGER, METRICS, MODEL, SETTINGS]


@pytest.mark.parametrize(
    "change",
    [
        lambda path, run: (path / KEY).unlink(),
        lambda path, run: (path / KEY).write_text("abc 0 1-workers-1-threads\n"),
        lambda path, run: (path / KEY).write_text(re.sub(" 0 ", " 9 ", (path / KEY).read_text())),  # a later key
        lambda path, run: (path / KEY).write_text((path / KEY).read_text().replace("-threads", "1-threads")),
        lambda path, run: setattr(run, "replays", False),  # as on a GPU
    ],
)
def test_without_its_key_a_run_goes_on_under_another_and_charges_what_is_run_again(tmp_path, change):
    first = training("system")
    with pytest.raises(Crash):
        first.run([RunDirectory(tmp_path / "r"), Crashing(4)])
    charged = Ledger.read(tmp_path / "r" / LEDGER).rounds
    digits = (tmp_path / "r" / KEY).read_text().split()[0]
    run = training("system")
    change(tmp_path / "r", run)
    state = reopened(tmp_path / "r", run)
    assert (state.round_index, state.ledger.rounds) == (0, charged)
    assert digits not in (tmp_path / "r" / KEY).read_text() or not run.replays
    assert training("system").resume(tmp_path / "r").guarantee.rounds == 6 + charged


def test_a_checkpoint_of_an_earlier_key_is_not_gone_on_with_under_a_later_one(tmp_path):
    crashed_run(tmp_path / "r", "system", 3)
    shutil.copy(tmp_path / "r" / CHECKPOINT, tmp_path / "before")  # after two rounds
    (tmp_path / "r" / KEY).unlink()
    with pytest.raises(Crash):
        training("system").resume(tmp_path / "r", [measured(), Crashing(5)])
    charged = Ledger.read(tmp_path / "r" / LEDGER).rounds
    shutil.copy(tmp_path / "before", tmp_path / "r" / CHECKPOINT)
    assert training("system").resume(tmp_path / "r").guarantee.rounds == charged + 4


def test_every_run_of_one_training_has_a_key_of_its_own(tmp_path):
    run, keys = training("system"), []
    for _ in range(2):
        result = run.run([StopAtOnce()])
        keys.append(run.key.unprivate_bytes)
        run.run(state=result.state)
        keys.append(run.key.unprivate_bytes)
    assert len(set(keys)) == 4


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path):
    crashed_run(tmp_path / "r", "system", 4)
    written = Ledger.read(tmp_path / "r" / LEDGER).rounds
    with (tmp_path / "r" / LEDGER).open("a") as file:
        file.write('{"version": 1, "rou')
    assert reopened(tmp_path / "r", training("system")).ledger.rounds <= written >= 4
    assert Ledger.read(tmp_path / "r" / LEDGER).rounds == written


def test_a_lost_ledger_is_restored_from_the_checkpoint(tmp_path):
    crashed_run(tmp_path / "r", "seed", 4)
    (tmp_path / "r" / LEDGER).unlink()
    state = reopened(tmp_path / "r", training())
    assert Ledger.read(tmp_path / "r" / LEDGER) == state.ledger


def test_rounds_that_were_once_charged_stay_charged_when_a_replay_ends_early(tmp_path):
    crashed_run(tmp_path / "r", "seed", 5)  # checkpoint at 4, five rounds in the ledger
    result = training().resume(tmp_path / "r", [StopAtOnce()])
    assert (result.stopped, result.state.round_index, result.guarantee.rounds) == ("interrupted", 4, 5)
    assert Ledger.read(tmp_path / "r" / LEDGER).rounds == 5
    with safe_open(tmp_path / "r" / MODEL, "pt") as file:
        assert file.metadata()["guarantee"] == str(result.guarantee)
    assert training().resume(tmp_path / "r").guarantee.rounds == 6


def test_a_replay_that_ends_early_tells_the_epsilon_of_all_that_was_ever_released(tmp_path):
    class StopNext(Callback):
        stop_requested = False

        def on_round(self, report, state):
            self.stop_requested = True

    with pytest.raises(Crash):
        training().run([RunDirectory(tmp_path / "r", checkpoint_every=3), Crashing(5)])
    result = training().resume(tmp_path / "r", [RunDirectory(tmp_path / "r", checkpoint_every=3), StopNext()])
    assert (result.state.round_index, result.guarantee.rounds) == (4, 5)  # there was a checkpoint at 3
    assert result.reports[-1].guarantee == result.guarantee
    assert lines(tmp_path / "r" / METRICS)[-1]["epsilon"] == result.guarantee.epsilon


def test_ctrl_c_leaves_a_checkpoint_and_the_resumed_run_ends_as_the_whole_one(tmp_path):
    def press(report, state):
        if state.round_index == 3:
            os.kill(os.getpid(), signal.SIGINT)

    part = training().run([RunDirectory(tmp_path / "r"), Each(press), StopOnInterrupt()])
    assert (part.stopped, part.state.round_index) == ("interrupted", 3)
    whole, rest = training().run(), training().resume(tmp_path / "r")
    assert torch.equal(rest.state.params, whole.state.params)
    assert len(rest.reports) == 3
    assert rest.guarantee == whole.guarantee


def test_a_resume_takes_the_run_directory_of_its_callbacks_or_makes_one(tmp_path):
    mine, evaluate = RunDirectory(tmp_path / "a" / ".." / "r"), measured()
    assert directory_first(str(tmp_path / "r"), [evaluate, mine]) == (mine, [mine, evaluate])
    made, callbacks = directory_first(tmp_path / "other", [evaluate, mine])
    assert made.path == tmp_path / "other"
    assert callbacks == [made, evaluate, mine]


def test_facts_of_the_first_start_are_kept_when_a_resume_gives_none(tmp_path):
    crashed_run(tmp_path / "r", facts={"data": "stand-in"})
    training().resume(tmp_path / "r")
    with safe_open(tmp_path / "r" / MODEL, "pt") as file:
        assert file.metadata()["data"] == "stand-in"


def test_a_reopened_folder_is_not_begun_again_from_another_state(tmp_path):
    crashed_run(tmp_path / "r")
    run, before = training(), contents(tmp_path / "r")
    with closing(RunDirectory(tmp_path / "r")) as directory:
        directory.reopen(run)
        with pytest.raises(SettingError, match="is open for another run or another state"):
            run.run([directory])
    assert contents(tmp_path / "r") == before


def test_other_settings_than_those_of_the_checkpoint_are_refused(tmp_path):
    crashed_run(tmp_path / "r")
    with pytest.raises(RunError, match=r"'local\.lr = 0\.2' then, 'local\.lr = 0\.4' now"):
        training(local=replace(LOCAL, lr=0.4)).resume(tmp_path / "r")
    for changes, words in (
        ({"clip": FixedClip(1.0)}, r"'clip\.type = \"FixedClip\"' now"),
        ({"server": ServerSGD(0.5)}, r"'server\.lr = 0\.5' now"),
        ({"privacy": Privacy(noise_multiplier=0.6)}, r"'privacy\.noise_multiplier = 0\.6' now"),
        ({"privacy": Privacy(noise_multiplier=0.5, sampling="fixed")}, r"'privacy\.sampling = \"fixed\"' now"),
        ({"compute": Compute(precision="bf16")}, r"'compute\.precision = \"bf16\"' now"),
        ({"rounds": 7}, "'rounds = 7' now"),
    ):
        with pytest.raises(RunError, match=words):
            training(**changes).resume(tmp_path / "r")


def test_schedules_are_recorded_and_a_resumed_run_follows_them(tmp_path):
    def scheduled(client="warmup:2,cosine", server="linear:0.2", rounds=6):
        local = replace(LOCAL, momentum=0.5, lr_schedule=client)
        return training(local=local, server=ServerSGD(1.0, lr_schedule=server), rounds=rounds)

    whole = scheduled().run()
    with pytest.raises(Crash):
        scheduled().run([RunDirectory(tmp_path / "r"), measured(), Crashing(4)])
    stored = tomllib.loads((tmp_path / "r" / SETTINGS).read_text())
    assert (stored["local"]["lr_schedule"], stored["local"]["momentum"]) == ("warmup:2,cosine", 0.5)
    assert (stored["server"]["type"], stored["server"]["lr_schedule"]) == ("ServerSGD", "linear:0.2")
    for other, words in (
        (scheduled(client="cosine"), "local.lr_schedule = .*warmup:2,cosine.* then"),
        (scheduled(server=lambda t: 0.5), "server.lr_schedule = .*linear:0.2.* then"),
    ):
        with pytest.raises(RunError, match=words):
            reopened(tmp_path / "r", other)
    resumed = scheduled().resume(tmp_path / "r")
    assert torch.equal(resumed.state.params, whole.state.params)
    assert int(resumed.state.server["rounds_done"]) == 6
    assert not torch.allclose(whole.state.params, scheduled(client=None, server=None).run().state.params, atol=1e-3)


def test_another_seed_is_refused_and_no_message_shows_one(tmp_path):
    crashed_run(tmp_path / "r")
    with pytest.raises(RunError, match="cannot be resumed, the seed has changed: restore it, or start") as error:
        training(seed=123456).resume(tmp_path / "r")
    assert "123456" not in str(error.value)


def test_what_the_caller_names_must_be_the_same_too(tmp_path):
    crashed_run(tmp_path / "r", same={"loss": "version 1", "padding_in_loss": True})
    with pytest.raises(RunError, match="'loss = \"version 1\"' then, 'loss = \"version 2\"' now"):
        reopened(tmp_path / "r", training(), same={"loss": "version 2", "padding_in_loss": True})
    with pytest.raises(RunError, match="'nothing' now"):
        reopened(tmp_path / "r", training())
    assert reopened(tmp_path / "r", training(), same={"loss": "version 1", "padding_in_loss": True}).round_index == 4


def test_a_model_with_other_layers_or_other_frozen_values_is_refused(tmp_path):
    def with_frozen(value, layer=torch.nn.ReLU):
        base = torch.nn.Linear(6, 6).requires_grad_(False)
        torch.nn.init.constant_(base.weight, value)
        torch.nn.init.zeros_(base.bias)
        return torch.nn.Sequential(base, layer(), linear())

    with pytest.raises(Crash):
        training(model=with_frozen(0.5)).run([RunDirectory(tmp_path / "r"), measured(), Crashing(4)])
    for other in (with_frozen(0.25), with_frozen(0.5, torch.nn.GELU)):
        with pytest.raises(RunError, match="cannot be resumed, the model has changed: restore it, or"):
            training(model=other).resume(tmp_path / "r")
    same = with_frozen(0.5)
    torch.nn.init.ones_(same[2].weight)  # where training begins makes no difference to the rounds that are left
    assert reopened(tmp_path / "r", training(model=same)).round_index == 4


def test_the_checksum_of_a_model_sees_buffers_but_not_where_functions_lie():
    model = torch.nn.BatchNorm1d(3)
    before = model_fingerprint(model)
    model.extra_repr = lambda: f"{Crash} at 0x{id(model):x}"
    shown = model_fingerprint(model)
    model.extra_repr = lambda: f"{Crash} at 0xabc"
    assert model_fingerprint(model) == shown != before
    model.running_mean[1] = 1.0
    assert model_fingerprint(model) != shown


def test_a_ledger_of_another_run_is_refused(tmp_path):
    crashed_run(tmp_path / "r")
    text = (tmp_path / "r" / LEDGER).read_text().replace('"noise_multiplier": 0.5', '"noise_multiplier": 700.0')
    (tmp_path / "r" / LEDGER).write_text(text)
    with pytest.raises(RunError, match="holds rounds of another run"):
        training().resume(tmp_path / "r")


def test_damaged_metrics_do_not_stop_a_run_from_going_on(tmp_path):
    crashed_run(tmp_path / "r")
    with (tmp_path / "r" / METRICS).open("ab") as file:
        file.write(b'{"round": \xff\n not json \n')
    training().resume(tmp_path / "r", [measured()])
    assert (tmp_path / "r" / CURVES).exists()


def test_a_finished_run_has_nothing_to_resume(tmp_path):
    training().run([RunDirectory(tmp_path / "r")])
    with pytest.raises(RunError, match=r"finished run, .* clipline.load reads its model"):
        training().resume(tmp_path / "r")


def test_a_run_that_cannot_be_resumed_says_what_its_rounds_cost(tmp_path):
    made = training()
    made.run([RunDirectory(tmp_path / "r")])
    (tmp_path / "r" / MODEL).unlink()
    with pytest.raises(RunError, match=r"start again in another folder, and add the rounds in ledger.jsonl, if any"):
        made.resume(tmp_path / "r")


# What must be the same -----------------------------------------------------------------------------------------------

CHANGED = "the data have changed: restore them, or start a new run"


def corrected(population, user=7):
    """The same population but for one value of one user, which is a little larger."""
    x = np.array(population.fields["x"])
    x[int(population.offsets[user]), 2] += 1e-9
    return Population(population.offsets, {**population.fields, "x": x}, population.user_ids)


@pytest.mark.parametrize("noise_source", ["seed", "system"])
def test_a_run_whose_data_were_corrected_in_one_value_of_one_user_is_not_resumed(tmp_path, noise_source):
    crashed_run(tmp_path / "r", noise_source)
    before, population = contents(tmp_path / "r"), corrected(small_population())
    with pytest.raises(RunError) as error:
        training(noise_source, population=population).resume(tmp_path / "r")
    path = str(tmp_path / "r" / CHECKPOINT)
    assert str(error.value) == f"{path!r} cannot be resumed, {CHANGED}"  # and not a word more about them
    assert contents(tmp_path / "r") == before


@pytest.mark.parametrize("kind", ["renamed", "moved rows", "another type", "another field name"])
def test_a_run_on_other_users_or_other_fields_is_not_resumed(tmp_path, kind):
    crashed_run(tmp_path / "r")
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
        training(population=Population(offsets, fields, ids)).resume(tmp_path / "r")


def test_equal_data_are_resumed_wherever_they_lie(tmp_path):
    population = small_population()
    crashed_run(tmp_path / "r", population=Population.open(population.save(tmp_path / "store")))
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    for same in (Population.open(tmp_path / "elsewhere"), population):
        assert reopened(tmp_path / "r", training(population=same)).round_index == 4


@pytest.mark.filterwarnings("ignore::clipline.engine.workers.forked.ManyWorkersWarning")
def test_what_changes_no_release_may_differ(tmp_path):
    crashed_run(tmp_path / "r")
    run = training(compute=Compute(workers=2, device=torch.device("cpu")))
    assert reopened(tmp_path / "r", run, unprivate_timing=True, facts={"data": "elsewhere"}).round_index == 4


@pytest.mark.parametrize(
    ("target", "value", "words"),
    [
        ("numpy.__version__", "0.9", r"'numpy version: .*' then, 'numpy version: 0\.9' now"),
        ("torch.__version__", "0.9.0", r"'torch version: .*' then, 'torch version: 0\.9\.0' now"),
        ("clipline.training.checkpoint.__version__", "0.9", r"then, 'clipline version: 0\.9' now"),
        ("clipline.training.checkpoint.draws_on_device", lambda _: True, "'noise: drawn by the GPU' now"),
        ("torch.backends.cpu.get_cpu_capability", lambda: "ABACUS", "'device in use: cpu, .* ABACUS' now"),
    ],
)  # fmt: skip
def test_another_version_or_processor_is_refused_by_name(tmp_path, monkeypatch, target, value, words):
    crashed_run(tmp_path / "r")
    monkeypatch.setattr(target, value)
    with pytest.raises(RunError, match=words):
        training().resume(tmp_path / "r")


def test_another_engine_is_refused_by_name(tmp_path):
    crashed_run(tmp_path / "r")
    run = training()
    run.trainer = run.one_by_one
    with pytest.raises(RunError, match="'engine in use: Stacked' then, 'engine in use: OneByOne' now"):
        run.resume(tmp_path / "r")
    run = training()
    run.trainer.compiles = True  # as on a GPU, where another trial batch may decide otherwise
    with pytest.raises(RunError, match="'engine in use: Stacked' then, 'engine in use: Stacked, compiled' now"):
        run.resume(tmp_path / "r")


def test_the_first_line_that_differs_is_named_however_many_lines_there_are(tmp_path):
    crashed_run(tmp_path / "r")
    with pytest.raises(RunError, match=r"'nothing' then, 'privacy\.delta = 1e-05' now"):
        training(privacy=Privacy(noise_multiplier=0.5, delta=1e-5)).resume(tmp_path / "r")


def test_users_train_beside_the_fingerprint_but_nothing_is_released_without_it(tmp_path, monkeypatch):
    import threading

    may_end = threading.Event()
    monkeypatch.setattr(Population, "fingerprint", lambda self: "f" * 64 if may_end.wait(60) else "late")
    on_release = RunDirectory.on_release

    def observe(self, state):
        if state.round_index == 1:  # its users have trained
            assert not (tmp_path / "r" / CHECKPOINT).exists()
            assert (tmp_path / "r" / LEDGER).read_text() == ""
            may_end.set()
        on_release(self, state)
        assert (tmp_path / "r" / CHECKPOINT).exists()

    monkeypatch.setattr(RunDirectory, "on_release", observe)
    with pytest.raises(Crash):
        training().run([RunDirectory(tmp_path / "r"), measured(), Crashing(6)])
    assert b"unprivate data fingerprint: ffff" in (tmp_path / "r" / CHECKPOINT).read_bytes()


def test_a_fingerprint_that_fails_is_no_checkpoint_without_one(tmp_path, monkeypatch):
    def fails(self):
        raise OSError("the drive is gone")

    monkeypatch.setattr(Population, "fingerprint", fails)
    with pytest.raises(OSError, match="the drive is"):
        training().run([RunDirectory(tmp_path / "r"), measured()])
    assert not (tmp_path / "r" / CHECKPOINT).exists()


def test_a_finished_run_keeps_no_fingerprint(tmp_path):
    training().run([RunDirectory(tmp_path / "r"), measured()])
    fingerprint = small_population().fingerprint().encode()
    assert not any(fingerprint in file for file in contents(tmp_path / "r").values())


# Time ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [False, True])
def test_seconds_are_stored_only_where_they_are_asked_for(tmp_path, asked):
    result = training().run([RunDirectory(tmp_path / "r", unprivate_timing=asked), measured()])
    written = lines(tmp_path / "r" / METRICS)
    names = {"round", "clip", "fraction_within", "epsilon", "delta"} | ({"unprivate_seconds"} if asked else set())
    assert [line.keys() - {"accuracy"} for line in written] == [names] * 6
    if asked:
        seconds = [round(r.unprivate_seconds, 6) for r in result.reports]
        assert [line["unprivate_seconds"] for line in written] == seconds


# The lock ------------------------------------------------------------------------------------------------------------

TAKEN = "another process is at work there"


def test_a_run_directory_is_locked_while_the_run_lasts(tmp_path):
    def look(report, state):
        before = contents(tmp_path / "r")
        with pytest.raises(RunError, match=TAKEN):
            training().resume(tmp_path / "r")
        assert contents(tmp_path / "r") == before

    training(rounds=2).run([RunDirectory(tmp_path / "r"), Each(look)])
    DirectoryLock(tmp_path / "r").close()


def test_a_run_that_fails_frees_its_folder(tmp_path):
    crashed_run(tmp_path / "r")
    DirectoryLock(tmp_path / "r").close()


def test_an_empty_folder_in_which_another_process_begins_is_refused_and_stays_empty(tmp_path):
    with DirectoryLock(tmp_path), pytest.raises(RunError, match=TAKEN):
        training().run([RunDirectory(tmp_path)])
    assert list(tmp_path.iterdir()) == []
    training().run([RunDirectory(tmp_path)])


def test_who_is_refused_does_not_keep_the_lock(tmp_path):
    crashed_run(tmp_path / "r")
    with pytest.raises(RunError, match="the data have changed") as kept:  # and with it the frames of the call
        training(population=corrected(small_population())).resume(tmp_path / "r")
    reopened(tmp_path / "r", training())
    assert kept


def test_the_lock_that_was_taken_before_reading_the_settings_is_handed_on(tmp_path):
    crashed_run(tmp_path / "r")
    lock = DirectoryLock(tmp_path / "r")
    directory = RunDirectory(tmp_path / "r", lock=lock)
    directory.reopen(training())
    with pytest.raises(RunError, match=TAKEN):
        DirectoryLock(tmp_path / "r")
    directory.close()
    DirectoryLock(tmp_path / "r").close()


def test_a_lock_that_was_handed_in_and_closed_by_a_refusal_is_not_taken_for_one(tmp_path):
    crashed_run(tmp_path / "r")
    directory = RunDirectory(tmp_path / "r", lock=DirectoryLock(tmp_path / "r"))
    with pytest.raises(RunError, match="then"):
        directory.reopen(training(rounds=7))
    with DirectoryLock(tmp_path / "r"), pytest.raises(RunError, match=TAKEN):
        directory.reopen(training())


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
    crashed_run(tmp_path / "r", "seed", 3)
    path = tmp_path / "r" / CHECKPOINT
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_tensors({name: tensor.contiguous() for name, tensor in change(tensors).items()}, path, metadata)
    with pytest.raises(RunError, match="holds tensors of another model: start the run again"):
        reopened(tmp_path / "r", training())


def test_lines_too_deep_for_python_are_damaged_lines(tmp_path):
    crashed_run(tmp_path / "r", "seed", 3)
    (tmp_path / "r" / METRICS).write_text("[" * 100_000 + "\n")
    reopened(tmp_path / "r", training())
    assert (tmp_path / "r" / METRICS).read_text() == ""
    (tmp_path / "r" / LEDGER).write_text("[" * 100_000 + "\n")
    with pytest.raises(RunError, match="line 1: not a line of JSON"):
        reopened(tmp_path / "r", training())


def test_a_round_is_on_record_before_its_model_is_measured_and_whatever_the_metric_does(tmp_path):
    seen = []

    def metric(model):
        seen.append(len((tmp_path / "r" / LEDGER).read_text().splitlines()))
        if len(seen) == 3:
            raise OSError("the disk of the test data is gone")
        return {"quality": 1.0}

    with pytest.raises(ModuleError, match="the disk"):
        training("system").run([Evaluate(metric, every=1), RunDirectory(tmp_path / "r")])
    assert all(lines >= number for number, lines in enumerate(seen, start=1))  # never a model without its line
    assert len((tmp_path / "r" / LEDGER).read_text().splitlines()) >= 3


def test_facts_do_not_replace_the_guarantee(tmp_path):
    result = training().run([RunDirectory(tmp_path / "r", facts={"guarantee": "epsilon 0"})])
    with safe_open(tmp_path / "r" / MODEL, "pt") as file:
        assert file.metadata()["guarantee"] == str(result.guarantee)


@pytest.mark.filterwarnings("ignore::clipline.training.side_by_side.SharedNoiseWarning")
def test_a_run_directory_serves_one_run(tmp_path):
    made, directory = training(), RunDirectory(tmp_path / "r")
    with pytest.raises(SettingError, match="serves one"):
        run_together([made, made], [[directory], [directory]])
    with pytest.raises(SettingError, match=r"callbacks\[1\]"):
        made.run([directory, directory])


def test_an_array_that_a_controller_holds_must_be_the_same():
    class Table:
        needs_fraction = False

        def __init__(self, clips):
            self.table = np.array(clips)

        def init(self):
            return ClipState(float(self.table[0]))

        def update(self, state, release):
            return ClipState(float(self.table[state.round_index % 2]), state.round_index + 1)

    one, same, other = (str(Circumstances(training(clip=Table(clips)))) for clips in ([1, 2], [1, 2], [1, 3]))
    assert one == same != other
