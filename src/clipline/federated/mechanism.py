"""The Gaussian mechanism, with independent or banded noise: the only way from a private sum to public numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from ..errors import PrivateError, check_number, refuse
from ..privacy.banded_noise import band_coefficients, inverse_coefficients, lasting_share
from ..privacy.events import GaussianEvent, GroupedPoissonSampling, Sampling
from ..privacy.noise_split import DeltaNoise, split_noise
from ..random.streams import NormalGenerator
from ..settings import check, check_declared, declared
from ..synonyms import refuses_unknown_keywords
from .clipping import ClippedSum, Private
from .draws import Noise, NoiseNow

open_sum = ClippedSum.take_key()  # no module but this and `discrete_mechanism` can read a private sum
_GRID_BITS = 20  # a release is a multiple of 2^-20 of the noise's standard deviation, rounded down to a power of two
_STEP = 2.0**-24  # earlier noise is kept in whole multiples of this, in units of its own deviation
_MOST_STEPS = 2**31 - 1  # 128 deviations
SMALLEST_STDDEV = 1e-200  # far above the smallest float64: near those, noise could be rounded to nothing


@refuses_unknown_keywords
@dataclass(frozen=True)
class IndependentNoise:
    """Fresh noise in every round, as in the paper.

    Example:
      >>> cl.Training(model, loss, people, noise=cl.IndependentNoise(), ...)
    """


@refuses_unknown_keywords
@dataclass(frozen=True)
class BandedNoise:
    """Noise of `bands` consecutive rounds that cancels in their sum, and so in the model; see proofs.md (docs).

    Users are drawn from as many groups in turn, by a hash of their ids. The same epsilon then leaves less noise in the
    model, the less the smaller the cohort is beside the population. Bands cost memory: for each but the first a vector
    of the model's size, 4 bytes a parameter.

    Args:
      bands: How many; "auto" takes the number with the least noise on the models, for the epsilon of `Privacy`.

    Raises:
      SettingError: If `bands` is neither "auto" nor a whole number of at least 1.

    Example:
      >>> cl.Training(model, loss, people, noise=cl.BandedNoise(), ...)
    """

    bands: int | str = declared("bands")

    def __post_init__(self) -> None:
        check_declared(self)


@dataclass(frozen=True)
class MeanNoise:
    """The noise on each coordinate of a released mean, in clips. Public."""

    clip: float  # that the updates were clipped to
    stddev: float  # of this round's noise
    lasting: float  # of independent noise that would leave as much in the models: smaller where bands cancel


class NoiseState(Private):
    """Noise of the last rounds, with which that of the next is made. PRIVATE: whoever has it can subtract the noise."""

    __slots__ = ("__earlier", "index", "made_by", "next_round", "spent")

    def __init__(
        self,
        next_round: int,
        index: int = 0,
        earlier: tuple[Tensor, ...] = (),
        made_by: GaussianMechanism | None = None,
    ) -> None:
        self.next_round, self.index = next_round, index  # of the training, and of this noise
        self.made_by = made_by  # the mechanism of the only training that goes on with it: others draw other groups
        self.spent = False  # whether the next round has been released, or may be by a resume
        self.__earlier = earlier  # each (dim + 1,) int32, in units of _STEP; the last round comes first

    @property
    def unprivate_earlier(self) -> tuple[Tensor, ...]:
        """For a checkpoint, which is private."""
        return self.__earlier

    def again(self) -> NoiseState:
        """The same, for a round that is run again with the same draws on the same data."""
        return NoiseState(self.next_round, self.index, self.__earlier, self.made_by)

    def __reduce__(self) -> NoReturn:
        raise PrivateError("a state with banded noise is private and cannot be pickled: store it by a RunDirectory")


@dataclass(frozen=True, eq=False)
class Release:
    """What a round releases: PUBLIC, and charged by its event. Only a mechanism makes one."""

    mean: Tensor = field(repr=False)  # (dim,) float64: noisy sum of updates over the declared cohort size
    read_fraction: Callable[[], float | None] = field(repr=False)  # on a GPU reading waits for the round
    is_ready: Callable[[], bool] = field(repr=False)  # whether `fraction_within` can be read without waiting
    event: GaussianEvent
    noise: MeanNoise | None = None  # for server optimisers

    @cached_property
    def fraction_within(self) -> float | None:
        """Noisy fraction of users whose update was within the clip, if it was released; may leave [0, 1]."""
        return self.read_fraction()


@dataclass(frozen=True)
class GaussianMechanism:
    """Gaussian noise on the joint vector of update and bit.

    `noise_multiplier` is z of the whole round, the one that is accounted. With `count_stddev` (in users) the bit is
    released too, and Theorem 1 raises the noise on the updates to `delta_noise_multiplier` so that the two together
    cost what one release at z would. Without it (None) no bit is released and all of z goes to the updates.
    `cohort_size` is the declared size: a public constant that divides, whatever the realised cohort was.
    """

    cohort_size: int
    noise_multiplier: float
    count_stddev: float | None = None

    def __post_init__(self) -> None:
        check("cohort_size", self.cohort_size)
        check("noise_multiplier", self.noise_multiplier)
        check("count_stddev", self.count_stddev)
        if self.count_stddev:
            _check_stddev("count_stddev", self.count_stddev)
        _ = self.delta_noise_multiplier  # refuses a split that does not exist

    def event(self, sampling: Sampling) -> GaussianEvent:
        """What a release is charged as."""
        return GaussianEvent(sampling, self.noise_multiplier)

    @property
    def delta_noise_multiplier(self) -> DeltaNoise:
        """Noise multiplier of the summed updates alone (z_delta of Theorem 1): a type that no event accepts."""
        if self.count_stddev is None:
            return DeltaNoise(self.noise_multiplier)
        return split_noise(self.noise_multiplier, self.count_stddev)

    def delta_stddev(self, bound: float) -> float:
        """Standard deviation of the noise on a sum of updates clipped to `bound`; refused where noise cannot work.

        It also covers what rounding may add to the distance of two float64 sums, see `rounding_slack`.
        """
        if self.noise_multiplier == 0:
            return 0.0
        if not math.isfinite(bound):
            raise refuse("clip", bound, "finite where noise is added", "set a clip, or noise_multiplier=0")
        stddev = _check_stddev("delta_noise_multiplier * clip", float(self.delta_noise_multiplier) * bound)
        return stddev * (1 + rounding_slack(self.cohort_size))

    def release(self, total: ClippedSum, noise: Noise | NormalGenerator) -> Release:
        """Add noise made for the sum's bound, round to a public grid, divide by the declared cohort size.

        The rounding matters: the noise sampler cannot produce every float64, so the low bits of an unrounded sum could
        reveal what the noise was added to. Without noise nothing is rounded. `noise` is one joint draw for updates and
        bit, possibly started before, or the generator to draw it from now.
        """
        self.delta_stddev(total.bound)  # refused before noise is drawn
        if isinstance(noise, NormalGenerator):
            private = open_sum(total)
            noise = NoiseNow(noise, len(private), private.device)
        return self._hidden(total, noise.numbers())

    def begin(self, round_index: int) -> NoiseState | None:
        """What `step` needs in the first round of a noise that begins here."""
        return None

    def step(
        self, total: ClippedSum, noise: Noise, state: NoiseState | None, round_index: int
    ) -> tuple[Release, NoiseState | None]:
        """The release of a round, and the state of the noise after it."""
        return self.release(total, noise), None

    @property
    def lasting_share(self) -> float:
        """How much of the noise of a round stays in the models, beside independent noise of the same deviation."""
        return 1.0

    def _hidden(self, total: ClippedSum, numbers: Tensor, widened: float = 1.0) -> Release:
        """The release with these standard normal numbers, times a deviation that is `widened`."""
        delta_stddev, count_stddev = self.delta_stddev(total.bound) * widened, (self.count_stddev or 0.0) * widened
        private = open_sum(total)
        dim = len(private) - 1
        if not private.is_floating_point():
            raise refuse("total", "a sum of whole numbers", "a sum of updates", "release it by a DiscreteMechanism")
        if len(numbers) != dim + 1:
            raise refuse("noise", len(numbers), f"{dim + 1} numbers, one for each of the sum", "draw as many")
        noisy = numbers  # in place: the noise is not used again

        for part, stddev in ((slice(dim), delta_stddev), (slice(dim, None), count_stddev)):
            hidden = torch.add(private[part], numbers[part], alpha=stddev, out=noisy[part])
            if stddev > 0:
                grid = grid_of(stddev)
                hidden.mul_(1 / grid).round_().mul_(grid / self.cohort_size)
            else:
                hidden.div_(self.cohort_size)
        if self.count_stddev is None:
            noisy[-1:] = 0.0  # the count has no noise: it must not stay in memory behind the mean
        centred = total.read_late(noisy[-1:])

        def read_fraction() -> float | None:
            value = centred()  # read anyway: this throttles the host, which would run far ahead of a GPU
            return None if self.count_stddev is None else value + 0.5

        event = self.event(total.sampling)
        stddev = float(self.delta_noise_multiplier) / self.cohort_size
        told = MeanNoise(total.bound, stddev, stddev * self.lasting_share)
        return Release(noisy[:-1], read_fraction, centred.is_ready, event, told)


@dataclass(frozen=True)
class BandedMechanism(GaussianMechanism):
    """The same with banded noise over `rounds` rounds, for users who are drawn from `bands` groups in turn."""

    bands: int = 1
    rounds: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        band_coefficients(self.rounds, self.bands)  # refuses more bands than rounds

    def begin(self, round_index: int) -> NoiseState:
        """No earlier noise."""
        return NoiseState(round_index, made_by=self)

    @property
    def lasting_share(self) -> float:
        """`privacy.banded_noise.lasting_share`."""
        return lasting_share(self.rounds, self.bands)

    @property
    def coefficients_hash(self) -> str:
        """Of the coefficients to the last bit, and of those of the inverse: a resumed run must have the same."""
        both = *band_coefficients(self.rounds, self.bands), *inverse_coefficients(self.rounds, self.bands).tolist()
        return hashlib.sha256(repr(both).encode()).hexdigest()[:16]

    def release(self, total: ClippedSum, noise: Noise | NormalGenerator) -> NoReturn:
        """Refused: banded noise is made of earlier noise."""
        raise refuse("noise", "of one round", "made by `step`, with that of the rounds before", "call step")

    def step(
        self, total: ClippedSum, noise: Noise, state: NoiseState | None, round_index: int
    ) -> tuple[Release, NoiseState]:
        """The release of a round, with noise that cancels some of the earlier, and the state of the noise after it."""
        groups = total.sampling.bands if isinstance(total.sampling, GroupedPoissonSampling) else 0
        if groups != self.bands:  # by plain Poisson sampling a user would come in rounds that share noise
            limit = f"from {self.bands} groups in turn, as the noise has {self.bands} bands"
            raise refuse("sampling", str(total.sampling), limit, "draw by a GroupedPoissonSampler")
        if state is None or state.made_by is not self or state.next_round != round_index:
            raise refuse("state", "of other noise", f"that of round {round_index} of this training", "begin anew")
        if state.spent:
            raise refuse("state", "spent", "used for one round only", "go on with the state that came of that round")
        self.delta_stddev(total.bound)  # refused before noise is drawn
        numbers = noise.numbers()
        first, *others = band_coefficients(self.rounds, self.bands)
        for coefficient, earlier in zip(others, state.unprivate_earlier, strict=False):  # there are fewer at first
            numbers.sub_(earlier, alpha=coefficient * _STEP)
        numbers.div_(first)
        kept = numbers.div(_STEP).round_().clamp_(-_MOST_STEPS, _MOST_STEPS).to(torch.int32) if others else numbers
        earlier_then = (kept, *state.unprivate_earlier)[: self.bands - 1]
        slack = keeping_slack(self.noise_multiplier, len(numbers)) if others else 0.0
        release = self._hidden(total, numbers, 1 + slack)
        state.spent = True
        assert release.noise is not None
        spread = math.sqrt(np.sum(inverse_coefficients(self.rounds, self.bands)[: state.index + 1] ** 2))
        told = replace(release.noise, stddev=release.noise.stddev * spread)
        after = NoiseState(round_index + 1, state.index + 1, earlier_then, self)
        return replace(release, event=release.event.at(state.index), noise=told), after


def keeping_slack(noise_multiplier: float, count: int) -> float:
    """By how much, relative, `count` numbers of earlier noise that are kept in steps let one user move more.

    A user's vector changes how the noise of the same round is rounded, by up to a step in each number, and so the
    noise of the rounds after it. In units of the noise that adds a vector of at most _STEP sqrt(count) to the user's
    own of at most 1 / z; a hundredth more covers the rounding of float64.
    """
    return 1.01 * _STEP * math.sqrt(count) * noise_multiplier


def rounding_slack(cohort_size: int) -> float:
    """By how much, in clips, rounding lets one user change a float64 sum beyond the clip, in any order of additions.

    Each term of a sum of n vectors of norm at most C takes part in at most n + 1100 rounded additions, so the sum is
    off by less than (n + 1100) 2^-53 n C. Covered for up to 16 times the declared cohort: about 2e-9 more noise for 100
    users.
    """
    users = 16 * cohort_size + 1000
    return 2 * (users + 1100) * 2.0**-53 * users


def grid_of(stddev: float) -> float:
    """The spacing of the grid to which a release with this noise is rounded: a power of two."""
    return math.ldexp(1.0, math.frexp(stddev)[1] - 1 - _GRID_BITS)


def _check_stddev(name: str, stddev: float) -> float:
    way_out = "choose a noise_multiplier and a clip nearer to 1, or no noise at all"
    return check_number(name, stddev, at_least=SMALLEST_STDDEV, way_out=way_out)
