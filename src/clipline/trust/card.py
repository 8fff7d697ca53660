"""What goes with a model: a statement to sign, a model card for Hugging Face, and an entry for a public registry.

All three are made from a run that `verify` has found in order. What only the user knows is marked with FILL_IN.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import RunError, printable
from ..privacy.events import GroupedPoissonSampling
from ..privacy.guarantee import Guarantee, rounded_up
from ..privacy.trade_off import TradeOff, trade_off
from ..training.model_card import USE, fields_text
from ..training.run_files import MODEL
from .verify import Verified, model_digest, verify

FILL_IN = "TO FILL IN"
FALSE_POSITIVES = (0.001, 0.01, 0.1)
STATEMENT, HUGGING_FACE, REGISTRY = "statement.md", "README.md", "deployment.yaml"


@dataclass(frozen=True, eq=False)
class Facts:
    """What the three texts are made of."""

    found: Verified
    digest: str  # of the model's file
    name: str
    declared_by: str
    declared_on: str

    @property
    def guarantee(self) -> Guarantee:
        """Computed again from the ledger."""
        assert self.found.guarantee is not None
        return self.found.guarantee

    @property
    def promise(self) -> str:
        """The sentence to quote; of a federation two, for outsiders and against its server."""
        both = self.found.both
        return f"**{self.guarantee}.**" if both is None else "\n\n".join(f"**{one}**" for one in str(both).splitlines())

    @property
    def trust(self) -> tuple[str, str]:
        """Model of trust and what it means, as the registry of deployments has it."""
        if self.found.both is None:
            return "Central", "A trusted party holds the data and trains."
        return "Federated", f"Users train on devices of their own. {self.found.both.against_server}"

    @cached_property
    def curve(self) -> TradeOff:
        """What an attacker can do."""
        promise = self.guarantee
        return trade_off(self.found.ledger, epsilon=promise.epsilon, relation=promise.relation)

    @property
    def unit(self) -> str:
        """Whom the guarantee protects."""
        return "one example" if self.guarantee.example_level else "one user, with all examples of that user"

    @property
    def sampling(self) -> str:
        """How users were sampled, with the rates."""
        events = [event for event in self.found.ledger.events if event.statistic is None]
        return "; ".join(sorted({str(event.sampling) for event in events}))

    @property
    def population(self) -> str:
        """The number of users, and where it comes from."""
        settings, notes = self.found.files.settings, self.found.files.notes
        declared = settings.get("population_size", settings.get("privacy.population_size"))
        if declared is None:
            return f"{notes.get('users', 'unknown'):,} users, counted from the data: their number is public"
        return f"{declared:,} users, declared by {self.declared_by} on {self.declared_on}, before training"

    @property
    def noise(self) -> str:
        """The mechanism in a few words."""
        notes = self.found.files.notes
        z, delta_z, count = (notes.get(name) for name in ("noise_multiplier", "delta_noise_multiplier", "count_stddev"))
        split = f", split by Theorem 1 into {delta_z:.6g} on updates" if count else ""
        split += f" and a deviation of {count:.6g} users on the count within the clip" if count else ""
        banded = any(isinstance(event.sampling, GroupedPoissonSampling) for event in self.found.ledger.events)
        kind = "Discrete Gaussian" if any(event.log_ratio for event in self.found.ledger.events) else "Gaussian"
        return f"{kind} noise{', banded over rounds,' if banded else ''} with multiplier {z:.6g}{split}"


def write_cards(run: Path, out: Path, declared_by: str = "", declared_on: str = "") -> list[Path]:
    """Write the three files of a finished run into a folder. A run whose files disagree is refused."""
    found = verify(run)
    if found.problems:
        raise RunError(f"{str(run)!r} has problems ({found.problems[0]}): clipline verify names all of them")
    if not found.finished:
        raise RunError(f"{str(run)!r} has not ended, and has no model to describe: resume it first")
    if found.guarantee is None or not found.guarantee.private or not found.guarantee.sound:
        raise RunError(f"{str(run)!r} has no finite epsilon, so that there is nothing to sign: train with noise")
    files = replace(found.files, **{part: _told(getattr(found.files, part)) for part in ("settings", "notes", "card")})
    by, on = _told(declared_by) or FILL_IN, _told(declared_on) or f"{FILL_IN} (date)"
    facts = Facts(replace(found, files=files), model_digest(run), _told(run.resolve().name), by, on)
    out.mkdir(parents=True, exist_ok=True)
    texts = {STATEMENT: statement(facts), HUGGING_FACE: hugging_face(facts), REGISTRY: registry_entry(facts)}
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    return [out / name for name in texts]


def _told(value: Any) -> Any:
    """What a file says, with control characters written out and on one line: it may not add to the page."""
    if isinstance(value, str):
        return printable(value).replace("\n", "\\n")
    if isinstance(value, Mapping):
        return {_told(name): _told(entry) for name, entry in value.items()}
    return [_told(entry) for entry in value] if isinstance(value, list) else value


def statement(facts: Facts) -> str:
    """One page for the person who signs."""
    promise, found = facts.guarantee, facts.found
    unit = "example" if promise.example_level else "user"
    found_out = {rate: rounded_up(min(facts.curve.true_positives(rate), 1.0), 3) for rate in FALSE_POSITIVES}
    attacks = "".join(f"| {rate:g} | {share} |\n" for rate, share in found_out.items())
    named, count = "; ".join(promise.statistics), len(promise.statistics)
    statistics = f" and {count} private statistics" if count else ""
    prepared = f" So do the private statistics that prepared it: {named}." if count else ""
    seed = "* Who knows the seed can subtract the noise. Keep settings.toml secret, or delete its seed.\n"
    return f"""# Privacy statement for {facts.name}

