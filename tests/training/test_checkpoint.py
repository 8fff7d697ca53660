import threading
import time
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from samples import Observer, linear_float32, small_training

from clipline import QuantileClip, ServerAdam, ServerSGD, ServerYogi
from clipline.errors import ModuleError, RunError
from clipline.training import checkpoint
from clipline.training.checkpoint import CheckpointWriter, load_checkpoint, save_checkpoint
from clipline.training.durable import damage, save_tensors
from clipline.training.model_card import save_model


@pytest.mark.parametrize("server", [ServerSGD(0.5), ServerAdam(0.1), ServerYogi(0.1)])
def test_pitfall_restart_keeps_clip_momentum_round_streams_and_ledger_together(tmp_path, server):
    def training():
        return small_training(8, QuantileClip(start=0.003), server=server)

    path, states = tmp_path / "checkpoint.safetensors", []
    whole = training().run([Observer(lambda report, state: states.append(state))])
    save_checkpoint(path, states[4])
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
        *({"clip": odd} for odd in ("nan", "-1", "x")),
        *({"round_index": odd} for odd in ("-3", "1" * 5000)),
        *({"noise": odd} for odd in ("[0, 1]", "7")),  # of which no tensor is there
        *({"ledger": odd} for odd in ("null", "[7]", "[" * 100_000, '[{"count": 1, "event": 7}]')),
        {"ledger": '[{"count": -1, "event": {"sampling": "poisson", "rate": 0.1, "noise_multiplier": 1.0}}]'},
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path, change):
    good = {"version": "2", "clip": "0.5", "round_index": "3", "ledger": "[]", "circumstances": "", "noise": "null"}
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


def test_a_model_with_more_than_tensors_in_its_state_is_refused_as_nothing_is_pickled(tmp_path):
    class Extra(torch.nn.Linear):
        def get_extra_state(self):
            return {"version": 3}

    with pytest.raises(ModuleError, match="'_extra_state' of the model's state_dict is a dict but must be a tensor"):
        save_model(tmp_path / "m.safetensors", Extra(2, 1), {})


def states(count):
    """The first states of a run."""
    kept = []
    small_training(count, server=None).run([Observer(lambda report, state: kept.append(state))])
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


def test_a_full_disk_is_told_in_a_sentence(tmp_path, monkeypatch):
    full = Mock(side_effect=SafetensorError("No space left on device"))
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(RunError, match=r"cannot be written \(No space left on device\): make room, then save again"):
        save_model(tmp_path / "model.safetensors", linear_float32(), {})
