"""What is stored with a trained model: its guarantee, settings, metrics and fields, for programs and to read."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import MISSING
from dataclasses import fields as fields_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...errors import RunError, SettingError, check_choice, check_number, check_whole, refuse
from ...privacy.guarantee import ACCOUNTANTS, SAMPLERS, Guarantee
from ...privacy.relations import Relation
from ..reports import finite_or_none
from .checkpoint import save_model
from .circumstances import describe, layers_text, resolved, to_toml

if TYPE_CHECKING:
    from ..result import TrainResult
    from ..training import Training

MODEL, CARD, PAGE = "model.safetensors", "card.json", "card.md"
CARD_KEY = "card"  # of the metadata in model.safetensors
_HIGHEST_EPSILON = 1e100  # beyond, nothing could be computed with it
_AGAIN = "save the model again"
Card = Mapping[str, Any]


def about_training(training: Training) -> dict[str, Any]:
    """What a card tells of the training itself: its settings, what followed from them, and the fields of the data.

    The seed is left out, since whoever knows it can subtract the noise. Of the fields it tells names, types and the
    shape of an example, and how they were made of columns: what the caller has listed. It holds plain values only and
    can be stored as JSON.
    """
    settings = {name: value for name, value in describe(training).items() if name != "seed"}
    population = training.population
    fields = {name: {"dtype": str(f.dtype), "shape": list(f.shape[1:])} for name, f in population.fields.items()}
    columns = population.column_options
    about: dict[str, Any] = _plain(
        {
            "settings": settings,
            "resolved": resolved(training),
            "fields": fields,
            **({"columns": columns} if columns else {}),
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
        **({"findings": [str(finding) for finding in result.findings]} if result.findings else {}),
        "model": {"class": f"{type(model).__module__}.{type(model).__qualname__}", "layers": layers_text(model)},
        **result.about,
        **({"facts": dict(facts)} if facts else {}),
        **({"task": _plain(task)} if task else {}),
    }


def card_metadata(card: Card) -> dict[str, str]:
    """A card as metadata of model.safetensors."""
    return {"guarantee": str(card["guarantee"]["text"]), CARD_KEY: json.dumps(card)}


def save_result(result: TrainResult, path: Path) -> Path:
    """Write a result into a folder that is new or empty."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunError(f"path={str(path)!r} must be a folder that is new or empty, and it is in use: give another")
    card = card_of(result)
    path.mkdir(parents=True, exist_ok=True)
    (path / PAGE).write_text(card_page(card), encoding="utf-8")
    (path / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    save_model(path / MODEL, result.model, card_metadata(card))  # last: `clipline.load` needs this file alone
    return path


def card_page(card: Card) -> str:
    """A card to read, as Markdown."""
    metrics = card["metrics"]
    shown = {name: "not finite" if value is None else format(value, ".4g") for name, value in metrics.items()}
    measured = "".join(f"* {name}: {value}\n" for name, value in shown.items())
    settings = {**card.get("settings", {}), "resolved": card.get("resolved")}
    fields = "".join(
        f"* `{name}`: {one['dtype']}, shape {tuple(one['shape'])} for each example\n"
        for name, one in card.get("fields", {}).items()
    )
    last, done = card["rounds"], card.get("model_rounds", card["rounds"])
    done = str(last) if done == last else f"{done} of {last}"
    columns = ""
    if card.get("columns"):
        columns = f"\nColumns of tables become these fields by:\n\n```json\n{json.dumps(card['columns'])}\n```\n"
    return f"""# A trained model and its guarantee

{card["guarantee"]["text"]}

`{card["model"]["class"]}`, after {done} rounds ({card["stopped"]}), by clipline {card["clipline"]}.

## Metrics

{measured or "None were measured."}
Metrics have no noise: the guarantee does not cover the users they were measured on.

## Fields of the data

{fields}{columns}
## Settings

The seed is not stored.

```toml
{to_toml(settings).strip()}
```

## Layers

```
{card["model"]["layers"]}
```

## Use

```python
import clipline

saved = clipline.load("this folder", model=...)  # an untrained model of the same class and shapes
saved.predict(table)
```
"""


def guarantee_json(guarantee: Guarantee) -> dict[str, Any]:
    """The fields of a guarantee; an infinite epsilon is null."""
    values = {field.name: getattr(guarantee, field.name) for field in fields_of(guarantee)}
    return {**values, "epsilon": finite_or_none(guarantee.epsilon), "relation": str(guarantee.relation)}


def guarantee_from(entries: Mapping[str, Any]) -> Guarantee:
    """What `guarantee_json` wrote; SettingError for anything else, which never quotes what is no number or name."""
    known = {field.name: field.default for field in fields_of(Guarantee)}
    values = {name: default for name, default in known.items() if default is not MISSING}
    values |= {name: value for name, value in entries.items() if name != "text"}
    for name in known:
        if name not in values:
            raise SettingError(f"the guarantee has no {name}: {_AGAIN}")
    for name in values:
        if name not in known:
            raise SettingError(f"the guarantee has {name[:80]!r}, which is no part of one: {_AGAIN}")
    epsilon, order = values["epsilon"], values["order"]
    if epsilon is not None:
        epsilon = check_number("epsilon", _shown(epsilon), at_least=0, at_most=_HIGHEST_EPSILON, way_out=_AGAIN)
    if order is not None:
        check_number("order", _shown(order), above=1, way_out=_AGAIN)
    check_number("delta", _shown(values["delta"]), above=0, below=1, way_out=_AGAIN)
    check_whole("rounds", _shown(values["rounds"]), at_least=0, way_out=_AGAIN)
    for name in ("noisy", "from_seed", "example_level", "shows_errors"):
        if not isinstance(values[name], bool):
            raise refuse(name, _shown(values[name]), "true or false", _AGAIN)
    check_choice("sampler", _shown(values["sampler"]), SAMPLERS)
    check_choice("accountant", _shown(values["accountant"]), ACCOUNTANTS)
    statistics = values["statistics"]
    if not isinstance(statistics, list | tuple) or not all(isinstance(o, str) and o.isprintable() for o in statistics):
        raise refuse("statistics", type(statistics).__name__, "a list of names", _AGAIN)
    checked = {
        "epsilon": math.inf if epsilon is None else epsilon,
        "relation": Relation.named(_shown(values["relation"])),
        "statistics": tuple(statistics),
    }
    return Guarantee(**{**values, **checked})


def _shown(value: object) -> Any:
    """A number or a short printable text as it is; of anything else the name of its type, for a message."""
    if isinstance(value, str):
        return value if len(value) <= 80 and value.isprintable() else "text"
    return value if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


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
