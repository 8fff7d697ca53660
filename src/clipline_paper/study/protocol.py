"""How the paper's experiments are run on a task: rounds, users a round, grids of rates, quantiles and noises.

Three scales. `paper` is the paper's own protocol. `small` takes one GPU minutes to hours a figure. `smoke` takes
minutes on two cores: on `handwriting` it is long enough to mean something, on the paper's tasks it shows that it works.
What a scale changes, `differences` lists beside the paper's choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from clipline.errors import SettingError, check_choice, refuse
from clipline.settings import STAND_IN
from clipline.tasks import TrainSettings, lower_is_better

from ..facts import ENTRIES, FACTS
from .rules import significant

SCALES = ("smoke", "small", "paper")
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
LOWEST, MEDIAN, HIGHEST = 0.1, 0.5, 0.9  # of the clip range, of the final comparison, of the clip range
NOISES = (0.0, 0.01, 0.03, 0.1)
SERVER_RATES = tuple(significant(10 ** (k / 4), 12) for k in range(5))  # factors 1 to 10, wherever there is clipping
RATE_OFFSETS = (-0.5, -0.25, 0.0, 0.25, 0.5)  # log10, around the centre of the search for rates without clipping
CHOOSING_SEED = 0  # of the runs by which rates, z* and C* are chosen; the final comparison has the seeds from 1 on
PAPER_COHORT = 100
_MOST_NOISE = 10.0  # z at 100 users a round: the count, with a standard deviation of 5 users, can take no more
_MOST_SEEDS = 100_000
_SMALL_MODEL_NOISES = (0.0, 0.1, 0.3, 1.0)
_ENOUGH = 100  # rounds of `smoke`: on handwriting the clip arrives in the first quarter of 120
_SMOKE_MOST = 40  # rounds, and users a round, of a task of one's own

# log10 of client and server rate around which rates are searched: Table 10 of Reddi et al. (2020), FedAvgM. Our own for
# handwriting, which they do not have.
SEARCH_CENTRES = {
    "cifar100": (-1.5, 0.0),
    "emnist_ae": (0.5, 0.0),
    "emnist_cr": (-1.5, -0.5),
    "shakespeare": (0.0, -0.5),
    "so_nwp": (-0.5, 0.0),
    "so_lr": (2.0, 0.0),
    "handwriting": (-0.5, -0.25),
}


@dataclass(frozen=True)
class Protocol:
    """One task at one scale. Any field can be overridden: see `protocol_for`."""

    task: str
    scale: str
    rounds: int
    cohort_size: int
    average_over: int  # the last rounds of a run, over which its validation metric is averaged
    evaluate_every: int  # rounds
    evaluate_last: int  # of so many last rounds each is measured
    seeds: int  # runs of each side of the final comparison
    client_lr: float  # base rates: those that are best without clipping
    server_lr: float
    clip_start: float
    quantiles: tuple[float, ...] = QUANTILES
    server_rates: tuple[float, ...] = SERVER_RATES  # factors on server_lr
    noises: tuple[float, ...] = NOISES  # z at 100 users a round
    max_examples: int | None = None
    population_size: int | None = None  # users to generate where nothing is stored; None: the task's own number
    original_splits: bool = False  # choose and report on the same users, as the original programs did
    own_metric: str | None = None  # of a task of one's own: what runs are compared by
    own_lower: bool | None = None  # whether less of it is better; by its name if None

    def __post_init__(self) -> None:
        for name, above, below in (
            ("quantiles", 0.0, 1),
            ("server_rates", 0.0, 1e9),
            ("noises", -math.ulp(0.0), _MOST_NOISE),
        ):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values) or not all(above < value < below for value in values):
                low = "at least 0" if name == "noises" else "above 0"
                high = f" and below {below:g}"
                raise refuse(name, list(values), f"different numbers {low}{high}", "give some, separated by commas")
            object.__setattr__(self, name, tuple(sorted(values)))
        if 0.0 not in self.noises:
            raise refuse("noises", list(self.noises), "a list with 0, as z* is relative to no noise", "add 0")
        if self.seeds > _MOST_SEEDS:
            raise refuse("seeds", self.seeds, f"at most {_MOST_SEEDS}", "the paper has 20")
        for name in ("average_over", "seeds", "evaluate_every"):
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "at least 1", "give a larger number")
        if self.evaluate_every > self.average_over and not self.evaluate_last:
            way_out = "measure more often, or average over more rounds"
            raise refuse("evaluate_every", self.evaluate_every, f"at most average_over={self.average_over}", way_out)

    @property
    def of_paper(self) -> bool:
        """Whether the paper has this task."""
        return self.own_metric is None and self.task != "handwriting"

    @property
    def shows_finding(self) -> bool:
        """Whether runs show more than that they run: those of `smoke` only where they are long enough."""
        return self.scale != "smoke" or self.rounds >= _ENOUGH

    @property
    def metric(self) -> str:
        """The metric of the task that the paper reports."""
        return self.own_metric or ENTRIES[self.task].metric_name

    @property
    def lower_is_better(self) -> bool:
        """Whether that metric is an error: as the paper has it, or as is said of one's own, or by its name."""
        if self.own_metric is None:
            return ENTRIES[self.task].lower_is_better
        return lower_is_better(self.own_metric) if self.own_lower is None else self.own_lower

    def noise_multiplier(self, noise: float) -> float:
        """The noise multiplier z with which the mean update gets the noise that `noise` gives it at 100 users a round.

        Section 3 of the paper scales z with the cohort in the same way; at 100 users a round it is `noise` itself.
        """
        return significant(noise * self.cohort_size / PAPER_COHORT, 12)

    def base(self, task_settings: TrainSettings, changes: Mapping[str, Any] | None = None) -> TrainSettings:
        """The settings that all runs share: those of the task, then the protocol's, then `changes` (data, device)."""
        mine = {
            "rounds": self.rounds,
            "cohort_size": self.cohort_size,
            "sampling": "fixed",
            "client_lr": self.client_lr,
            "clip_start": self.clip_start,
            "max_examples": self.max_examples,
            "evaluate_every": self.evaluate_every,
            "evaluate_on": "original" if self.original_splits else "validation",
            "noise_multiplier": 0.0,
            "seed": CHOOSING_SEED,
        }
        given = {name: value for name, value in (changes or {}).items() if value is not None}
        if self.population_size is not None and given.get("data", STAND_IN) == STAND_IN:
            mine["population_size"] = self.population_size
            if task_settings.test_users is not None:
                mine["test_users"] = max(2, self.population_size // 4)
        return task_settings.overridden({**mine, **given}, "the protocol")

    def adaptive(self, base: TrainSettings, quantile: float, noise: float, factor: float) -> TrainSettings:
        """A run whose clip follows `quantile`, with the base server rate times `factor`."""
        z, server_lr = self.noise_multiplier(noise), significant(self.server_lr * factor, 12)
        return replace(base, clip="quantile", quantile=quantile, noise_multiplier=z, server_lr=server_lr)

    def fixed(self, base: TrainSettings, clip: float, noise: float, factor: float) -> TrainSettings:
        """A run with this clip in every round."""
        z, server_lr = self.noise_multiplier(noise), significant(self.server_lr * factor, 12)
        return replace(base, clip=clip, noise_multiplier=z, server_lr=server_lr)

    def unclipped(self, base: TrainSettings, client_lr: float, server_lr: float) -> TrainSettings:
        """A run without clipping, and so without noise."""
        return replace(base, clip="none", client_lr=significant(client_lr, 12), server_lr=significant(server_lr, 12))

    def tested(self, chosen: TrainSettings, seed: int) -> TrainSettings:
        """The same run with another seed, measured once: the final model, on the test users."""
        part = chosen.evaluate_on if self.original_splits else "test"
        return replace(chosen, evaluate_on=part, evaluate_every=self.rounds, seed=seed)

    def searched_rates(self) -> list[tuple[float, float]]:
        """The 25 pairs of client and server rate of the search without clipping, around one's own rates if it is so."""
        own = (math.log10(self.client_lr), math.log10(self.server_lr))
        client, server = own if self.own_metric else SEARCH_CENTRES[self.task]
        return [
            (significant(10 ** (client + a), 12), significant(10 ** (server + b), 12))
            for a in RATE_OFFSETS
            for b in RATE_OFFSETS
        ]


def _paper(task: str) -> Protocol:
    # All of the last 100 rounds are measured, as in the paper; those before are for the curves.
    common: dict[str, Any] = {
        "task": task, "scale": "paper", "cohort_size": 100, "average_over": 100, "seeds": 20, "evaluate_every": 50,
        "evaluate_last": 100,
    }  # fmt: skip
    if task == "handwriting":  # not the paper's: rates that `learning-rates` finds best, and noise that a model feels
        # which is 200 to 2000 times smaller, so that noise of the same size in each weight is that much shorter.
        return Protocol(
            **common, rounds=400, client_lr=significant(10**-0.5, 12),
            server_lr=significant(10**-0.25, 12), clip_start=0.1, noises=_SMALL_MODEL_NOISES,
        )  # fmt: skip
    facts = FACTS[task]
    return Protocol(
        **common, rounds=facts.rounds, client_lr=significant(facts.client_lr, 12),
        server_lr=significant(facts.server_lr, 12), clip_start=0.1, max_examples=facts.max_examples,
    )  # fmt: skip


# Of `small`: rounds, users a round, clip_start, the rounds averaged over, how often is measured, and the most examples
# of a user. A run takes an H200 2 to 8 s where many go side by side. Clips start nearer to their goal than 0.1, as the
# clip of quantile 0.1 needs 115 rounds for a factor of ten.
_SMALL: dict[str, tuple[int, int, float, int, int, int | None]] = {
    "handwriting": (150, 50, 0.2, 30, 5, None),
    "emnist_cr": (300, 50, 0.2, 50, 5, None),
    "emnist_ae": (300, 50, 0.2, 50, 5, None),
    "shakespeare": (80, 30, 0.3, 20, 4, 64),
    "so_nwp": (120, 30, 0.3, 30, 5, 128),
    "so_lr": (300, 50, 1.0, 50, 5, 256),
    "cifar100": (100, 30, 0.5, 25, 5, None),
}


# Of `smoke` on the paper's tasks: near the update norms of users with 8 examples, as there are few rounds to find them.
_SMOKE_START = {"emnist_cr": 0.13, "emnist_ae": 0.5, "shakespeare": 0.3, "so_nwp": 0.06, "so_lr": 12.0, "cifar100": 0.5}


def protocol_for(task: str, scale: str, **overrides: Any) -> Protocol:
    """The protocol of this task at this scale. `overrides` that are None are left out; others are fields of `Protocol`.

    With other `rounds` than the scale's, the part of them that is averaged over stays the same.
    """
    check_choice("task", task, ENTRIES)
    check_choice("scale", scale, SCALES)
    protocol = _paper(task)
    if scale == "small":
        rounds, cohort, start, average, every, examples = _SMALL[task]
        protocol = replace(
            protocol, scale=scale, rounds=rounds, cohort_size=cohort, clip_start=start, average_over=average,
            evaluate_every=every, evaluate_last=0, max_examples=examples, seeds=10, server_rates=SERVER_RATES[::2],
        )  # fmt: skip
    elif scale == "smoke" and task == "handwriting":
        protocol = replace(
            protocol, scale=scale, rounds=120, cohort_size=40, population_size=2000, clip_start=0.2, average_over=30,
            evaluate_every=10, evaluate_last=0, seeds=5, quantiles=(LOWEST, MEDIAN, HIGHEST),
            server_rates=SERVER_RATES[:3:2],
        )  # fmt: skip
    elif scale == "smoke":
        protocol = replace(
            protocol, scale=scale, rounds=8, cohort_size=10, population_size=40, clip_start=_SMOKE_START[task],
            average_over=4, evaluate_every=4, evaluate_last=0, max_examples=8, seeds=2,
            quantiles=(LOWEST, MEDIAN, HIGHEST), server_rates=(1.0,), noises=(0.0, 0.1),
        )  # fmt: skip
    return _overridden(protocol, overrides)


def own_protocol(name: str, metric: str, settings: TrainSettings, scale: str, **overrides: Any) -> Protocol:
    """The protocol of a task of one's own: its own rounds, cohort and rates, and noises that a small model feels.

    `smoke` has at most 40 rounds of 40 users; otherwise scales differ in grids and seeds. `overrides` are as in
    `protocol_for`.
    """
    check_choice("scale", scale, SCALES)
    rounds, cohort = settings.rounds, settings.cohort_size
    if scale == "smoke":
        rounds, cohort = min(rounds, _SMOKE_MOST), min(cohort, _SMOKE_MOST)
    average = min(100, rounds) if scale == "paper" else max(1, rounds // (2 if scale == "smoke" else 5))
    protocol = Protocol(
        task=name, scale=scale, rounds=rounds, cohort_size=cohort, average_over=average,
        evaluate_every=min(50, rounds) if scale == "paper" else max(1, average // 2),
        evaluate_last=average if scale == "paper" else 0, seeds={"smoke": 5, "small": 10, "paper": 20}[scale],
        client_lr=settings.client_lr, server_lr=settings.server_rate, clip_start=settings.clip_start,
        quantiles=(LOWEST, MEDIAN, HIGHEST) if scale == "smoke" else QUANTILES,
        server_rates={"smoke": SERVER_RATES[:3:2], "small": SERVER_RATES[::2], "paper": SERVER_RATES}[scale],
        noises=_SMALL_MODEL_NOISES, max_examples=settings.max_examples, own_metric=metric,
    )  # fmt: skip
    return _overridden(protocol, overrides)


def _overridden(protocol: Protocol, overrides: Mapping[str, Any]) -> Protocol:
    """The protocol with what was asked for instead; see `protocol_for`."""
    known = {field.name for field in fields(Protocol)}
    if unknown := overrides.keys() - known:
        raise SettingError(f"protocol has no {sorted(unknown)[0]!r} but {', '.join(sorted(known))}: drop it")
    changes = {name: value for name, value in overrides.items() if value is not None}
    if "rounds" in changes:
        share = protocol.average_over / protocol.rounds
        average = min(
            protocol.average_over if protocol.scale == "paper" else round(share * changes["rounds"]), changes["rounds"]
        )
        changes.setdefault("average_over", max(average, 1))
        changes.setdefault("evaluate_every", min(protocol.evaluate_every, changes["average_over"]))
        changes.setdefault("evaluate_last", min(protocol.evaluate_last, changes["average_over"]))
    return replace(protocol, **changes)


def differences(protocol: Protocol, data: str) -> list[tuple[str, str, str]]:
    """(what, ours, the paper's) wherever this protocol differs on this task; `data` says what was trained on."""
    own = not protocol.of_paper
    paper = _paper("handwriting" if own else protocol.task)
    original = "not among its tasks" if own else f"{FACTS[protocol.task].users:,} users of the original"
    found = [("data", data, original)]
    names = {
        "rounds": "rounds",
        "cohort_size": "users a round",
        "average_over": "last rounds averaged over",
        "seeds": "seeds of the final comparison",
        "client_lr": "client rate",
        "server_lr": "base server rate",
        "clip_start": "clip of the first round",
        "quantiles": "quantiles",
        "server_rates": "factors on the server rate",
        "noises": "noise z at 100 users a round",
        "max_examples": "most examples of a user",
    }
    unknown = ("rounds", "client_lr", "server_lr") if own else ()  # a task that is not the paper's has these of its own
    for name, words in names.items():
        ours, theirs = getattr(protocol, name), NOISES if own and name == "noises" else getattr(paper, name)
        if name in unknown:
            found.append((words, _shown(ours), "-"))
        elif ours != theirs:
            found.append((words, _shown(ours), _shown(theirs)))
    if protocol.evaluate_last < protocol.average_over:
        found.append(("measured", f"every {protocol.evaluate_every} rounds", "every round"))
    if not protocol.original_splits:
        found.append(("chosen on, reported on", "disjoint halves of the test users", "mostly the same users"))
    return found


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{number:.3g}" for number in value)
    return "all" if value is None else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
