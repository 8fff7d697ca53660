"""Planning a training: of epsilon, noise multiplier, cohort and rounds, find the one that is not given.

Or, where epsilon is all that is known, a table of cohorts and rounds with the noise that each needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from ..errors import SettingError, check_number, refuse
from ..settings import SETTINGS, check
from .accountant import account, account_renyi, default_relation, rough_epsilon
from .banded_noise import bands_and_noise, check_bands, choose_bands, lasting_share
from .calibration import cohort_within, least_scale, noise_multiplier_for, rough_noise_multiplier_for, rounds_within
from .events import GaussianEvent, sampling_named
from .feasibility import (
    ROUNDS,
    NoiseCell,
    NoiseTable,
    Parameters,
    Remedies,
    Setup,
    count_parameters,
    find_remedies,
    noise_norm,
    slowdown,
    update_noise,
    usual_cohorts,
    verdict,
)
from .guarantee import Guarantee, default_delta, rounded_up, warn_of_delta
from .ledger import Ledger
from .noise_split import DeltaNoise, default_count_stddev, split_noise
from .relations import Relation

CURVE_POINTS = 8


@dataclass(frozen=True)
class Plan:
    """A training that has not been run: all its settings and what they guarantee. Prints as one screen of text."""

    found: str  # which of epsilon, noise_multiplier, cohort_size and rounds was asked for; or "scale"
    guarantee: Guarantee
    renyi_epsilon: float  # of the Renyi accountant alone
    noise_multiplier: float
    delta_noise_multiplier: DeltaNoise | None  # None: the count would reveal more than the round may
    count_stddev: float
    cohort_size: int
    population_size: int
    rounds: int
    sampling: str
    comparison: tuple[tuple[str, Relation, float], ...] = field(repr=False)  # sampling, relation, epsilon
    curve: tuple[tuple[int, float], ...] = field(repr=False)  # rounds, epsilon at most
    parameters: int | None = None  # how many are trained, if that was given
    remedies: Remedies | None = field(default=None, repr=False)  # where so many cannot be expected to train
    bands: int = 1  # of the noise: 1 is independent
    gain: float = 1.0  # how many times less noise stays in the models than independent noise would leave, about

    @property
    def rate(self) -> float:
        """The probability that a given user takes part in a round."""
        return self.cohort_size / self.population_size

    @property
    def update_noise(self) -> float:
        """The noise multiplier of the summed updates; all of the round's where a count is not possible."""
        delta_noise = self.delta_noise_multiplier
        return self.noise_multiplier if delta_noise is None else float(delta_noise)

    @property
    def lasting_noise(self) -> float:
        """The multiplier on summed updates of independent noise that would leave as much in the models."""
        return self.update_noise * lasting_share(self.rounds, self.bands)

    @property
    def noise_norm(self) -> float | None:
        """The norm of the noise on the mean update, in clips. None if the number of parameters was not given.

        Of banded noise the part that stays in the models.
        """
        return None if self.parameters is None else noise_norm(self.lasting_noise, self.cohort_size, self.parameters)

    @property
    def noise_memory(self) -> int | None:
        """Bytes that earlier noise takes. None if the number of parameters was not given."""
        return None if self.parameters is None else 4 * (self.bands - 1) * self.parameters

    def to_json(self) -> dict[str, Any]:
        """For programs; an infinite epsilon is null."""
        guarantee, delta_noise = self.guarantee, self.delta_noise_multiplier
        return {
            "found": self.found,
            "epsilon": guarantee.epsilon if guarantee.private else None,
            "delta": guarantee.delta,
            "noise_multiplier": self.noise_multiplier,
            "delta_noise_multiplier": None if delta_noise is None else float(delta_noise),
            "count_stddev": self.count_stddev,
            "cohort_size": self.cohort_size,
            "population_size": self.population_size,
            "rounds": self.rounds,
            "sampling": self.sampling,
            "bands": self.bands,
            "gain": self.gain,
            "relation": str(guarantee.relation),
            "accountant": guarantee.accountant,
            "sound": guarantee.sound,
            "guarantee": str(guarantee),
            "renyi_epsilon": self.renyi_epsilon if math.isfinite(self.renyi_epsilon) else None,
            "mu": guarantee.mu if guarantee.private else None,
            "comparison": [
                {"sampling": name, "relation": str(other), "epsilon": epsilon if math.isfinite(epsilon) else None}
                for name, other, epsilon in self.comparison
            ],
            "curve": [{"rounds": rounds, "epsilon": epsilon} for rounds, epsilon in self.curve],
        } | ({} if self.noise_norm is None else self._model_json(self.noise_norm))

    def _model_json(self, norm: float) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "noise_memory": self.noise_memory,
            "noise_norm": norm,
            "verdict": str(verdict(norm)),
            "slowdown": slowdown(norm),
            "remedies": None if self.remedies is None else self.remedies.to_json(),
        }

    def __str__(self) -> str:
        # By name, as the words stand above the numbers.
        text: str = import_module("clipline.cli.plan_text").plan_text(self)
        return text


