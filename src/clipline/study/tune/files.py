"""What a tuning leaves behind: `final.toml` to train with, `tune.json` for programs, `tune.html` for people."""

from __future__ import annotations

import json
import math
import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import RunError
from ...privacy.guarantee import Guarantee
from ...privacy.planning import plan
from ...settings import toml_text
from ...tasks.settings import read_toml
from ...training import durable
from ..runs.directory import CLAIMS, STUDY
from .private_search import FOLDER, PrivatelyTuned
from .question import Question, final_settings
from .rates import runs_with_fixed_clips
from .recipe import RateTrial, Tuned

FINAL, FACTS, PAGE = "final.toml", "tune.json", "tune.html"
_NAMED = ("epsilon", "users", "delta", "relation", "degradation", "rounds")  # of what is asked, as file names say it
_PLANNED = (
    "population_size",
    "cohort_size",
    "rounds",
    "noise_multiplier",
    "delta",
    "sampling",
    "relation",
    "count_stddev",
)


@dataclass(frozen=True)
class Files:
    """Where the answer to one question goes: `final.toml`, `tune.json` and `tune.html`, or the like with a suffix."""

    folder: Path
    suffix: str = ""

    @classmethod
    def of(cls, question: Question, folder: Path) -> Files:
        """Those of the folder's first question as they are; of another one, named by what it asks otherwise.

        So `final.toml` stays what it was when the folder is asked for another epsilon: that one's settings are in
        `final-epsilon-1.toml`. A folder whose first question had no answer has no `final.toml`, and the name is free.
        """
        plain = cls(folder)
        try:
            first = json.loads(plain.facts.read_text(encoding="utf-8"))["asked"] if plain.final.exists() else None
        except (OSError, ValueError, LookupError, TypeError):
            first = None
        if not isinstance(first, dict):
            return plain
        now = asked(question)
        changed = [name for name in _NAMED if first.get(name) != now[name]]
        if question.target.delta is None and "users" in changed and "delta" in changed:
            changed.remove("delta")  # it follows from the users
        return cls(folder, "".join(f"-{name}-{_in_a_name(now[name])}" for name in changed))

    @property
    def final(self) -> Path:
        """The settings to train with."""
        return self._named(FINAL)

    @property
    def facts(self) -> Path:
        """Everything for programs."""
        return self._named(FACTS)

    @property
    def page(self) -> Path:
        """Everything for people."""
        return self._named(PAGE)

    def _named(self, name: str) -> Path:
        stem, _, ending = name.partition(".")
        return self.folder / f"{stem}{self.suffix}.{ending}"


def asked(question: Question) -> dict[str, Any]:
    """What the final training must promise, and for whom."""
    target = question.target
    return {
        "epsilon": target.epsilon,
        "delta": target.delta_value,
        "users": target.population_size,
        "rounds": target.rounds,
        "relation": target.relation.value,
        "degradation": question.degradation,
    }


