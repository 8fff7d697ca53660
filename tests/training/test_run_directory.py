import json
import os
import re
import shutil
import threading
import tomllib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from samples import LOCAL, Gone, GoneAfter, Observer, StopAfter, linear_float32, small_population, small_training

from clipline import FixedClip, Population, QuantileClip, ServerSGD, run_together
from clipline.errors import RunError, SettingError
from clipline.federated.clip_controllers import ClipState
from clipline.privacy import Ledger
from clipline.training.checkpoint import Circumstances, DamagedCheckpointWarning, load_checkpoint, model_fingerprint
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
)


def training(noise_source="seed", rounds=6, **changes):
    return small_training(rounds, noise_source=noise_source, **changes)


def measured():
    return Evaluate(lambda model: {"accuracy": 0.5}, every=2)


def crashed_run(path, noise_source="seed", after=4, changes=None, **given):
    """A run that dies once `after` rounds are written."""
    run = training(noise_source, **(changes or {}))
    with pytest.raises(Gone):
        run.run([RunDirectory(path, **given), measured(), GoneAfter(after)])


def reopened(path, run, **given):
    """The state that a resume would begin with."""
    with closing(RunDirectory(path, **given)) as directory:
        return directory.reopen(run)


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def metadata(path):
    """What the file of the model says beside its tensors."""
    with safe_open(path / MODEL, "pt") as file:
        return file.metadata()


FINISHED = [CURVES, LEDGER, METRICS, MODEL, SETTINGS]


# New runs -----------------------------------------------------------------------------------------------------------


def test_a_run_of_the_library_leaves_everything_that_a_reviewer_needs(real_curves, tmp_path):
    facts = {"task": "rides", "measured_on": "other riders"}
    directory = RunDirectory(tmp_path / "r", facts={**facts, "guarantee": "epsilon 0"})
    result = training().run([measured(), directory])
    assert sorted(contents(tmp_path / "r")) == FINISHED
    assert (tmp_path / "r" / CURVES).stat().st_size > 10_000  # a figure
    assert Ledger.read(tmp_path / "r" / LEDGER) == result.state.ledger
    assert [line["round"] for line in lines(tmp_path / "r" / METRICS)] == list(range(6))
    assert [line.get("accuracy") for line in lines(tmp_path / "r" / METRICS)] == [None, 0.5] * 3
    assert torch.equal(load_file(tmp_path / "r" / MODEL)["weight"], result.model.weight)
    stored = metadata(tmp_path / "r")
    card = json.loads(stored.pop("card"))
    assert len(stored.pop("checksum")) == 64
    assert stored == {**facts, "guarantee": str(result.guarantee)}  # a fact does not replace it
    assert card["facts"].items() >= facts.items()
    assert card["metrics"] == {"accuracy": 0.5}


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
    mode = (tmp_path / "r" / SETTINGS).stat().st_mode
    assert mode & 0o077 == 0 or os.name != "posix"  # who reads the seed can subtract the noise
    assert not list((tmp_path / "r").glob("*.partial"))
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

    def __init__(self, clip, table=(1, 2)):
        self.clip, self.table, self._seen = clip, np.array(table), torch.zeros(1)

    def init(self):
        return ClipState(self.clip)

    def update(self, state, release):
        return ClipState(self.clip, state.round_index + 1)


def test_an_own_controller_is_recorded_and_compared_by_class_numbers_and_arrays(tmp_path):
    crashed_run(tmp_path / "r", changes={"clip": OwnClip(0.25)})
    recorded = tomllib.loads((tmp_path / "r" / SETTINGS).read_text())["clip"]
    assert (recorded["type"], recorded["clip"]) == (f"{OwnClip.__module__}.OwnClip", 0.25)
    for other, words in ((OwnClip(0.5), r"'clip\.clip = 0\.25' then, 'clip\.clip = 0\.5' now"),
                         (OwnClip(0.25, (1, 3)), r"'clip\.table = ")):  # fmt: skip
        with pytest.raises(RunError, match=words):
            reopened(tmp_path / "r", training(clip=other))
    assert reopened(tmp_path / "r", training(clip=OwnClip(0.25))).round_index == 4


def test_settings_that_are_handed_in_are_stored_as_they_are(tmp_path):
    training().run([RunDirectory(tmp_path / "r", settings='task = "mine"\n')])
    assert (tmp_path / "r" / SETTINGS).read_text().startswith('task = "mine"\n\n# Resolved when the run began:\n')