{facts.promise}

In words: whoever sees the model, and every model and clip norm released during training, learns almost the same
whether or not one {unit}{"'s examples were" if unit == "user" else " was"} used. The probability of anything they could
conclude changes by a factor of at most e^{promise.epsilon_text}, but for a probability of {promise.delta_text}.

| what | value |
| --- | --- |
| unit of protection | {facts.unit} |
| neighbouring data sets | {promise.relation.phrase_for(unit)} |
| sampling | {facts.sampling} |
| population | {facts.population} |
| releases charged | {promise.rounds} rounds{statistics} |
| mechanism | {facts.noise} |
| epsilon by privacy-loss and by Renyi accounting | {promise.epsilon:.6g} and {found.renyi:.6g} |
| Gaussian-DP mu, with its regret | {rounded_up(facts.curve.mu, 6)}, {rounded_up(facts.curve.regret, 3)} |
| SHA-256 of {MODEL} | {facts.digest} |
| seal of the run | {found.seal} |
| software | clipline {found.files.card.get("clipline", __version__)}; checked by clipline {__version__} |

Where the regret is small, mu tells the whole curve of an attacker's errors. Where it is not, read the table below.

## What an attacker can do

An attacker who knows everything but whether one {unit} took part guesses that. Of the {unit}s who did not take part the
attacker accuses a share by mistake. Of those who did, the attacker finds at most:

| accused by mistake | found at most |
| --- | --- |
{attacks}
## What is added up

All rounds of this training compose, by the releases in ledger.jsonl.{prepared}
Choosing settings by other trainings on the same data costs privacy too. It is **not** in this number, unless those
trainings are added to it. Settings that were chosen on public or generated data cost nothing.

## What is not covered

* Metrics: they were computed without noise. The users they were measured on are not protected by this statement.
* Other releases from the same data, such as other models or statistics, unless they are named above.
* Facts about a group: a model may learn that a habit is common, whoever takes part.
* Who has access to the data while training, and what is published of the data otherwise.
{seed if promise.from_seed else ""}* A model or loss that was written to leak. clipline guards against mistakes of
  its author, not against intent.

## Signed

