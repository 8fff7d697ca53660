"""What one release did, as far as privacy is concerned: how users were sampled and how much noise was added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal

from ..errors import SettingError, check_choice, check_number, check_whole, nearest, refuse
from .noise_split import DeltaNoise

SamplingName = Literal["none", "poisson", "grouped-poisson", "truncated-poisson", "fixed"]
_LONGEST_NAME = 400  # of a statistic, in letters


@dataclass(frozen=True)
class NoSampling:
    """Every user takes part in every round."""

    name: ClassVar[SamplingName] = "none"
    rate: ClassVar[float] = 1.0

    def __str__(self) -> str:
        return "no sampling, every user in every round"


@dataclass(frozen=True)
class PoissonSampling:
    """Each user takes part with probability `rate`, independently of all others and of other rounds."""

    rate: float
    name: ClassVar[SamplingName] = "poisson"

    def __post_init__(self) -> None:
        way_out = "give the share of users expected in a round, such as 0.01"
        object.__setattr__(self, "rate", check_number("rate", self.rate, above=0, at_most=1, way_out=way_out))

    def __str__(self) -> str:
        return f"Poisson sampling at rate {self.rate:g}"


@dataclass(frozen=True)
class GroupedPoissonSampling:
    """Poisson sampling at `rate` from one of `bands` groups of users, which take turns, for noise with as many bands.

    The noise of `bands` consecutive rounds belongs together, and a user takes part in one of them at most. So this
    round is not accounted alone: `index` is how many rounds of the same noise came before it, and `Ledger.costs` says
    what the rounds cost together.
    """

    rate: float
    bands: int
    index: int = 0
    name: ClassVar[SamplingName] = "grouped-poisson"

    def __post_init__(self) -> None:
        way_out = "give bands times the share of users expected in a round, such as 0.1"
        object.__setattr__(self, "rate", check_number("rate", self.rate, above=0, at_most=1, way_out=way_out))
        for name, least in (("bands", 1), ("index", 0)):
            checked = check_whole(name, getattr(self, name), at_least=least, way_out="give what the sampler had")
            object.__setattr__(self, name, checked)

    def __str__(self) -> str:
        return f"Poisson sampling at rate {self.rate:g} from one of {self.bands} groups in turn"


@dataclass(frozen=True)
class TruncatedPoissonSampling:
    """Poisson sampling at `rate` from `population_size` users, but never more than `cap` of them.

    If more than `cap` are drawn, `cap` of them are kept, every such set equally likely. The others count as not drawn.
    A cap a few standard deviations above the expected cohort costs next to nothing.
    """

    rate: float
    population_size: int
    cap: int
    name: ClassVar[SamplingName] = "truncated-poisson"

    def __post_init__(self) -> None:
        way_out = "give the share of users expected in a round, such as 0.01"
        object.__setattr__(self, "rate", check_number("rate", self.rate, above=0, at_most=1, way_out=way_out))
        way_out = "give the number of users in the population"
        population = check_whole("population_size", self.population_size, at_least=1, way_out=way_out)
        object.__setattr__(self, "population_size", population)
        way_out = "give the most users that a round can take, well above rate * population_size"
        object.__setattr__(self, "cap", check_whole("cap", self.cap, at_least=1, way_out=way_out))

    def __str__(self) -> str:
        return f"Poisson sampling at rate {self.rate:g} of {self.population_size} users, at most {self.cap}"


@dataclass(frozen=True)
class FixedSizeSampling:
    """Exactly `cohort_size` of `population_size` users, without replacement, drawn afresh each round."""

    cohort_size: int
    population_size: int
    name: ClassVar[SamplingName] = "fixed"

    def __post_init__(self) -> None:
        way_out = "give the number of users in the population"
        population = check_whole("population_size", self.population_size, at_least=1, way_out=way_out)
        way_out = "a cohort is drawn without replacement, so lower cohort_size or raise population_size"
        cohort = check_whole("cohort_size", self.cohort_size, at_least=1, at_most=population, way_out=way_out)
        object.__setattr__(self, "population_size", population)
        object.__setattr__(self, "cohort_size", cohort)

    @property
    def rate(self) -> float:
        """The probability that a given user takes part in a round."""
        return self.cohort_size / self.population_size

    def __str__(self) -> str:
        return f"fixed-size sampling, {self.cohort_size} of {self.population_size} users"


Sampling = NoSampling | PoissonSampling | GroupedPoissonSampling | TruncatedPoissonSampling | FixedSizeSampling

_SAMPLINGS: dict[str, type[Sampling]] = {
    kind.name: kind
    for kind in (NoSampling, PoissonSampling, GroupedPoissonSampling, TruncatedPoissonSampling, FixedSizeSampling)
}


def sampling_named(
    name: str, cohort_size: int, population_size: int, bands: int = 1
) -> PoissonSampling | GroupedPoissonSampling | FixedSizeSampling:
    """The sampling that settings call "poisson" (of this expected size; in groups for noise with bands) or "fixed"."""
    fixed = FixedSizeSampling(cohort_size, population_size)  # checks both sizes
    is_poisson = check_choice("sampling", name, ("poisson", "fixed")) == "poisson"
    if bands > 1:
        if not is_poisson:
            raise refuse("bands", bands, "1 where sampling='fixed'", "take sampling='poisson'")
        return GroupedPoissonSampling(bands * cohort_size / population_size, bands)
    return PoissonSampling(fixed.rate) if is_poisson else fixed


@dataclass(frozen=True)
class Statistic:
    """What an event released that was no round of training: a statistic of the data, named in every guarantee.

    `identity` says which release it was, so that a ledger holds it once. `threshold_delta` is the chance, at most, that
    a key shows which one user alone has; it is taken off the delta. `from_seed` is whether its noise came from a seed.
    `example_level`: whom it protects is one example, as in `Population.one_each`, and not a user.
    """

    name: str
    identity: str
    threshold_delta: float = 0.0
    from_seed: bool = False
    example_level: bool = False

    def __post_init__(self) -> None:
        for name in ("name", "identity"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or len(value) > _LONGEST_NAME or not value.isprintable():
                limit = f"1 to {_LONGEST_NAME} printable letters"
                raise refuse(f"{name} of a statistic", type(value).__name__, limit, "give a short text")
        way_out = "give far less than delta, such as 1e-8"
        checked = check_number("threshold_delta", self.threshold_delta, at_least=0, below=0.5, way_out=way_out)
        object.__setattr__(self, "threshold_delta", checked)
        for name, way_out in (
            ("from_seed", "say where the noise came from"),
            ("example_level", "say whom it protects"),
        ):
            if not isinstance(getattr(self, name), bool):
                raise refuse(name, getattr(self, name), "true or false", way_out)


@dataclass(frozen=True)
class GaussianEvent:
    """One round that released a noisy sum over sampled users, or a statistic that did, if `statistic` names one.

    `noise_multiplier` is that of the whole round, updates and bit together. z_delta, the noise of the updates alone, is
    a `DeltaNoise` (see `noise_split`) and is refused here, by type checkers and at run time. Zero is allowed and means
    that there was no noise: epsilon is then infinite. `log_ratio` bounds how far, in logarithms, the probability of an
    outcome may be from that of such a release: above 0 where the noise is discrete, see `discrete_noise`.
    """

    sampling: Sampling
    noise_multiplier: float
    statistic: Statistic | None = None
    log_ratio: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, Sampling):
            raise SettingError(
                f"sampling={self.sampling!r} must be a sampling: "
                "give NoSampling(), PoissonSampling(rate), TruncatedPoissonSampling(rate, population_size, cap) or "
                "FixedSizeSampling(cohort_size, population_size)"
            )
        if self.statistic is not None and not isinstance(self.statistic, Statistic):
            raise refuse("statistic", self.statistic, "a Statistic or None", "leave it out for a round of training")
        if self.statistic is not None and isinstance(self.sampling, GroupedPoissonSampling):
            raise refuse("sampling", str(self.sampling), "that of a single release", "give NoSampling()")
        if isinstance(self.noise_multiplier, DeltaNoise):
            raise SettingError(
                f"noise_multiplier={self.noise_multiplier!r} must be that of the whole round, not of its updates: "
                "give the number that was split, or join_noise(delta_noise, count_stddev)"
            )
        way_out = "give the noise of the round over its bound, such as 1.0, or 0 for no privacy"
        checked = check_number("noise_multiplier", self.noise_multiplier, at_least=0, way_out=way_out)
        object.__setattr__(self, "noise_multiplier", checked)
        way_out = "leave it out for normal noise"
        checked = check_number("log_ratio", self.log_ratio, at_least=0, below=0.5, way_out=way_out)
        object.__setattr__(self, "log_ratio", checked)
        if self.log_ratio and isinstance(self.sampling, GroupedPoissonSampling):  # a block is charged as one round
            raise refuse("log_ratio", self.log_ratio, "0 for banded noise", "use independent noise")

    @property
    def index(self) -> int:
        """How many rounds of the same correlated noise came before; 0 where noise is independent."""
        return self.sampling.index if isinstance(self.sampling, GroupedPoissonSampling) else 0

    def at(self, index: int) -> GaussianEvent:
        """The same event as another round of its correlated noise; itself where noise is independent."""
        if not isinstance(self.sampling, GroupedPoissonSampling) or index == self.sampling.index:
            return self
        return replace(self, sampling=replace(self.sampling, index=index))

    def to_json(self) -> dict[str, Any]:
        """Complete, and flat for a round: `from_json(event.to_json()) == event`."""
        return {
            "sampling": self.sampling.name,
            **asdict(self.sampling),
            "noise_multiplier": self.noise_multiplier,
            **({} if self.statistic is None else {"statistic": _statistic_entries(self.statistic)}),
            **({"log_ratio": self.log_ratio} if self.log_ratio else {}),
        }

    @classmethod
    def from_json(cls, entries: Mapping[str, object]) -> GaussianEvent:
        """The event that `to_json` described. A missing or unknown key and an unknown sampling are refused."""
        kind = _SAMPLINGS[check_choice("sampling", entries.get("sampling"), _SAMPLINGS)]
        settings = [field.name for field in fields(kind)]
        expected = ["sampling", *settings, "noise_multiplier"]
        for key in entries:
            if key not in (*expected, "statistic", "log_ratio"):
                raise SettingError(
                    f"unknown key {key!r} in an event with {kind.name} sampling: {nearest(key, expected)}"
                )
        for key in expected:
            if key not in entries:
                raise SettingError(f"{key} is missing in an event with {kind.name} sampling: add it")
        # The constructors check every value, so that a ledger cannot hold what a run could not have done.
        values: dict[str, Any] = dict(entries)
        statistic = _statistic_from(values["statistic"]) if "statistic" in values else None
        sampling = kind(**{name: values[name] for name in settings})
        return cls(sampling, values["noise_multiplier"], statistic, values.get("log_ratio", 0.0))


def _statistic_entries(statistic: Statistic) -> dict[str, Any]:
    entries = asdict(statistic)
    return entries if statistic.example_level else {name: entries[name] for name in entries if name != "example_level"}


def _statistic_from(entries: object) -> Statistic:
    known = [field.name for field in fields(Statistic)]
    if not isinstance(entries, Mapping) or not {"name", "identity"} <= set(entries) <= set(known):
        limit = f"an object with {', '.join(known)}"
        raise refuse("statistic", type(entries).__name__, limit, "restore the file from a copy")
    return Statistic(**entries)