def test_a_folder_in_use_or_that_cannot_be_made_is_refused_before_anything_is_done(tmp_path):
    (tmp_path / "file").write_text("keep me")
    with pytest.raises(RunError, match="must be a folder that is new or empty, and it holds files: give another"):
        training().run([RunDirectory(tmp_path)])
    with pytest.raises(RunError, match=r"cannot be made, as nothing can be written into .*file': give a folder"):
        check_free(tmp_path / "file" / "deep" / "run")
    check_free(tmp_path / "new" / "run")
    assert contents(tmp_path) == {"file": b"keep me"}


def test_the_ledger_line_comes_before_the_metrics_line_and_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("clipline.training.run_directory.round_json", Mock(side_effect=Gone))
    with pytest.raises(Gone):
        training("system").run([RunDirectory(tmp_path / "r")])
    assert Ledger.read(tmp_path / "r" / LEDGER).rounds == 1
    assert (tmp_path / "r" / METRICS).read_text() == ""
    made_in = str(Circumstances(training("system")))
    assert load_checkpoint(tmp_path / "r" / CHECKPOINT, "cpu", made_in).round_index == 0


def test_a_run_from_a_given_state_begins_with_the_ledger_of_that_state(tmp_path):
    first = training().run([StopAfter(4)])
    result = training().run([RunDirectory(tmp_path / "r")], state=first.state)
    assert Ledger.read(tmp_path / "r" / LEDGER) == result.state.ledger
    assert [line["round"] for line in lines(tmp_path / "r" / METRICS)] == [4, 5]


@pytest.mark.parametrize("every", [1, 3])
def test_without_metrics_there_is_a_checkpoint_every_so_many_rounds(tmp_path, every):
    with pytest.raises(Gone):
        training().run([RunDirectory(tmp_path / "r", checkpoint_every=every), GoneAfter(5)])
    assert reopened(tmp_path / "r", training()).round_index == 5 - 5 % every


@pytest.mark.parametrize("damaged", [(CHECKPOINT,), (CHECKPOINT, OLDER)])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_every_round_stays_charged(tmp_path, damaged):
    crashed_run(tmp_path / "r", "seed", 5)  # checkpoints at 2 and 4
    charged = Ledger.read(tmp_path / "r" / LEDGER).rounds  # 5, or 6 where the next had been released
    for name in damaged:
        path = tmp_path / "r" / name
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    if OLDER in damaged:
        with pytest.raises(RunError, match="is damaged, its checksum is that of other content: start the run again"):
            training().resume(tmp_path / "r")
        return
    with pytest.warns(DamagedCheckpointWarning, match="goes on from the checkpoint before it, after 2 rounds"):
        result = training().resume(tmp_path / "r", [StopAfter(0)])
    assert (result.state.round_index, result.guarantee.rounds) == (2, charged)
    assert Ledger.read(tmp_path / "r" / LEDGER).rounds == charged >= 5
    assert torch.equal(training().resume(tmp_path / "r").state.params, training().run().state.params)


def test_what_cut_writes_left_is_gone_after_a_resume_and_at_the_end(crashed):
    left = [partial_path(crashed / CHECKPOINT), crashed / ".tmpX7ab3Q"]  # the second is safetensors'

    def cut(*_):
        for path in left:
            path.write_text("private")

    cut()
    reopened(crashed, training())
    assert not [path for path in left if path.exists()]
    training().resume(crashed, [Observer(cut)])
    assert sorted(contents(crashed)) == FINISHED


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
        training(rounds=rounds).run([RunDirectory(tmp_path / "r"), Observer(changed)])
    assert not (tmp_path / "r" / MODEL).exists()
    assert (tmp_path / "r" / CHECKPOINT).exists()


# Resume -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _crashed_once(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "r"
    crashed_run(path)
    return path


@pytest.fixture
def crashed(_crashed_once, tmp_path):
    """A run by a seed that died after four of its six rounds, with a checkpoint after the fourth."""
    return Path(shutil.copytree(_crashed_once, tmp_path / "r"))