def plan(
    *,
    population_size: int,
    cohort_size: int | None = None,
    rounds: int | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    sampling: str = "poisson",
    relation: Relation | str | None = None,
    count_stddev: float | None = None,
    noise: str | None = None,
    bands: int | str | None = None,
    parameters: Parameters | None = None,
    scale: tuple[int, float] | None = None,
) -> Plan:
    """Find the one of epsilon, noise_multiplier, cohort_size and rounds that is left out.

    Epsilon is the least that can be shown, noise the least that will do. Cohort size and rounds are the most that
    epsilon allows.

    Args:
      population_size: Number of users.
      cohort_size: Users of a round.
      rounds: Number of rounds.
      epsilon: The largest privacy loss.
      noise_multiplier: Noise of a round, in clips.
      delta: Left out, it is `population_size ** -1.1`.
      sampling: "poisson" or "fixed".
      relation: Which two populations are neighbours. Left out, it follows from the sampling.
      count_stddev: Noise on the count of users within the clip, in users.
      noise: "independent" or "banded". Banded noise needs a cohort size.
      bands: How many bands, or "auto".
      parameters: How many are trained, or the shape of each trained tensor. Adds whether such a model can be trained
        under the noise, and if not, what would help.
      scale: `(m, z)` takes the third step of the paper's recipe: with epsilon and rounds given, the least multiple of
        both that reaches epsilon.

    Returns:
      The plan: all settings and what they guarantee. It prints as one screen of text.

    Raises:
      SettingError: If not exactly one is left out, or nothing reaches epsilon.

    Example:
      >>> print(cl.plan(population_size=20_000, cohort_size=500, rounds=300, epsilon=4.0))
    """
    population_size, terms = _terms(population_size, delta, sampling, relation, epsilon, rounds, cohort_size)
    count = None if parameters is None else count_parameters(parameters)
    found = _left_out(scale, epsilon=epsilon, noise_multiplier=noise_multiplier, cohort_size=cohort_size, rounds=rounds)
    m: Any = cohort_size
    z: Any = noise_multiplier
    target: dict[str, Any] = {"rounds": rounds, "epsilon": epsilon, **terms}
    unasked = noise is None and bands is None
    number = 1
    if _is_banded(
        SETTINGS["noise"].default if unasked else noise, bands, sampling, terms["relation"], asked=not unasked
    ):
        number = _bands_of(bands, found, cohort_size, population_size, target, asked=noise is not None)
    if found == "scale":
        m, z = _scaled(scale, population_size, sampling, target)
    elif found == "noise_multiplier":
        z = noise_multiplier_for(sampling=sampling_named(sampling, m, population_size, number), **target)
    elif found == "cohort_size":
        m = cohort_within(noise_multiplier=z, population_size=population_size, sampling=sampling, **target)
        if m == 0:
            raise refuse("epsilon", epsilon, "enough for a cohort of one user", "raise noise_multiplier or epsilon")
    elif found == "rounds":
        event = GaussianEvent(sampling_named(sampling, m, population_size, number), z)
        target["rounds"] = rounds_within(event, epsilon=target["epsilon"], **terms)
        if target["rounds"] == 0:
            raise refuse(
                "epsilon", epsilon, "enough for one round", "raise noise_multiplier or epsilon, or lower cohort_size"
            )
    count_stddev = default_count_stddev(m, z) if (chosen := count_stddev) is None else chosen
    check("count_stddev", count_stddev)
    try:
        delta_noise: DeltaNoise | None = split_noise(z, count_stddev)
    except SettingError:
        delta_noise = None

    def ledger(name: str, rounds: int) -> Ledger:
        return Ledger().add(GaussianEvent(sampling_named(name, m, population_size, number), z), rounds)

    last = target["rounds"]
    if number > last:
        raise refuse("bands", number, f"at most the {last} rounds", "take fewer bands")
    guarantee = account(ledger(sampling, last), **terms)
    curve: list[tuple[int, float]] = []
    spent = guarantee.epsilon
    steps = sorted({max(1, round(last * k / CURVE_POINTS)) for k in range(1, CURVE_POINTS + 1)})
    for step in reversed(steps if guarantee.private else ()):
        # From the last point down. Fewer rounds cost no more, so that a rough bound is capped by the point after it.
        spent = spent if step == last else min(spent, rough_epsilon(ledger(sampling, step), **terms))
        curve.insert(0, (step, spent))
    complete = Plan(
        found, guarantee, account_renyi(ledger(sampling, last), **terms).epsilon, z, delta_noise, count_stddev,
        m, population_size, last, sampling, parameters=count, curve=tuple(curve),
        comparison=tuple(
            (name, other, account(ledger(name, last), delta=terms["delta"], relation=other).epsilon)
            for name in ("poisson", "fixed") for other in Relation if other.sound and number == 1
        ),
        bands=number,
    )  # fmt: skip
    if number > 1 and guarantee.private:
        alone = rough_noise_multiplier_for(
            sampling=sampling_named(sampling, m, population_size), rounds=last, epsilon=guarantee.epsilon, **terms
        )
        complete = replace(complete, gain=update_noise(alone, m, chosen) / complete.lasting_noise)
    if parameters is None or not guarantee.private:
        return complete
    promised = guarantee.epsilon if epsilon is None else epsilon
    setup = Setup(population_size, m, last, promised, sampling, terms["relation"], delta, chosen, number)
    return replace(complete, remedies=find_remedies(setup, complete.lasting_noise, parameters))


