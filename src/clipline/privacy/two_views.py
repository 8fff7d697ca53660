"""Two statements about a federation: for outsiders, who do not know the cohorts, and against its server, which does.

They rest on two ledgers and are never mixed. An outsider sees models; that a user was drawn is a secret, and sampling
helps. The server asked the users itself. Against it a user who took part k times has k releases without sampling, so
participations are counted and capped. If the server adds the noise, it has seen the sum without: no promise then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
        check_whole("max_participations", self.max_participations, at_least=1, way_out="give rounds a user, such as 5")

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
    """What the server has seen of a user who took part in so many of the rounds: those with the least noise.

    Statistics that were released before count too, all of them.
    """
    check_whole("participations", participations, at_least=0, way_out="give the most rounds of any user")
    seen, left = Ledger(), participations
    for event, count in sorted(ledger.entries, key=lambda entry: entry[0].noise_multiplier):
        if isinstance(event.sampling, GroupedPoissonSampling):
            raise SettingError("banded noise has no statement against the server: use independent noise")
        taken = count if event.statistic is not None else min(count, left)
        left -= 0 if event.statistic is not None else taken
        alone = GaussianEvent(NoSampling(), event.noise_multiplier, event.statistic, event.log_ratio)
        seen = seen.add(alone, taken)
    return seen


@dataclass(frozen=True)
class TwoGuarantees:
    """What a federation promises. `server` is None where the server adds the noise: it has seen the exact sum."""

    outsiders: Guarantee
    server: Guarantee | None
    participations: int

    def __str__(self) -> str:
        """Two sentences to quote."""
        outside = f"For outsiders, who do not know the cohorts: {self.outsiders}."
        if self.server is None:
            return f"{outside}\nAgainst the server: no promise of differential privacy, since it adds the noise itself."
        rounds = f"{self.participations} round{'' if self.participations == 1 else 's'}"
        return f"{outside}\nAgainst the server, for a user who takes part in at most {rounds}: {self.server}."


def account_both(
    ledger: Ledger, *, delta: float, relation: Relation, participations: int, noise_by_clients: bool
) -> TwoGuarantees:
    """Both statements about a ledger of rounds.

    `relation` is that of the first. Against the server it is always zero-out: who took part is known to it, and what
    is protected is what they sent. Replace-one is refused where participations are capped, see federation.md.
    """
    relation = Relation.named(relation)
    if relation not in (Relation.ADD_OR_REMOVE, Relation.ZERO_OUT):
        raise refuse("relation", relation.value, "add-or-remove or zero-out where participations are capped",
                     "take one of them")  # fmt: skip
    outsiders = account(ledger, delta=delta, relation=relation)
    if not noise_by_clients:
        return TwoGuarantees(outsiders, None, participations)
    seen = against_server(ledger, participations)
    return TwoGuarantees(outsiders, account(seen, delta=delta, relation=Relation.ZERO_OUT), participations)