@pytest.mark.parametrize("after", [1, 3, 4])
def test_a_crashed_run_replays_from_its_seed_and_charges_every_round_once(tmp_path, after):
    crashed_run(tmp_path / "r", "seed", after)
    assert reopened(tmp_path / "r", training()).round_index == after - after % 2  # the last evaluated round
    result = training().resume(tmp_path / "r", [measured()])
    whole = training().run()
    assert torch.equal(result.state.params, whole.state.params)
    assert result.guarantee == whole.guarantee
    assert Ledger.read(tmp_path / "r" / LEDGER) == whole.state.ledger
    assert [line["round"] for line in lines(tmp_path / "r" / METRICS)] == list(range(6))
    assert sorted(contents(tmp_path / "r")) == FINISHED


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


def test_without_a_seed_a_run_keeps_its_key_until_it_has_finished_and_goes_on_bit_for_bit(tmp_path):
    run, path = training(None, seed=None), tmp_path / "r"
    with pytest.raises(Gone):
        run.run([RunDirectory(path), GoneAfter(5)])  # its only checkpoint is that of round 0
    settings = tomllib.loads((path / SETTINGS).read_text())
    assert (settings["privacy"]["noise_source"], "seed" in settings) == ("system", False)
    digits, drawn_at, _ = (path / KEY).read_text().split()
    key = bytes.fromhex(digits)
    assert (len(key), drawn_at) == (32, "0")
    assert run.key.unprivate_bytes != key  # the process holds it no more
    assert (path / KEY).stat().st_mode & 0o077 == 0 or os.name != "posix"
    told = [(path / name).read_bytes() for name in (SETTINGS, LEDGER, METRICS, CHECKPOINT)]
    assert not any(key in text or digits.encode() in text for text in told)
    result, whole = training(None, seed=None).resume(path), training(None, seed=None)
    whole.key.restore(key)
    uninterrupted = whole._run([], None, again=True)
    assert torch.equal(result.state.params, uninterrupted.state.params)
    assert result.guarantee == uninterrupted.guarantee
    assert Ledger.read(path / LEDGER).rounds == 6
    assert "seed" not in metadata(path)["guarantee"]
    assert sorted(contents(path)) == FINISHED


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
    first, run = training("system"), training("system")
    with pytest.raises(Gone):
        first.run([RunDirectory(tmp_path / "r"), GoneAfter(4)])
    charged = Ledger.read(tmp_path / "r" / LEDGER).rounds
    digits = (tmp_path / "r" / KEY).read_text().split()[0]
    change(tmp_path / "r", run)
    state = reopened(tmp_path / "r", run)
    assert (state.round_index, state.ledger.rounds) == (0, charged)
    assert digits not in (tmp_path / "r" / KEY).read_text() or not run.replays
    assert training("system").resume(tmp_path / "r").guarantee.rounds == 6 + charged


def test_a_checkpoint_of_an_earlier_key_is_not_gone_on_with_under_a_later_one(tmp_path):
    crashed_run(tmp_path / "r", "system", 3)
    shutil.copy(tmp_path / "r" / CHECKPOINT, tmp_path / "before")  # after two rounds
    (tmp_path / "r" / KEY).unlink()
    with pytest.raises(Gone):
        training("system").resume(tmp_path / "r", [measured(), GoneAfter(5)])
    charged = Ledger.read(tmp_path / "r" / LEDGER).rounds
    shutil.copy(tmp_path / "before", tmp_path / "r" / CHECKPOINT)
    assert training("system").resume(tmp_path / "r").guarantee.rounds == charged + 4


def test_a_ledger_that_is_lost_or_cut_short_by_a_crash_is_restored(crashed):
    written = Ledger.read(crashed / LEDGER)
    with (crashed / LEDGER).open("a") as file:
        file.write('{"version": 1, "rou')
    assert reopened(crashed, training()).ledger.rounds <= written.rounds >= 4
    assert Ledger.read(crashed / LEDGER) == written
    (crashed / LEDGER).unlink()
    state = reopened(crashed, training())
    assert Ledger.read(crashed / LEDGER) == state.ledger