| | |
| --- | --- |
| purpose of the model | {FILL_IN} |
| how settings were chosen, and on which data | {FILL_IN} |
| other releases from these data | {FILL_IN} |
| name, date | {FILL_IN} |
"""


def hugging_face(facts: Facts) -> str:
    """A model card with the front matter of Hugging Face."""
    card = facts.found.files.card
    values = {name: "not finite" if one is None else f"{one:.4g}" for name, one in card.get("metrics", {}).items()}
    metrics = "".join(f"| {name} | {value} |\n" for name, value in values.items())
    measured = card.get("facts", {}).get("measured_on", "see the run")
    return f"""---
library_name: clipline
license: other  # {FILL_IN}
tags:
  - differential-privacy
  - federated-learning
  - pytorch
---

# {facts.name}

`{card["model"]["class"]}`, trained with user-level differential privacy by clipline, after
[Andrew et al. 2021](https://arxiv.org/abs/1905.03871).

{facts.promise}

The whole promise, with what it does not cover, is in `{STATEMENT}`.

## How to use it

{USE}
Fields of the data:

{fields_text(card)}
## Intended use and limits

{FILL_IN}: what the model is for, on whose data it was trained, where it fails.

Noise and clipping cost rare groups more than common ones. Measure the model on those who matter to you.

## Evaluation

| metric | value |
| --- | --- |
{metrics or "| none was measured | |" + chr(10)}
Measured on {measured}. Metrics have no noise, and the guarantee does not cover the users they were measured on.

## Training

{card["rounds"]} rounds, {facts.sampling}; {facts.noise}; clip: {_clip(facts.found.files.settings)}.
SHA-256 of `{MODEL}`: `{facts.digest}`. Seal of the run: `{facts.found.seal}`.
"""


def registry_entry(facts: Facts) -> str:
    """An entry for the registry of deployments (opendp/deployments-registry-data), as its schema has it."""
    promise = facts.guarantee
    entry = {
        "approved": False,
        "registry_author": FILL_IN,
        "deployment": {
            "short_name": facts.name,
            "data_curator": FILL_IN,
            "intended_use": FILL_IN,
            "data_product_type": "machine learning model",
            "data_product_description": f"{facts.found.files.card['model']['class']}. {FILL_IN}",
            "publication_date": datetime.date.today().isoformat(),
            "dp_flavor": {
                "name": "Approximate DP",
                "data_domain": f"Sets of users, each with examples under one id. {FILL_IN}",
                "unprotected_quantities": f"Settings of the training, {facts.population}; metrics. {FILL_IN}",
            },
            "privacy_loss": {
                "privacy_unit": "example" if promise.example_level else "user",
                "privacy_unit_description": promise.relation.phrase,
                "privacy_parameters": {"epsilon": promise.epsilon, "delta": promise.delta},
                "privacy_parameters_description": str(promise),
            },
            "model": {
                "model_type": facts.trust[0],
                "model_type_description": facts.trust[1],
                "release_type": "One-shot",
                "release_type_description": FILL_IN,
                "interactivity": "Non-interactive",
            },
            "additional_dp_information": {
                "post_processing": "The server optimiser and the clip norm are computed from noisy sums alone.",
                "composition": f"{promise.rounds} rounds by privacy-loss accounting, {facts.sampling}.",
            },
            "implementation": {
                "pre_processing_eda_hyperparameter_tuning": FILL_IN,
                "mechanisms": f"{facts.noise}, by clipline {__version__}; seal {facts.found.seal}.",
                "justification": FILL_IN,
            },
        },
    }
    return _yaml(entry)


def _yaml(entries: Mapping[str, Any], indent: str = "") -> str:
    """Nested mappings as YAML; a value is written as JSON, which YAML contains."""
    lines = ""
    for name, value in entries.items():
        if isinstance(value, Mapping):
            lines += f"{indent}{name}:\n{_yaml(value, indent + '  ')}"
        else:
            lines += f"{indent}{name}: {json.dumps(value, ensure_ascii=False)}\n"
    return lines


def _clip(settings: Mapping[str, Any]) -> str:
    kind = settings.get("clip", settings.get("clip.type"))
    quantile = settings.get("quantile", settings.get("clip.quantile"))
    if re.match("quantile", str(kind), re.IGNORECASE):
        return f"tracks quantile {quantile:g} of the users' update norms"
    return f"{kind}"
