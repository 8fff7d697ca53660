"""Whether the files of a run directory tell the same story: ledger, settings, metrics and the model's card."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ...privacy.events import FixedSizeSampling, GaussianEvent, GroupedPoissonSampling, PoissonSampling
from ...privacy.ledger import Ledger
from .run import Promise, finite

_SAME = 1e-9  # relative: numbers that were copied from one file to another
_CLOSE = 0.01  # relative: an epsilon that another version's accountant may have computed


def read_card(model: Path) -> dict[str, Any]:
    """The card in the metadata of model.safetensors; empty where there is no model yet, or one without a card."""
    try:
        with safe_open(str(model), framework="numpy") as file:
            card = json.loads(file.metadata()["card"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return card if isinstance(card, dict) and isinstance(card.get("guarantee"), dict) else {}


def broken_terms(
    ledger: Ledger,
    settings: Mapping[str, Any],
    resolved: Mapping[str, Any],
    columns: Mapping[str, Sequence[float | None]],
    card: Mapping[str, Any],
) -> list[str]:
    """Where the files differ in what a guarantee is computed from: then none can be claimed.

    What a file does not have is not compared. Somebody who changes all files alike is not found out.
    """
    found = []
    events = [event for event in ledger.events if event.statistic is None]
    z = finite(resolved.get("noise_multiplier"))
    for event in events:
        if z is not None and not math.isclose(event.noise_multiplier, z, rel_tol=_SAME):
            found.append(
                f"ledger.jsonl charges a noise multiplier of {event.noise_multiplier:g}, settings.toml has {z:g}"
            )
    cohort = settings.get("cohort_size")
    users = settings.get("population_size") or settings.get("privacy.population_size") or resolved.get("users")
    if isinstance(cohort, int) and isinstance(users, int) and users > 0:
        of = f"settings.toml has {cohort:,} of {users:,} users"
        found += [
            f"ledger.jsonl charges {event.sampling}, {of}" for event in events if not _drawn(event, cohort, users)
        ]
    promised = card.get("guarantee", {})
    deltas = {"settings.toml": resolved.get("delta"), "metrics.jsonl": _last(columns.get("delta", ())),
              "the model's card": promised.get("delta")}  # fmt: skip
    found += _differing("delta", {name: number for name, value in deltas.items() if (number := finite(value))})
    relations = {"settings.toml": resolved.get("relation"), "the model's card": promised.get("relation")}
    if len({value for value in relations.values() if isinstance(value, str)}) > 1:
        found.append("relation is " + ", ".join(f"{value} in {name}" for name, value in relations.items()))
    source = settings.get("noise_source") or settings.get("privacy.noise_source")
    if source in ("seed", "system") and promised.get("from_seed") is (source == "system"):
        found.append(f"noise comes from the {source} by settings.toml, and not by the model's card")
    return list(dict.fromkeys(found))


def understated(promise: Promise, columns: Mapping[str, Sequence[float | None]], card: Mapping[str, Any]) -> list[str]:
    """Where metrics or card say more than the rounds charged come to: then the ledger lacks something."""
    said = {
        "metrics.jsonl": _last(columns.get("epsilon", ())),
        "the model's card": card.get("guarantee", {}).get("epsilon"),
    }
    return [
        f"ledger.jsonl comes to epsilon {promise.epsilon:.3g}, and {name} says {number:.3g}"
        for name, value in said.items()
        if promise.epsilon is not None and (number := finite(value)) and number > promise.epsilon * (1 + _CLOSE)
    ]


def oddities(
    promise: Promise,
    settings: Mapping[str, Any],
    columns: Mapping[str, Sequence[float | None]],
    card: Mapping[str, Any],
) -> list[str]:
    """What a reader should know of, and what leaves the guarantee as it is: numbers below what was charged."""
    found = list[str]()
    if promise.epsilon is None:
        return found
    asked = [
        finite(settings.get(name)) for name in ("epsilon", "max_epsilon", "privacy.epsilon", "privacy.max_epsilon")
    ]
    least = min((number for number in asked if number is not None), default=math.inf)
    if promise.epsilon > least * (1 + _CLOSE):
        found.append(f"settings.toml asks for epsilon {least:g}, and the rounds charged come to {promise.epsilon:.3g}")
    last, done = _last(columns.get("epsilon", ())), len(columns.get("epsilon", ()))
    whole = card.get("stopped") == "finished" and done == promise.rounds
    if whole and last is not None and last < promise.epsilon * (1 - _CLOSE):
        found.append(f"metrics.jsonl ends at epsilon {last:.3g}, and the rounds charged come to {promise.epsilon:.3g}")
    told = card.get("guarantee", {})
    stated = finite(told.get("epsilon"))
    if stated is not None and told.get("rounds") == promise.rounds and stated < promise.epsilon * (1 - _CLOSE):
        found.append(
            f"the model's card says epsilon {stated:.3g}, and the rounds charged come to {promise.epsilon:.3g}"
        )
    return found


def _drawn(event: GaussianEvent, cohort: int, users: int) -> bool:
    """Whether an event is of the sampling that settings tell of; of others than Poisson and fixed size, unknown."""
    if isinstance(event.sampling, FixedSizeSampling):
        return (event.sampling.cohort_size, event.sampling.population_size) == (cohort, users)
    groups = event.sampling.bands if isinstance(event.sampling, GroupedPoissonSampling) else 1
    is_poisson = isinstance(event.sampling, PoissonSampling | GroupedPoissonSampling)
    return not is_poisson or math.isclose(event.sampling.rate, groups * cohort / users, rel_tol=_SAME)


def _differing(name: str, values: Mapping[str, float]) -> list[str]:
    if len(values) < 2 or math.isclose(min(values.values()), max(values.values()), rel_tol=_SAME):
        return []
    return [f"{name} is " + ", ".join(f"{value:.4g} in {file}" for file, value in values.items())]


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)