@pytest.mark.parametrize("more", [0, 1])
def test_a_replay_that_ends_early_tells_the_epsilon_of_all_that_was_ever_released(tmp_path, more):
    crashed_run(tmp_path / "r", "seed", 5)  # with a checkpoint at 4
    charged, directory = Ledger.read(tmp_path / "r" / LEDGER).rounds, RunDirectory(tmp_path / "r")
    result = training().resume(tmp_path / "r", [directory, StopAfter((0, 5)[more])])
    assert (result.stopped, result.state.round_index, result.guarantee.rounds) == ("interrupted", 4 + more, charged)
    assert Ledger.read(tmp_path / "r" / LEDGER).rounds == charged >= 5
    assert metadata(tmp_path / "r")["guarantee"] == str(result.guarantee)
    if more:
        assert result.reports[-1].guarantee == result.guarantee
        assert lines(tmp_path / "r" / METRICS)[-1]["epsilon"] == result.guarantee.epsilon
    assert training().resume(tmp_path / "r").guarantee.rounds == 6


def test_facts_of_the_first_start_are_kept_when_a_resume_gives_none(tmp_path):
    crashed_run(tmp_path / "r", facts={"data": "stand-in"})
    training().resume(tmp_path / "r")
    assert metadata(tmp_path / "r")["data"] == "stand-in"


def test_a_reopened_folder_is_not_begun_again_from_another_state(crashed):
    run, before = training(), contents(crashed)
    with closing(RunDirectory(crashed)) as directory:
        directory.reopen(run)
        with pytest.raises(SettingError, match="is open for another run or another state"):
            run.run([directory])
    assert contents(crashed) == before


# What must be the same -----------------------------------------------------------------------------------------------

CHANGED = "the data have changed: restore them, or start a new run"
SETTINGS_NOW = [
    ({"local": replace(LOCAL, lr=0.4)}, r"'local\.lr = 0\.2' then, 'local\.lr = 0\.4' now"),
    ({"clip": FixedClip(1.0)}, r"'clip\.type = \"FixedClip\"' now"),
    ({"server": ServerSGD(0.5)}, r"'server\.lr = 0\.5' now"),
    ({"privacy": Privacy(noise_multiplier=0.6)}, r"'privacy\.noise_multiplier = 0\.6' now"),
    ({"privacy": Privacy(noise_multiplier=0.5, sampling="fixed")}, r"'privacy\.sampling = \"fixed\"' now"),
    ({"privacy": Privacy(noise_multiplier=0.5, delta=1e-5)}, r"'nothing' then, 'privacy\.delta = 1e-05' now"),
    ({"compute": Compute(precision="bf16")}, r"'compute\.precision = \"bf16\"' now"),
    ({"rounds": 7}, "'rounds = 7' now"),
    ({"seed": 123456}, "cannot be resumed, the seed has changed: restore it, or start"),
]
VERSIONS_NOW = [
    ("numpy.__version__", "0.9", r"'numpy version: .*' then, 'numpy version: 0\.9' now"),
    ("torch.__version__", "0.9.0", r"'torch version: .*' then, 'torch version: 0\.9\.0' now"),
    ("clipline.training.checkpoint.__version__", "0.9", r"then, 'clipline version: 0\.9' now"),
    ("clipline.training.checkpoint.draws_on_device", lambda _: True, "'noise: drawn by the GPU' now"),
    ("torch.backends.cpu.get_cpu_capability", lambda: "ABACUS", "'device in use: cpu, .* ABACUS' now"),
]


def test_other_settings_versions_processors_or_engines_are_refused_by_name(crashed, monkeypatch):
    for changes, words in SETTINGS_NOW:
        with pytest.raises(RunError, match=words) as error:
            training(**changes).resume(crashed)
        assert "123456" not in str(error.value)  # no message shows a seed
    for target, value, words in VERSIONS_NOW:
        with monkeypatch.context() as patch:
            patch.setattr(target, value)
            with pytest.raises(RunError, match=words):
                training().resume(crashed)
    by_one, compiled = training(), training()
    by_one.trainer = by_one.one_by_one
    compiled.trainer.compiles = True  # as on a GPU, where another trial batch may decide otherwise
    for run, words in ((by_one, "'engine in use: OneByOne' now"), (compiled, "'engine in use: Stacked, compiled' now")):
        with pytest.raises(RunError, match=f"'engine in use: Stacked' then, {words}"):
            run.resume(crashed)
    assert reopened(crashed, training()).round_index == 4


@pytest.mark.filterwarnings("ignore::clipline.engine.workers.forked.ManyWorkersWarning")
def test_what_changes_no_release_may_differ(crashed):
    run = training(compute=Compute(workers=2, device=torch.device("cpu")))
    assert reopened(crashed, run, unprivate_timing=True, facts={"data": "elsewhere"}).round_index == 4


