"""What is stored with a trained model: its guarantee, settings, metrics and fields, for programs and to read."""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import os
import platform
import re
import warnings
from collections.abc import Container, Mapping
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from .. import __version__
from ..engine.isolation.state import checksum
from ..errors import ModuleError, check_choice, check_number, check_whole
from ..lr_schedules import schedule_text
from ..privacy.guarantee import ACCOUNTANTS, SAMPLERS, Guarantee
from ..privacy.relations import Relation
from ..settings import toml_text
from . import durable
from .run_files import CARD_KEY, MODEL, finite_or_none, guarantee_json

if TYPE_CHECKING:
    from .result import TrainResult
    from .training import Training

CARD, PAGE = "card.json", "card.md"
_AGAIN = "save the model again"
Card = Mapping[str, Any]


def about_training(training: Training) -> dict[str, Any]:
    """What a card tells of the training itself: its settings, what followed from them, and the fields of the data.

    The seed is left out, since whoever knows it can subtract the noise. Of the fields it tells names, types and the
    shape of an example, and how they were made of columns: what the caller has listed. It holds plain values only and
    can be stored as JSON.
    """
    population = training.population
    fields = {name: {"dtype": str(f.dtype), "shape": list(f.shape[1:])} for name, f in population.fields.items()}
    about: dict[str, Any] = _plain(
        {
            "settings": {name: value for name, value in describe(training).items() if name != "seed"},
            "resolved": resolved(training),
            "fields": fields,
            "columns": population.column_options or None,
            "federation": training.federation,
        }
    )
    return about


def card_of(
    result: TrainResult, *, facts: Mapping[str, str] | None = None, task: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """Everything that is told of a trained model, as JSON can hold it.

    `facts` are the caller's own, `task` says where the model's code is; see `RunDirectory`.
    """
    model = result.model
    return {
        "clipline": __version__,
        "guarantee": {**guarantee_json(result.guarantee), "text": str(result.guarantee)},
        "metrics": {name: finite_or_none(value) for name, value in result.metrics.items()},
        "rounds": result.state.round_index,
        "stopped": result.stopped,
        "model_rounds": result.model_rounds,
        "saved": result.saved,
        **({"findings": [str(finding) for finding in result.findings]} if result.findings else {}),
        "model": {"class": f"{type(model).__module__}.{type(model).__qualname__}", "layers": layers_text(model)},
        **result.about,
        **({"facts": dict(facts)} if facts else {}),
        **({"task": _plain(task)} if task else {}),
    }


def card_metadata(card: Card) -> dict[str, str]:
    """A card as metadata of model.safetensors."""
    return {"guarantee": str(card["guarantee"]["text"]), CARD_KEY: json.dumps(card)}


def frozen_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a model that do not train, by their names in its state."""
    trains = {name: param.requires_grad for name, param in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in model.state_dict().items() if not trains.get(name, True)}


def save_result(result: TrainResult, path: Path, *, frozen: bool = True) -> Path:
    """Write a result into a folder that is new or empty, or else into one beside it: it may have taken hours."""
    given, number = path if path.name.strip(".") else path.resolve(), 1
    while path.exists() and (not path.is_dir() or any(path.iterdir())):
        number += 1
        path = given.with_name(f"{given.name}-{number}")
    if number > 1:
        told = f"path={str(given)!r} is in use and stays as it is: the model is saved in {str(path)!r}"
        warnings.warn(told, UserWarning, stacklevel=3)
    left_out = {} if frozen else frozen_tensors(result.model)
    card = {
        **card_of(result),
        **({"left_out": {name: checksum(value) for name, value in left_out.items()}} if left_out else {}),
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / PAGE).write_text(card_page(card), encoding="utf-8")
    (path / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    save_model(path / MODEL, result.model, card_metadata(card), left_out)  # last: `clipline.load` needs this file alone
    return path


_LEFT_OUT = "The parameters that did not train are not stored: `model=` must have them, as the training had."
USE = """```python
import clipline

saved = clipline.load("this folder", model=...)  # an untrained model of the same class and shapes
# where forward does not take the fields by name: load(..., predict=lambda model, batch: model(batch["x"]))
saved.predict(table)
```
"""


def fields_text(card: Card) -> str:
    """The fields of the data as a list in Markdown."""
    fields = card.get("fields", {}).items()
    return "".join(
        f"* `{name}`: {one['dtype']}, shape {tuple(one['shape'])} for each example\n" for name, one in fields
    )


def card_page(card: Card) -> str:
    """A card to read, as Markdown."""
    metrics = card["metrics"]
    shown = {name: "not finite" if value is None else format(value, ".4g") for name, value in metrics.items()}
    measured = "".join(f"* {name}: {value}\n" for name, value in shown.items())
    settings = {**card.get("settings", {}), "resolved": card.get("resolved")}
    last, done = card["rounds"], card.get("model_rounds", card["rounds"])
    done = str(last) if done == last else f"{done} of {last}"
    columns = ""
    if card.get("columns"):
        columns = f"\nColumns of tables become these fields by:\n\n```json\n{json.dumps(card['columns'])}\n```\n"
    return f"""# A trained model and its guarantee

{card["guarantee"]["text"]}

`{card["model"]["class"]}`, after {done} rounds ({card["stopped"]}), by clipline {card["clipline"]}.
{"It is " + card["saved"] + "." if "saved" in card else ""}
{_LEFT_OUT if "left_out" in card else ""}

## Metrics

{measured or "None were measured."}
Metrics have no noise: the guarantee does not cover the users they were measured on.

## Fields of the data

{fields_text(card)}{columns}
## Settings

The seed is not stored.

```toml
{toml_text(settings).strip()}
```

## Layers

```
{card["model"]["layers"]}
```

## Use

{USE}"""


def guarantee_from(entries: Mapping[str, Any]) -> Guarantee:
    """What `guarantee_json` wrote; a SettingError, TypeError or KeyError for anything else."""
    values = {"statistics": (), **{name: value for name, value in entries.items() if name != "text"}}
    for name, limits in (("epsilon", {"at_least": 0, "at_most": 1e100}), ("order", {"above": 1})):
        if values[name] is not None:
            check_number(name, values[name], way_out=_AGAIN, **limits)
    check_number("delta", values["delta"], above=0, below=1, way_out=_AGAIN)
    check_whole("rounds", values["rounds"], at_least=0, way_out=_AGAIN)
    check_choice("sampler", values["sampler"], SAMPLERS)
    check_choice("accountant", values["accountant"], ACCOUNTANTS)
    values["epsilon"] = math.inf if values["epsilon"] is None else values["epsilon"]
    values |= {"relation": Relation.named(values["relation"]), "statistics": tuple(values["statistics"])}
    guarantee = Guarantee(**values)
    flags = (guarantee.noisy, guarantee.from_seed, guarantee.example_level, guarantee.shows_errors)
    if not all(isinstance(one, bool) for one in flags) or not str(guarantee).isprintable():
        raise TypeError("a flag is not true or false, or a statistic has no name")
    return guarantee


def _plain(value: Any) -> Any:
    """Numbers, text, lists and mappings as JSON has them; an infinite number as text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    return str(value)


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
        "average": training.average,
        "local": _scheduled(training.local, training.rounds),
        "clip": _attributes(algorithm.controller),
        "server": _scheduled(training.server, training.rounds),
        "privacy": _attributes(training.privacy),
        "noise": _attributes(training.noise) if hasattr(training.noise, "bands") else None,
        "upload": None if training.upload is None else _attributes(training.upload),
        "compute": _attributes(training.compute),
    }


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
        **(
            {"bands": training.noise.bands, "lasting_share": mechanism.lasting_share}
            if hasattr(training.noise, "bands")
            else {}
        ),
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
        "engine": in_use(training),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def in_use(training: Training) -> str:
    """Which trainer is in use, and whether it is compiled, which rounds otherwise."""
    compiles = getattr(training.trainer, "compiles", False)  # a trial batch has a say in it, and may be another
    return type(training.trainer).__name__ + ", compiled" * compiles


