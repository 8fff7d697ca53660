"""A training as text: what a run directory records of it, and what must be the same when the run is resumed."""

from __future__ import annotations

import hashlib
import json
import numbers
import os
import platform
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ... import __version__
from ...engine.prefetch import draws_on_device
from ...lr_schedules import schedule_text
from .checkpoint import DATA_FINGERPRINT

if TYPE_CHECKING:
    from ..training import Training

# Either changes no release (the device's name, which `device in use` stands for) or rounding alone; of the seed a hash
# is compared, since error messages show what has changed.
_MAY_DIFFER = ("seed", "compute.workers", "compute.device")


def describe(training: Training) -> dict[str, Any]:
    """Everything that the training was made with, but for model, loss and data: values by name, in tables.

    Tables have the class as `type`, without its module if it is one of ours, and the object's public attributes as far
    as they are numbers, text or lists of these. What is None is left out.
    """
    algorithm = training.algorithm
    return {
        "rounds": training.rounds,
        "cohort_size": training.cohort_size,
        "seed": training.seed,
        "personal": training.personal_names or None,
        "local": _scheduled(training.local, training.rounds),
        "clip": _attributes(algorithm.controller),
        "server": _scheduled(training.server, training.rounds),
        "privacy": _attributes(training.privacy),
        "compute": _attributes(training.compute),
    }


def to_toml(tables: Mapping[str, Any]) -> str:
    """Values as `name = value`, a line each, then mappings as tables; what is None is left out."""
    plain = {name: value for name, value in tables.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(name)} = {toml_value(value)}" for name, value in plain.items() if value is not None]
    for name, table in tables.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{_key(name)}]"]
            lines += [f"{_key(key)} = {toml_value(value)}" for key, value in table.items() if value is not None]
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    """A number, text, list or mapping as TOML, in one line."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(str(key))} = {toml_value(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(entry) for entry in value) + "]"
    # JSON's escapes are TOML's but for two: it leaves DEL as it is, and writes an emoji as a pair of surrogates.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


class Circumstances:
    """What must be the same when a run is resumed, as text, a line each.

    With noise from the seed, a round that is run again has the same noise. Had anything of this changed in between, the
    difference of its two releases would show the data. The lines are those of `describe` and of `same` (what the caller
    adds, such as a name for the loss), the versions, what computes, and checksums of the model and the data.

    Left out is what changes no release, or rounding alone: the number of workers. Where the data lie makes no
    difference either. The code of a model and of a loss cannot be seen from here; of a model, layers and values that
    are not trained can. The checksums are computed in a thread, which is waited for when the text is asked for.
    """

    def __init__(self, training: Training, same: Mapping[str, object] | None = None) -> None:
        settings = {name: value for name, value in _flat(describe(training)) if name not in _MAY_DIFFER}
        facts = {
            "clipline version": __version__,
            "torch version": torch.__version__,
            "numpy version": np.__version__,
            "device in use": device_name(training.device),
            "engine in use": _in_use(training),
        }
        if draws_on_device(training.problem):  # its logarithms, in numbers of the tail, are rounded otherwise
            facts["noise"] = "drawn by the GPU"
        if training.privacy.noise_source == "seed":  # else a round that is run again draws afresh, whatever the seed
            facts["hash of the seed"] = hashlib.sha256(f"clipline seed {training.seed}".encode()).hexdigest()[:16]
        chosen = {**(same or {}), **settings}
        self._text = "".join(f"{name} = {toml_value(value)}\n" for name, value in chosen.items() if value is not None)
        self._text += "".join(f"{name}: {value}\n" for name, value in facts.items())
        model = training.problem.model.evaluated(training.problem.model.initial)
        self._model = _in_thread(lambda: model_fingerprint(model))
        self._data = _in_thread(training.population.fingerprint)

    def __str__(self) -> str:
        model, data = self._model.result(), self._data.result()
        return f"{self._text}checksum of the model: {model}\n{DATA_FINGERPRINT}: {data}\n"


def model_fingerprint(model: nn.Module) -> str:
    """A checksum of a model's layers, of its parameters' names, types and shapes, and of all values not trained."""
    digest = hashlib.sha256(layers_text(model).encode("utf-8", "surrogatepass"))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad)).encode())
        if not tensor.requires_grad:
            values = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(values.view(torch.uint8).numpy().data if values.numel() else b"")
    return digest.hexdigest()[:32]


def layers_text(model: nn.Module) -> str:
    """A model's layers as torch prints them, without addresses of functions, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(model))


