import threading
import time

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from samples import LOCAL, cross_entropies, small_population
from samples import linear_float32 as linear

from clipline import QuantileClip, ServerAdam, ServerSGD, ServerYogi, Training
from clipline.errors import ModuleError, RunError
from clipline.training import checkpoint
from clipline.training.callbacks import Callback
from clipline.training.checkpoint import (
    CheckpointWriter,
    DamagedCheckpointWarning,
    load_checkpoint,
    load_last,
    save_checkpoint,
)
from clipline.training.durable import damage, save_tensors
from clipline.training.model_card import save_model
from clipline.training.options import Privacy
from clipline.training.run_files import CHECKPOINT, OLDER


@pytest.mark.parametrize("server", [ServerSGD(0.5), ServerAdam(0.1), ServerYogi(0.1)])
def test_pitfall_restart_keeps_clip_momentum_round_streams_and_ledger_together(tmp_path, server):
    def training():
        return Training(
            linear(), cross_entropies, small_population(), rounds=8, cohort_size=20, local=LOCAL,
            seed=3, privacy=Privacy(noise_multiplier=0.4), clip=QuantileClip(start=0.003), server=server,
        )  # fmt: skip

    path = tmp_path / "checkpoint.safetensors"

    class SaveAtFive(Callback):
        def on_round(self, report, state):
            if state.round_index == 5:
                save_checkpoint(path, state)

    whole = training().run([SaveAtFive()])
    resumed = training().run(state=load_checkpoint(path))
    assert torch.equal(resumed.state.params, whole.state.params)
    assert resumed.state.clip == whole.state.clip
    assert resumed.state.ledger == whole.state.ledger
    assert resumed.guarantee == whole.guarantee
    assert [r.clip for r in resumed.reports] == [r.clip for r in whole.reports[5:]]
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.safetensors"]


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    path = tmp_path / "c.safetensors"
    with pytest.raises(RunError, match="cannot be read as a checkpoint"):
        load_checkpoint(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(RunError, match="cannot be read as a checkpoint"):
        load_checkpoint(path)
    save_model(path, torch.nn.Linear(2, 1), {})
    with pytest.raises(RunError, match="has version None"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "change",
    [
        {"clip": "nan"},
        {"clip": "-1"},
        {"clip": "x"},
        {"round_index": "-3"},
        {"round_index": "1" * 5000},
        {"ledger": "null"},
        {"ledger": "[7]"},
        {"ledger": "[" * 100_000},
        {"ledger": '[{"count": 1, "event": 7}]'},
        {"ledger": '[{"count": -1, "event": {"sampling": "poisson", "rate": 0.1, "noise_multiplier": 1.0}}]'},
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path, change):
    good = {"version": "2", "clip": "0.5", "round_index": "3", "ledger": "[]", "circumstances": ""}
    save_tensors({"params": torch.zeros(3)}, tmp_path / "c.safetensors", good)
    assert load_checkpoint(tmp_path / "c.safetensors").round_index == 3
    save_tensors({"params": torch.zeros(3)}, tmp_path / "c.safetensors", {**good, **change})
    with pytest.raises(RunError, match="is damaged"):
        load_checkpoint(tmp_path / "c.safetensors")


def test_every_changed_bit_of_a_file_and_every_cut_is_seen(tmp_path):
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    save_tensors({"params": torch.arange(3.0)}, whole, {"note": 'a text with "checksum":"inside'})
    assert damage(whole) is None
    data = whole.read_bytes()
    for place in range(len(data)):
        changed.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        assert damage(changed) is not None, place
    for other in (data[:-1], data + b"0", data[:4], b""):
        changed.write_bytes(other)
        assert damage(changed) is not None


def test_the_checkpoint_before_the_last_is_kept_and_stands_in_for_a_damaged_one(tmp_path):
    path, (first, second, third) = tmp_path / CHECKPOINT, states(3)
    for state in (first, second, third):
        save_checkpoint(path, state)
    assert sorted(one.name for one in tmp_path.iterdir()) == [OLDER, CHECKPOINT]
    assert load_last(path, "cpu", "").round_index == 3
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.warns(DamagedCheckpointWarning, match="is damaged .*from the checkpoint before it, after 2 rounds"):
        state = load_last(path, "cpu", "")
    assert torch.equal(state.params, second.params)
    assert state.ledger == second.ledger
    assert load_last(path, "cpu", "").round_index == 2  # it has taken the place of the other
    path.write_bytes(b"")
    with pytest.raises(RunError, match="cannot be read as a checkpoint"):  # there is no third
        load_last(path, "cpu", "")


def test_a_saved_model_loads_into_a_new_one(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.GroupNorm(1, 2))
    save_model(tmp_path / "m.safetensors", model, {"task": "none"})
    other = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.GroupNorm(1, 2))
    other.load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert torch.equal(other[0].weight, model[0].weight)


def test_a_model_with_more_than_tensors_in_its_state_is_refused_as_nothing_is_pickled(tmp_path):
    class Extra(torch.nn.Linear):
        def get_extra_state(self):
            return {"version": 3}

    with pytest.raises(ModuleError, match="'_extra_state' of the model's state_dict is a dict but must be a tensor"):
        save_model(tmp_path / "m.safetensors", Extra(2, 1), {})


def states(count):
    """The first states of a run."""
    kept = []

    class Keep(Callback):
        def on_round(self, report, state):
            kept.append(state)

    training = Training(
        linear(), cross_entropies, small_population(), rounds=count, cohort_size=20, local=LOCAL, seed=3,
        privacy=Privacy(noise_multiplier=0.4),
    )  # fmt: skip
    training.run([Keep()])
    return kept


def test_a_checkpoint_is_written_beside_the_rounds_and_the_newest_comes_next(tmp_path, monkeypatch):
    path, begun, go_on, written = tmp_path / "c", threading.Event(), threading.Event(), []
    write = checkpoint._write

    def slowly(path, tensors, metadata):
        begun.set()
        assert go_on.wait(20)
        write(path, tensors, metadata)
        written.append(int(metadata["round_index"]))

    monkeypatch.setattr(checkpoint, "_write", slowly)
    first, second, third = states(3)
    writer = CheckpointWriter(path)
    writer.write(first)
    assert begun.wait(20)
    writer.write(second)  # returns, though nothing is written yet
    writer.write(third)
    assert not path.exists()
    go_on.set()
    writer.flush()
    assert written == [1, 3]
    assert torch.equal(load_checkpoint(path).params, third.params)
    writer.write(first)
    writer.close()  # waits too
    assert load_checkpoint(path).round_index == 1


def test_where_checkpoints_come_fast_the_latest_waits_and_flush_does_not(tmp_path, monkeypatch):
    """Writing for 0.1 s leaves 4 s for the rounds; all of these come in less."""
    written, first_done = [], threading.Event()

    def slowly(path, tensors, metadata):
        time.sleep(0.1)
        written.append(int(metadata["round_index"]))
        first_done.set()

    monkeypatch.setattr(checkpoint, "_write", slowly)
    writer = CheckpointWriter(tmp_path / "c")
    first, *more = states(5)
    writer.write(first)
    assert first_done.wait(20)
    for state in more:
        writer.write(state)
    assert written == [1]  # none of the others in the pause, which lasts longer than this test
    writer.flush()
    assert written == [1, 5]
    monkeypatch.setattr(checkpoint, "_LONGEST_PAUSE", 0.0)
    writer.write(first)
    writer.close()
    assert written == [1, 5, 1]


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path):

    (state,) = states(1)
    writer = CheckpointWriter(tmp_path / "missing" / "c")
    writer.write(state)
    with pytest.raises(Exception, match=r"No such file|os error"):
        writer.flush()
    with pytest.raises(Exception, match=r"No such file|os error"):
        writer.write(state)
    writer.close()


def test_a_full_disk_is_told_in_a_sentence(tmp_path, monkeypatch):
    def full(*given):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(RunError, match=r"cannot be written \(No space left on device\): make room, then save again"):
        save_model(tmp_path / "model.safetensors", linear(), {})
