"""Two statements about a federation: for outsiders, who do not know the cohorts, and against its server, which does.

They rest on two ledgers and are never mixed. An outsider sees models; that a user was drawn is a secret, and sampling
helps. The server asked the users itself. Against it a user who took part k times has k releases without sampling, so
participations are counted and capped. If the server adds the noise, it has seen the sum without: no promise then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import SettingError, check_whole, refuse
from .accountant import account
from .events import GaussianEvent, GroupedPoissonSampling, NoSampling
from .guarantee import Guarantee
from .ledger import Ledger
from .relations import Relation


@dataclass(frozen=True)
class Participations:
    """How often each user was asked, and how often anybody may be. Private: it names who took part.

    A user counts as soon as they are asked, whether an answer comes or not.
    """

    max_participations: int
    counts: Mapping[str, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_whole("max_participations", self.max_participations, at_least=max(self.most, 1), way_out="raise it")

    def allowed(self, users: Iterable[str]) -> list[str]:
        """Those who may be asked once more. Draw the cohort first: a draw from these alone changes its rate."""
        return [user for user in users if self.counts.get(user, 0) < self.max_participations]

    def add(self, users: Iterable[str]) -> Participations:
        """With one more for each of these users, each of whom must be allowed and named once."""
        counts = dict(self.counts)
        for user in users:
            if counts.get(user, 0) >= self.max_participations or counts.get(user, 0) > self.counts.get(user, 0):
                limit = f"at most {self.max_participations} rounds of a user, one at a time"
                raise refuse("participations", counts[user] + 1, limit, "ask `allowed` users only")
            counts[user] = counts.get(user, 0) + 1
        return Participations(self.max_participations, counts)

    @property
    def most(self) -> int:
        """Rounds of the user who was asked most often."""
        return max(self.counts.values(), default=0)


def against_server(ledger: Ledger, participations: int) -> Ledger:
    """What the server has seen of a user who was asked so often: rounds without sampling, those with the least noise.

    A user may have been asked more often than there are rounds, as an attempt that came to nothing counts. Each of
    these is one more round with the least noise. Statistics that were released before count too, all of them.
    """
    check_whole("participations", participations, at_least=0, way_out="give how often any user was asked at most")
    seen, left = Ledger(), participations
    entries = sorted(ledger.entries, key=lambda entry: entry[0].noise_multiplier)
    first = next((event for event, _ in entries if event.statistic is None), None)
    for event, count in entries:
        if isinstance(event.sampling, GroupedPoissonSampling):
            raise SettingError("banded noise has no statement against the server: use independent noise")
        if event.statistic is None:
            count = min(count + (max(participations - ledger.rounds, 0) if event is first else 0), left)
            left -= count
        seen = seen.add(GaussianEvent(NoSampling(), event.noise_multiplier, event.statistic, event.log_ratio), count)
    return seen


@dataclass(frozen=True)
class TwoGuarantees:
    """What a federation promises. `server` is None where the server adds the noise: it has seen the exact sum."""

    outsiders: Guarantee
    server: Guarantee | None
    participations: int  # 0 where nothing is promised for them

    def __str__(self) -> str:
        """Two sentences to quote, a line each."""
        return f"For outsiders, who do not know the cohorts: {self.outsiders}.\n{self.against_server}"

    @property
    def against_server(self) -> str:
        """The second sentence."""
        if self.server is None:
            return "Against the server: no promise of differential privacy, since it adds the noise itself."
        rounds = f"{self.participations} round{'' if self.participations == 1 else 's'}"
        return f"Against the server, for a user who takes part in at most {rounds}: {self.server}."


def most_participations(told: Mapping[str, Any], rounds: int) -> int:
    """How often a user takes part at most, by what a model's card tells of its federation; 0 where it adds no noise.

    The server may have opened every sum that it asked for. How often it asked one user would tell outsiders of cohorts.
    """
    most = min(max(told["asked"], rounds), told.get("max_participations", math.inf))
    return int(most) if told["noise_by_clients"] else 0


def account_both(outsiders: Guarantee, ledger: Ledger, participations: int) -> TwoGuarantees:
    """Both statements about a ledger of rounds, of which the first is accounted already.

    `participations` is how often a user was asked at most, or 0 where the server adds the noise. Against the server the
    relation is always zero-out: who took part is known to it, and what is protected is what they sent.
    """
    if not participations:
        return TwoGuarantees(outsiders, None, 0)
    seen = account(against_server(ledger, participations), delta=outsiders.delta, relation=Relation.ZERO_OUT)
    flags = {name: getattr(outsiders, name) for name in ("example_level", "shows_errors")}
    return TwoGuarantees(
        outsiders, replace(seen, from_seed=seen.from_seed or outsiders.from_seed, **flags), participations
    )
