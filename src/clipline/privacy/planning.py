"""Planning a training: of epsilon, noise multiplier, cohort and rounds, find the one that is not given."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..errors import SettingError, check_number, check_whole, refuse
from .accountant import account, account_renyi, default_relation, rough_epsilon
from .calibration import cohort_within, least_scale, noise_multiplier_for, rounds_within
from .events import GaussianEvent, sampling_named
from .guarantee import Guarantee, rounded_up
from .ledger import Ledger
from .noise_split import DeltaNoise, split_noise
from .plan_text import plan_text
from .relations import Relation

CURVE_POINTS = 8


@dataclass(frozen=True)
class Plan:
    """A training that has not been run: all its settings and what they guarantee. Prints as one screen of text."""

    found: str  # which of epsilon, noise_multiplier, cohort and rounds was asked for; or "scale"
    guarantee: Guarantee
    renyi_epsilon: float  # of the Renyi accountant alone
    noise_multiplier: float
    delta_noise_multiplier: DeltaNoise | None  # None: the count would reveal more than the round may
    count_stddev: float
    cohort: int
    users: int
    rounds: int
    sampling: str
    comparison: tuple[tuple[str, Relation, float], ...] = field(repr=False)  # sampling, relation, epsilon
    curve: tuple[tuple[int, float], ...] = field(repr=False)  # rounds, epsilon at most

    @property
    def rate(self) -> float:
        """The probability that a given user takes part in a round."""
        return self.cohort / self.users

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
            "cohort": self.cohort,
            "users": self.users,
            "rounds": self.rounds,
            "sampling": self.sampling,
            "relation": str(guarantee.relation),
            "accountant": guarantee.accountant,
            "sound": guarantee.sound,
            "guarantee": str(guarantee),
            "renyi_epsilon": self.renyi_epsilon if math.isfinite(self.renyi_epsilon) else None,
            "mu": guarantee.mu if guarantee.private else None,
            "comparison": [
                {
                    "sampling": sampling,
                    "relation": str(relation),
                    "epsilon": epsilon if math.isfinite(epsilon) else None,
                }
                for sampling, relation, epsilon in self.comparison
            ],
            "curve": [{"rounds": rounds, "epsilon": epsilon} for rounds, epsilon in self.curve],
        }

    def __str__(self) -> str:
        return plan_text(self)


def plan(
    *,
    users: int,
    cohort: int | None = None,
    rounds: int | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    sampling: str = "poisson",
    relation: Relation | str | None = None,
    count_stddev: float | None = None,
    scale: tuple[int, float] | None = None,
) -> Plan:
    """Find the one of epsilon, noise_multiplier, cohort and rounds that is left out.

    The answer is the least epsilon that can be shown, the least noise, or the largest cohort or number of rounds that
    epsilon allows. `delta` is users^-1.1 if left out; the relation follows the sampling. `scale=(m, z)` does the third
    step of the paper's recipe instead: with epsilon and rounds given, the least multiple of both that reaches epsilon.
    """
    users = check_whole(
        "users", users, at_least=2, at_most=10**12, way_out="give the number of users in the population"
    )
    delta = check_number(
        "delta", users**-1.1 if delta is None else delta, above=0, below=1, way_out="users^-1.1 is usual"
    )
    kind = default_relation(sampling_named(sampling, 1, users)) if relation is None else Relation.named(relation)
    terms: dict[str, Any] = {"delta": delta, "relation": kind}
    found = _left_out(cohort, rounds, epsilon, noise_multiplier, scale)
    if rounds is not None:
        check_whole("rounds", rounds, at_least=1, at_most=10**12, way_out="train for at least one round")
    if cohort is not None:
        _check_cohort(cohort, users)
    if found == "scale":
        cohort, noise_multiplier = _scaled(scale, users, sampling, rounds, epsilon, terms)
    elif found == "noise_multiplier":
        assert cohort is not None
        noise_multiplier = noise_multiplier_for(
            sampling=sampling_named(sampling, cohort, users), rounds=_given(rounds), epsilon=_given(epsilon), **terms
        )
    elif found == "cohort":
        cohort = cohort_within(
            noise_multiplier=_given(noise_multiplier), population_size=users, sampling=sampling, rounds=_given(rounds),
            epsilon=_given(epsilon), **terms,
        )  # fmt: skip
        if cohort == 0:
            raise refuse("epsilon", epsilon, "enough for a cohort of one user", "raise noise_multiplier or epsilon")
    elif found == "rounds":
        assert cohort is not None
        event = GaussianEvent(sampling_named(sampling, cohort, users), _given(noise_multiplier))
        rounds = rounds_within(event, epsilon=_given(epsilon), **terms)
        if rounds == 0:
            raise refuse(
                "epsilon", epsilon, "enough for one round", "raise noise_multiplier or epsilon, or lower cohort"
            )
    return _complete(
        found, _given(cohort), users, _given(rounds), _given(noise_multiplier), sampling, count_stddev, terms
    )


def _complete(
    found: str, cohort: int, users: int, rounds: int, z: float, sampling: str, count_stddev: float | None, terms: Any
) -> Plan:
    def ledger(name: str, count: int) -> Ledger:
        return Ledger().add(GaussianEvent(sampling_named(name, cohort, users), z), count)

    guarantee = account(ledger(sampling, rounds), **terms)
    count_stddev = (cohort / 20 if z > 0 else 0.0) if count_stddev is None else count_stddev
    check_number("count_stddev", count_stddev, at_least=0, way_out="cohort / 20 is the paper's choice")
    try:
        delta_noise: DeltaNoise | None = split_noise(z, count_stddev)
    except SettingError:
        delta_noise = None
    steps = sorted({max(1, round(rounds * k / CURVE_POINTS)) for k in range(1, CURVE_POINTS + 1)})
    pairs = [(name, other) for name in ("poisson", "fixed") for other in Relation if other.sound]
    comparison = tuple(
        (name, other, account(ledger(name, rounds), delta=terms["delta"], relation=other).epsilon)
        for name, other in pairs
    )
    curve: list[tuple[int, float]] = []
    epsilon = guarantee.epsilon
    for count in reversed(steps if guarantee.private else ()):
        # From the last point down. Fewer rounds cost no more, so that a rough bound is capped by the point after it.
        epsilon = min(epsilon, epsilon if count == rounds else rough_epsilon(ledger(sampling, count), **terms))
        curve.insert(0, (count, epsilon))
    return Plan(
        found, guarantee, account_renyi(ledger(sampling, rounds), **terms).epsilon, z,
        delta_noise, count_stddev, cohort, users, rounds, sampling, comparison, tuple(curve),
    )  # fmt: skip


def _left_out(
    cohort: int | None,
    rounds: int | None,
    epsilon: float | None,
    noise_multiplier: float | None,
    scale: tuple[int, float] | None,
) -> str:
    given = {"epsilon": epsilon, "noise_multiplier": noise_multiplier, "cohort": cohort, "rounds": rounds}
    missing = [name for name, value in given.items() if value is None]
    if scale is not None:
        if sorted(missing) != ["cohort", "noise_multiplier"]:
            raise SettingError(
                f"{scale=} stands for cohort and noise_multiplier, with epsilon and rounds given: "
                f"give those two and no others (left out now: {', '.join(missing) or 'nothing'})"
            )
        return "scale"
    if len(missing) != 1:
        raise SettingError(
            f"of epsilon, noise_multiplier, cohort and rounds exactly one must be left out, and it is "
            f"{', '.join(missing) or 'none'}: leave out the one to be found"
        )
    return missing[0]


def _scaled(
    scale: Any, users: int, sampling: str, rounds: int | None, epsilon: float | None, terms: Any
) -> tuple[int, float]:
    cohort, z = scale
    _check_cohort(cohort, users)
    check_number("noise_multiplier", z, above=0, way_out="give the noise that the model tolerates at this cohort")
    try:
        scaled = least_scale(
            cohort_size=cohort, noise_multiplier=z, population_size=users, sampling=sampling, rounds=_given(rounds),
            epsilon=_given(epsilon), **terms,
        )  # fmt: skip
    except SettingError:
        event = GaussianEvent(sampling_named(sampling, users, users), z * users / cohort)
        best = account(Ledger().add(event, _given(rounds)), **terms)
        allowed = rounds_within(event, epsilon=_given(epsilon), **terms)
        fewer = f", or {allowed} rounds" if allowed else ""
        needed = noise_multiplier_for(sampling=event.sampling, rounds=_given(rounds), epsilon=_given(epsilon), **terms)
        raise SettingError(
            f"scale='m={cohort},z={z:g}' must reach {epsilon=} with the {users} users there are, and does not: take "
            f"epsilon {best.epsilon_text}, which all users in every round reach{fewer}, or find a "
            f"model that tolerates z={rounded_up(needed * cohort / users, 3)} at m={cohort}"
        ) from None
    return scaled, z * scaled / cohort


def _check_cohort(cohort: int, users: int) -> None:
    check_whole("cohort", cohort, at_least=1, way_out="sample at least one user a round")
    if cohort > users:
        raise refuse("cohort", cohort, f"at most the population, {users} users", "lower the cohort or bring more users")


def _given(value: Any) -> Any:
    assert value is not None
    return value