def _in_a_name(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def check_out(path: Path) -> None:
    """Refuse a folder that holds something else than a tuning or a study."""
    if not path.exists():
        return
    if not path.is_dir():
        raise RunError(f"out={str(path)!r} must be a folder, and it is a file: give another --out")
    ours = any((path / name).exists() for name in (STUDY, FACTS, FOLDER, CLAIMS))  # the last is there first
    if not ours and any(path.iterdir()):
        raise RunError(
            f"out={str(path)!r} must be new, empty or a tuning, and it holds other files: give another --out"
        )


def write_final(
    path: Path, settings: Mapping[str, Any], *, words: str, epsilon: float, secret: bool = False
) -> Guarantee:
    """Write the settings of the final training, and give what `clipline plan --config` makes of them.

    Read back and accounted before the file gets its name: one that costs more than `epsilon` is never written. A
    `secret` one, which holds a seed, is for its owner's eyes.
    """
    text = "".join(f"# {line}\n" for line in words.splitlines()) + toml_text(settings)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")  # another process may end now too
    partial.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            durable.sync(file, path)
        guarantee = promised_by(partial)
        if not guarantee.epsilon <= epsilon:
            much = guarantee.epsilon_text
            raise RunError(f"{path.name} would promise epsilon {much} where at most {epsilon:g} was asked: tell us")
        durable.put(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return guarantee


def promised_by(path: Path) -> Guarantee:
    """What a file of settings promises, as `clipline plan --config` reads it."""
    settings = read_toml(path)
    return plan(**{name: settings[name] for name in _PLANNED if name in settings}).guarantee


def final_of(answer: Tuned | PrivatelyTuned) -> dict[str, Any] | None:
    """The settings of the final training; None where the target cannot be met."""
    if isinstance(answer, PrivatelyTuned):
        return {name: value for name, value in asdict(answer.spec.settings).items() if value is not None}
    if answer.scaled is None:
        return None
    return final_settings(
        answer.question,
        {
            "client_lr": answer.rates.chosen.client_lr,
            "server_lr": answer.rates.chosen.server_lr,
            "cohort_size": answer.scaled.cohort_size,
            "noise_multiplier": answer.scaled.noise_multiplier,
        },
    )


def facts(answer: Tuned | PrivatelyTuned, out: Path) -> dict[str, Any]:
    """Everything that was asked, tried and chosen, with the runs behind each number. No infinity: null."""
    question, target = answer.question, answer.question.target
    common: dict[str, Any] = {
        "task": question.task.name,
        "asked": asked(question),
        "trial": {
            "data": data_words(question),
            "cohort_size": target.cohort_size,
            "noise_multiplier": question.noise_multiplier,
        },
        "metric": answer.metric.name,
        "lower_is_better": answer.metric.lower_is_better,
        "averaged_over_rounds": answer.metric.window,
        "final": final_of(answer),
        "out": str(out),
    }
    if isinstance(answer, PrivatelyTuned):
        price = answer.price
        common["final"] = {name: value for name, value in (common["final"] or {}).items() if name != "seed"}
        return {
            **common,
            "private_search": {
                "method": price.method,
                "runs": price.runs,
                "epsilon": price.guarantee.epsilon,
                "epsilon_of_one_run": price.one_run.epsilon,
                "guarantee": str(price.guarantee),
            },
            "chosen": _trial(answer.chosen),
        }
    losses = dict(answer.noise.losses(answer.metric))
    return {
        **common,
        "rates": [_trial(trial) for trial in answer.rates.trials],
        "chosen": _trial(answer.rates.chosen),
        "runs_with_five_fixed_clips": runs_with_fixed_clips(len(answer.rates.trials)),
        "noises": [
            {
                "noise_multiplier": trial.noise_multiplier,
                "value": _finite(trial.value),
                "degradation": _finite(losses[trial.noise_multiplier]),
                "run": trial.run,
            }
            for trial in answer.noise.trials
        ],
        "noise_borne": answer.noise.chosen.noise_multiplier,
        "noise_enough_without_scaling": answer.noise.enough,
        "alpha": None if answer.scaled is None else answer.scaled.alpha,
        "epsilon": None if answer.scaled is None else answer.scaled.guarantee.epsilon,
        "guarantee": None if answer.scaled is None else str(answer.scaled.guarantee),
        "refused": None if answer.refusal is None else str(answer.refusal),
        "alternatives": []
        if answer.refusal is None
        else [{"change": one.change, "meaning": one.meaning} for one in answer.refusal.alternatives],
    }


def data_words(question: Question) -> str:
    """What the trial ran on, in words."""
    used = question.task.data_used(question.trial)
    if question.private_search:
        return f"the private data themselves, charged: {used.title}"
    if question.trial.stored:
        return f"proxy data: {used.title}"
    return f"generated data in the place of a proxy: {used.title}"


def write_file(path: Path, text: str) -> Path:
    """Write a file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=".", suffix=".partial", dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    Path(partial).chmod(0o644)
    Path(partial).replace(path)
    return path


def write_facts(path: Path, content: Mapping[str, Any]) -> Path:
    """Write `tune.json`."""
    return write_file(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _trial(trial: RateTrial) -> dict[str, Any]:
    return {
        "client_lr": trial.client_lr,
        "server_lr": trial.server_lr,
        "value": _finite(trial.value),
        "pruned": trial.pruned,
        "run": trial.run,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