def plan_table(
    *,
    population_size: int,
    epsilon: float,
    cohort_size: int | None = None,
    rounds: int | None = None,
    delta: float | None = None,
    sampling: str = "poisson",
    relation: Relation | str | None = None,
    count_stddev: float | None = None,
    noise: str | None = None,
    bands: int | str | None = None,
    parameters: Parameters | None = None,
) -> NoiseTable:
    """The noise that a promise needs, for several cohorts and numbers of rounds, or for the ones given.

    With `parameters` also which of these such a model can be trained with; otherwise how many parameters each bears.
    Noise is banded unless `noise` says otherwise, where that can be accounted; each cell has bands of its own, or up to
    as many as `bands` says.
    """
    population_size, terms = _terms(population_size, delta, sampling, relation, epsilon, rounds, cohort_size)
    count = None if parameters is None else count_parameters(parameters)
    check("count_stddev", count_stddev)
    sizes: dict[str, Any] = {"cohort_size": cohort_size or 1, "population_size": population_size}
    banded = _is_banded(noise, bands, sampling, terms["relation"])
    if banded and isinstance(bands, int):
        check_bands(bands, **sizes)
    cells = []
    for m in usual_cohorts(population_size) if cohort_size is None else (cohort_size,):
        for last in ROUNDS if rounds is None else (rounds,):
            target = {"rounds": last, "epsilon": epsilon, **terms}
            cells.append(_cell(m, population_size, sampling, count_stddev, (bands or "auto") if banded else 1, target))
    table = NoiseTable(
        population_size, epsilon, terms["delta"], terms["relation"], sampling, tuple(cells), count, banded=banded
    )
    if parameters is None:
        return table
    best = table.best
    setup = Setup(
        population_size, best.cohort_size, best.rounds, epsilon, sampling, terms["relation"], delta, count_stddev,
        best.bands,
    )  # fmt: skip
    return replace(table, remedies=find_remedies(setup, best.lasting_noise, parameters))