def resolved(training: Training) -> dict[str, Any]:
    """What followed from the settings, by name."""
    mechanism = training.algorithm.mechanism
    return {
        "noise_multiplier": training.noise_multiplier,
        "delta_noise_multiplier": float(mechanism.delta_noise_multiplier),
        "count_stddev": mechanism.count_stddev,
        "delta": training.delta,
        "relation": str(training.relation),
        **({} if training.declared else {"users": len(training.population)}),  # declared: how many came is private
        "parameters": training.dim,
        # What the ledger does not tell of the promise, for reports:
        **({"example_level": True} if training.planned.example_level else {}),
        **({"shows_errors": True} if training.planned.shows_errors else {}),
        "planned": str(training.planned),
    }


def device_name(device: torch.device) -> str:
    """The type of a device and what decides how it rounds: the model of a GPU, the instructions of a processor."""
    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    return f"{device.type}, {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def where_it_ran(training: Training) -> dict[str, str]:
    """Versions, device and machine, for the reader of a run; no name of a machine or a user is in it."""
    return {
        "clipline": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": device_name(training.device),
        "engine": _in_use(training),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def _in_use(training: Training) -> str:
    """Which trainer is in use, and whether it is compiled, which rounds otherwise."""
    compiles = getattr(training.trainer, "compiles", False)  # a trial batch has a say in it, and may be another
    return type(training.trainer).__name__ + ", compiled" * compiles


def _attributes(part: object) -> dict[str, Any]:
    """The class of an object and its public attributes, as far as TOML can hold them."""
    kind = type(part)
    ours = kind.__module__.split(".")[0] == __name__.split(".")[0]
    if is_dataclass(part):
        named = {field.name: getattr(part, field.name) for field in fields(part)}
    else:
        named = dict(getattr(part, "__dict__", {}))
    values = {name: _plain(value) for name, value in named.items() if not name.startswith("_")}
    known = {name: value for name, value in values.items() if value is not None}
    return {"type": kind.__qualname__ if ours else f"{kind.__module__}.{kind.__qualname__}", **known}


def _scheduled(part: object, rounds: int) -> dict[str, Any]:
    """The same of a part that may have a schedule of its rate: a function as `schedule_text` writes it."""
    text = schedule_text(getattr(part, "lr_schedule", None), rounds)
    return {**_attributes(part), **({} if text is None else {"lr_schedule": text})}


def _plain(value: object) -> Any:
    """The value as numbers, text, lists and mappings; None for anything else."""
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, str | numbers.Real | np.bool_):
        return value
    if isinstance(value, np.ndarray | torch.Tensor):
        array = (
            value.detach().cpu().contiguous().numpy()
            if isinstance(value, torch.Tensor)
            else np.ascontiguousarray(value)
        )
        return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
    if isinstance(value, list | tuple | set | frozenset):
        entries = [_plain(entry) for entry in (value if isinstance(value, list | tuple) else sorted(value, key=repr))]
        return None if any(entry is None for entry in entries) else entries
    if isinstance(value, Mapping):
        entries_by_name = {str(key): _plain(entry) for key, entry in value.items()}
        return None if any(entry is None for entry in entries_by_name.values()) else entries_by_name
    if is_dataclass(value) or hasattr(value, "__dict__"):  # a part of a part
        return None if callable(value) else _attributes(value)
    return None


def _flat(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values of tables as `table.name`."""
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", entry) for key, entry in value.items())
        else:
            yield name, value


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def _in_thread(work: Callable[[], str]) -> Future[str]:
    """What this will give, from a thread that does not keep the process alive when a run ends before."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # for whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name="clipline-fingerprint", daemon=True).start()
    return future