def test_schedules_are_recorded_and_a_resumed_run_follows_them(tmp_path):
    def scheduled(client="warmup:2,cosine", server="linear:0.2"):
        local = replace(LOCAL, momentum=0.5, lr_schedule=client)
        return {"local": local, "server": ServerSGD(1.0, lr_schedule=server)}

    crashed_run(tmp_path / "r", changes=scheduled())
    stored = tomllib.loads((tmp_path / "r" / SETTINGS).read_text())
    assert (stored["local"]["lr_schedule"], stored["local"]["momentum"]) == ("warmup:2,cosine", 0.5)
    assert (stored["server"]["type"], stored["server"]["lr_schedule"]) == ("ServerSGD", "linear:0.2")
    for other, words in (
        (scheduled(client="cosine"), "local.lr_schedule = .*warmup:2,cosine.* then"),
        (scheduled(server=lambda t: 0.5), "server.lr_schedule = .*linear:0.2.* then"),
    ):
        with pytest.raises(RunError, match=words):
            reopened(tmp_path / "r", training(**other))
    whole, resumed = training(**scheduled()).run(), training(**scheduled()).resume(tmp_path / "r")
    assert torch.equal(resumed.state.params, whole.state.params)
    assert int(resumed.state.server["rounds_done"]) == 6
    plain = training(**scheduled(None, None)).run()
    assert not torch.allclose(whole.state.params, plain.state.params, atol=1e-3)


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
        return torch.nn.Sequential(base, layer(), linear_float32())

    crashed_run(tmp_path / "r", changes={"model": with_frozen(0.5)})
    for other in (with_frozen(0.25), with_frozen(0.5, torch.nn.GELU)):
        with pytest.raises(RunError, match="cannot be resumed, the model has changed: restore it, or"):
            training(model=other).resume(tmp_path / "r")
    same = with_frozen(0.5)
    torch.nn.init.ones_(same[2].weight)  # where training begins makes no difference to the rounds that are left
    assert reopened(tmp_path / "r", training(model=same)).round_index == 4


def test_the_checksum_of_a_model_sees_buffers_but_not_where_functions_lie():
    model = torch.nn.BatchNorm1d(3)
    before = model_fingerprint(model)
    model.extra_repr = lambda: f"{Gone} at 0x{id(model):x}"
    shown = model_fingerprint(model)
    model.extra_repr = lambda: f"{Gone} at 0xabc"
    assert model_fingerprint(model) == shown != before
    model.running_mean[1] = 1.0
    assert model_fingerprint(model) != shown


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("params", lambda tensor: tensor[:3]),
        ("params", lambda tensor: tensor.double()),
        ("server.momentum", lambda tensor: tensor[:3]),
        ("server.momentum", None),  # is not there
    ],
)
def test_a_checkpoint_of_another_model_is_refused(crashed, name, change):
    with safe_open(crashed / CHECKPOINT, "pt") as file:
        about = file.metadata()
    tensors = load_file(crashed / CHECKPOINT)
    changed = tensors.pop(name)
    if change:
        tensors[name] = change(changed).contiguous()
    save_tensors(tensors, crashed / CHECKPOINT, about)
    with pytest.raises(RunError, match="holds tensors of another model: start the run again"):
        reopened(crashed, training())


def test_a_ledger_of_another_run_is_refused(crashed):
    text = (crashed / LEDGER).read_text().replace('"noise_multiplier": 0.5', '"noise_multiplier": 700.0')
    (crashed / LEDGER).write_text(text)
    with pytest.raises(RunError, match="holds rounds of another run"):
        training().resume(crashed)


def test_a_finished_run_has_nothing_to_resume_and_without_its_model_says_what_its_rounds_cost(tmp_path):
    training().run([RunDirectory(tmp_path / "r")])
    with pytest.raises(RunError, match=r"finished run, .* clipline.load reads its model"):
        training().resume(tmp_path / "r")
    with pytest.raises(RunError, match=r"holds files: give another$"):
        check_free(tmp_path / "r")
    (tmp_path / "r" / CHECKPOINT).touch()  # as an unfinished run has it
    with pytest.raises(RunError, match=r"holds files: give another, or resume the run that is there$"):
        check_free(tmp_path / "r")
    (tmp_path / "r" / CHECKPOINT).unlink()
    (tmp_path / "r" / MODEL).unlink()
    with pytest.raises(RunError, match=r"start again in another folder, and add the rounds in ledger.jsonl, if any"):
        training().resume(tmp_path / "r")