def _cell(
    m: int, population_size: int, sampling: str, count_stddev: float | None, bands: int | str, target: dict[str, Any]
) -> NoiseCell:
    """The cell of this cohort and these rounds; with bands of a number, fewer where groups would be too small."""
    if bands == "auto":
        number, z, alone = bands_and_noise(m, population_size, **target)
    else:
        number = min(int(bands), target["rounds"], population_size // m)
        z, alone = (
            rough_noise_multiplier_for(sampling=sampling_named(sampling, m, population_size, one), **target)
            for one in (number, 1)
        )
    noise, share = update_noise(z, m, count_stddev), lasting_share(target["rounds"], number)
    gain = update_noise(alone, m, count_stddev) / (noise * share)
    return NoiseCell(m, target["rounds"], z, noise, number, share, gain)


def _is_banded(
    noise: str | None, bands: int | str | None, sampling: str, relation: Relation, *, asked: bool = True
) -> bool:
    """Whether noise is banded: as `noise` says, else where that can be accounted. Refused if `asked` and it cannot."""
    for name, value in (("noise", noise), ("bands", bands)):
        if value is not None:
            check(name, value)
    accountable = sampling == "poisson" and relation in (Relation.ADD_OR_REMOVE, Relation.ZERO_OUT)
    if noise == "independent":
        if bands not in (None, "auto"):
            raise refuse("bands", bands, "left out where noise='independent'", "set noise='banded'")
        return False
    if asked and (noise or bands) and not accountable:
        limit = "'independent' but for Poisson sampling and the relations add-or-remove and zero-out"
        raise refuse("noise", "banded", limit, "leave sampling and relation out")
    return accountable


def _bands_of(
    bands: int | str | None,
    found: str,
    cohort_size: int | None,
    population_size: int,
    target: dict[str, Any],
    *,
    asked: bool,
) -> int:
    """How many bands the noise of one plan has."""
    if found in ("cohort_size", "scale"):
        if asked or bands is not None:
            raise refuse("noise", "banded", "'independent' where the cohort is to be found", "give cohort_size")
        return 1
    assert cohort_size is not None
    sizes: dict[str, Any] = {"cohort_size": cohort_size, "population_size": population_size}
    if isinstance(bands, int):
        check_bands(bands, **sizes)
        return bands
    if found == "noise_multiplier":
        return choose_bands(**sizes, **target)
    if asked or bands is not None:
        raise refuse("bands", "auto", "a number where noise_multiplier is given", "give bands=8, say, or epsilon")
    return 1


def _terms(
    population_size: int,
    delta: float | None,
    sampling: str,
    relation: Relation | str | None,
    epsilon: float | None,
    rounds: int | None,
    cohort_size: int | None,
) -> tuple[int, dict[str, Any]]:
    """The population, and delta and relation, which follow from the rest if left out. All of these are checked."""
    population_size = int(check("population_size", population_size))
    if delta is None and population_size == 1:
        raise refuse("population_size", population_size, "at least 2 where delta follows from it", "give delta")
    delta = default_delta(population_size) if delta is None else float(check("delta", delta))
    warn_of_delta(delta, population_size, stacklevel=4)
    kind = (
        default_relation(sampling_named(sampling, 1, population_size)) if relation is None else Relation.named(relation)
    )
    check("epsilon", epsilon)
    if rounds is not None:
        check("rounds", rounds)
    if cohort_size is not None:
        _check_cohort(cohort_size, population_size)
    return population_size, {"delta": delta, "relation": kind}


def _left_out(scale: tuple[int, float] | None, **given: float | None) -> str:
    missing = [name for name, value in given.items() if value is None]
    if scale is not None:
        if sorted(missing) != ["cohort_size", "noise_multiplier"]:
            raise SettingError(
                f"{scale=} stands for cohort_size and noise_multiplier, with epsilon and rounds given: "
                f"give those two and no others (left out now: {', '.join(missing) or 'nothing'})"
            )
        return "scale"
    if len(missing) != 1:
        now = f"{', '.join(missing)} are" if missing else "none is"
        way_out = "give three of them, or epsilon alone for a table" if missing else "drop the one to be found"
        raise SettingError(
            "of epsilon, noise_multiplier, cohort_size and rounds exactly one must be left out, "
            f"and now {now}: {way_out}"
        )
    return missing[0]


def _scaled(scale: Any, population_size: int, sampling: str, target: dict[str, Any]) -> tuple[int, float]:
    cohort_size, z = scale
    _check_cohort(cohort_size, population_size)
    check_number("noise_multiplier", z, above=0, way_out="give the noise that the model tolerates at this cohort")
    try:
        scaled = least_scale(
            cohort_size=cohort_size, noise_multiplier=z, population_size=population_size, sampling=sampling, **target
        )
    except SettingError:
        all_users = sampling_named(sampling, population_size, population_size)
        event = GaussianEvent(all_users, z * population_size / cohort_size)
        terms = {"delta": target["delta"], "relation": target["relation"]}
        best = account(Ledger().add(event, target["rounds"]), **terms)
        allowed = rounds_within(event, epsilon=target["epsilon"], **terms)
        fewer = f", or {allowed} rounds" if allowed else ""
        needed = noise_multiplier_for(sampling=all_users, **target)
        raise SettingError(
            f"scale='m={cohort_size},z={z:g}' must reach epsilon={target['epsilon']} with the {population_size} users "
            f"there are, and does not: take epsilon {best.epsilon_text}, which all users in every round reach{fewer}, "
            f"or find a model that tolerates z={rounded_up(needed * cohort_size / population_size, 3)} at "
            f"m={cohort_size}"
        ) from None
    return scaled, z * scaled / cohort_size


def _check_cohort(cohort_size: int, population_size: int) -> None:
    check("cohort_size", cohort_size)
    if cohort_size > population_size:
        limit = f"at most the population, {population_size} users"
        raise refuse("cohort_size", cohort_size, limit, "lower the cohort or declare more users")