def _attributes(part: object) -> dict[str, Any]:
    """The class of an object and its public attributes, as far as TOML can hold them."""
    kind = type(part)
    ours = kind.__module__.split(".")[0] == __name__.split(".")[0]
    if is_dataclass(part):
        named = {field.name: getattr(part, field.name) for field in fields_of(part)}
    else:
        named = dict(getattr(part, "__dict__", {}))
    values = {name: _as_toml(value) for name, value in named.items() if not name.startswith("_")}
    known = {name: value for name, value in values.items() if value is not None}
    return {"type": kind.__qualname__ if ours else f"{kind.__module__}.{kind.__qualname__}", **known}


def _scheduled(part: object, rounds: int) -> dict[str, Any]:
    """The same of a part that may have a schedule of its rate: a function as `schedule_text` writes it."""
    text = schedule_text(getattr(part, "lr_schedule", None), rounds)
    return {**_attributes(part), **({} if text is None else {"lr_schedule": text})}


def _as_toml(value: object) -> Any:
    """The value as numbers, text, lists and mappings; None for anything else."""
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str | numbers.Real):
        return value
    if isinstance(value, np.ndarray | torch.Tensor):
        array = (
            value.detach().cpu().contiguous().numpy()
            if isinstance(value, torch.Tensor)
            else np.ascontiguousarray(value)
        )
        return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
    if isinstance(value, list | tuple | set | frozenset):
        entries = [_as_toml(entry) for entry in (value if isinstance(value, list | tuple) else sorted(value, key=repr))]
        return None if any(entry is None for entry in entries) else entries
    if isinstance(value, Mapping):
        entries_by_name = {str(key): _as_toml(entry) for key, entry in value.items()}
        return None if any(entry is None for entry in entries_by_name.values()) else entries_by_name
    if is_dataclass(value) or hasattr(value, "__dict__"):  # a part of a part
        return None if callable(value) else _attributes(value)
    return None


def save_model(path: Path, model: nn.Module, metadata: dict[str, str], left_out: Container[str] = ()) -> None:
    """The model's state as safetensors: `model.load_state_dict(safetensors.torch.load_file(path))` reads it.

    Adapters of PEFT are also written beside it in PEFT's own format, for `PeftModel.from_pretrained(base, folder)`.
    Quantised weights of a class of their own (torchao) are written as the numbers that they stand for: the file is for
    the model as it was before it was quantised.
    """
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ModuleError(
                f"{name!r} of the model's state_dict is a {type(value).__name__} but must be a tensor, since nothing "
                "is pickled: keep it out of get_extra_state"
            )
    if hasattr(model, "peft_config") and hasattr(model, "save_pretrained"):
        readme = path.with_name("README.md")
        kept = readme.exists()
        model.save_pretrained(str(path.parent))  # type: ignore[operator]
        if not kept:
            readme.unlink(missing_ok=True)  # PEFT's template; the guarantee stands in card.md
    tensors = {
        name: _dequantised(tensor).contiguous().clone() for name, tensor in state.items() if name not in left_out
    }
    durable.save_tensors(tensors, path, metadata)


def _dequantised(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that holds its numbers itself, which safetensors needs: others are made of several."""
    return tensor.dequantize() if hasattr(tensor, "__tensor_flatten__") else tensor