# The data -------------------------------------------------------------------------------------------------------------


def corrected(population, user=7):
    """The same population but for one value of one user, which is a little larger."""
    x = np.array(population.fields["x"])
    x[int(population.offsets[user]), 2] += 1e-9
    return Population(population.offsets, {**population.fields, "x": x}, population.user_ids)


@pytest.mark.parametrize("noise_source", ["seed", "system"])
def test_a_run_whose_data_were_corrected_in_one_value_of_one_user_is_not_resumed(tmp_path, noise_source):
    crashed_run(tmp_path / "r", noise_source)
    before, population = contents(tmp_path / "r"), corrected(small_population())
    with pytest.raises(RunError) as error:  # which has the frames of the call, and they do not keep the lock
        training(noise_source, population=population).resume(tmp_path / "r")
    path = str(tmp_path / "r" / CHECKPOINT)
    assert str(error.value) == f"{path!r} cannot be resumed, {CHANGED}"  # and not a word more about them
    assert contents(tmp_path / "r") == before
    assert reopened(tmp_path / "r", training(noise_source)).round_index in (2, 4)


def test_equal_data_are_resumed_wherever_they_lie(tmp_path):
    population = small_population()
    crashed_run(tmp_path / "r", changes={"population": Population.open(population.save(tmp_path / "store"))})
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    for same in (Population.open(tmp_path / "elsewhere"), population):
        assert reopened(tmp_path / "r", training(population=same)).round_index == 4


def test_users_train_beside_the_fingerprint_but_nothing_is_released_without_it(tmp_path, monkeypatch):
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
    crashed_run(tmp_path / "r", after=6)
    assert b"unprivate data fingerprint: ffff" in (tmp_path / "r" / CHECKPOINT).read_bytes()


def test_a_fingerprint_that_fails_is_no_checkpoint_without_one_and_a_finished_run_keeps_none(tmp_path, monkeypatch):
    training().run([RunDirectory(tmp_path / "whole"), measured()])
    fingerprint = small_population().fingerprint().encode()
    assert not any(fingerprint in file for file in contents(tmp_path / "whole").values())
    monkeypatch.setattr(Population, "fingerprint", Mock(side_effect=OSError("the drive is gone")))
    with pytest.raises(OSError, match="the drive is"):
        training().run([RunDirectory(tmp_path / "r"), measured()])
    assert not (tmp_path / "r" / CHECKPOINT).exists()


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

    training(rounds=2).run([RunDirectory(tmp_path / "r"), Observer(look)])
    DirectoryLock(tmp_path / "r").close()


def test_an_empty_folder_in_which_another_process_begins_is_refused_and_stays_empty(tmp_path):
    with DirectoryLock(tmp_path), pytest.raises(RunError, match=TAKEN):
        training().run([RunDirectory(tmp_path)])
    assert list(tmp_path.iterdir()) == []
    training().run([RunDirectory(tmp_path)])


def test_a_lock_that_is_handed_in_is_kept_until_it_is_closed_and_not_taken_for_one_after_a_refusal(crashed):
    directory = RunDirectory(crashed, lock=DirectoryLock(crashed))  # taken before the settings were read
    directory.reopen(training())
    with pytest.raises(RunError, match=TAKEN):
        DirectoryLock(crashed)
    directory.close()
    directory = RunDirectory(crashed, lock=DirectoryLock(crashed))
    with pytest.raises(RunError, match="then"):
        directory.reopen(training(rounds=7))
    with DirectoryLock(crashed), pytest.raises(RunError, match=TAKEN):
        directory.reopen(training())


@pytest.mark.filterwarnings("ignore::clipline.training.side_by_side.SharedNoiseWarning")
def test_a_run_directory_serves_one_run(tmp_path):
    made, directory = training(), RunDirectory(tmp_path / "r")
    with pytest.raises(SettingError, match="serves one"):
        run_together([made, made], [[directory], [directory]])
    with pytest.raises(SettingError, match=r"callbacks\[1\]"):
        made.run([directory, directory])
