"""The whole state of a run in one file: model, server momentum, clip, round and ledger together, or not at all.

Randomness needs no saving: every stream is a function of seed, purpose and round, so a resumed run draws what the
uninterrupted one would have drawn.
"""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ..errors import RunError, check_number, check_whole
from ..privacy.events import GaussianEvent
from ..privacy.ledger import Ledger
from .controllers import ClipState
from .round import TrainState

_VERSION = "1"


def save_checkpoint(path: Path, state: TrainState, circumstances: str = "") -> None:
    """Write atomically: a crash leaves the previous checkpoint.

    `circumstances` is whatever must be the same when the run goes on, such as its settings.
    """
    runs = [{"count": count, "event": event.to_json()} for event, count in state.ledger.runs]
    tensors = {"params": state.params, **{f"server.{name}": value for name, value in state.server.items()}}
    metadata = {
        "version": _VERSION,
        "clip": repr(state.clip.clip),
        "round_index": str(state.clip.round_index),
        "ledger": json.dumps(runs),
        "circumstances": circumstances,
    }
    partial = path.with_name(path.name + ".partial")
    save_file({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}, partial, metadata)
    partial.replace(path)


def load_checkpoint(path: Path, device: torch.device | str = "cpu", circumstances: str = "") -> TrainState:
    """What `save_checkpoint` wrote, to the last bit; refused under other circumstances.

    A round that is run again must release the same numbers, or else their difference shows what noise should hide.
    """
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{str(path)!r} cannot be read as a checkpoint ({error}): start the run again") from None
    if metadata.get("version") != _VERSION:
        raise RunError(f"{str(path)!r} has version {metadata.get('version')!r} but must have {_VERSION}: start again")
    if metadata.get("circumstances") != circumstances:
        raise RunError(
            f"{str(path)!r} was written with other settings, torch or device ({_difference(metadata, circumstances)}): "
            "restore them, or start a new run"
        )
    try:
        ledger = Ledger()
        for run in json.loads(metadata["ledger"]):
            ledger = ledger.add(GaussianEvent.from_json(run["event"]), run["count"])
        return TrainState(
            tensors.pop("params"),
            {name.removeprefix("server."): tensor for name, tensor in tensors.items()},
            ClipState(
                check_number("clip", float(metadata["clip"]), at_least=0, infinite=True, way_out="none"),
                check_whole("round_index", int(metadata["round_index"]), at_least=0, way_out="none"),
            ),
            ledger,
        )
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{str(path)!r} is damaged ({error!r}): start the run again") from None


def _difference(metadata: dict[str, str], circumstances: str) -> str:
    """The first line that is not the same, for the reader."""
    before, now = metadata.get("circumstances", "").splitlines(), circumstances.splitlines()
    pairs = zip_longest(before, now, fillvalue="nothing")
    return next((f"{a!r} then, {b!r} now" for a, b in pairs if a != b), "in a way that no line shows")


def save_model(path: Path, model: nn.Module, metadata: dict[str, str]) -> None:
    """The model's state as safetensors: `model.load_state_dict(safetensors.torch.load_file(path))` reads it."""
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, path, metadata)
