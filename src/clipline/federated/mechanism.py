"""The Gaussian mechanism: the only way from a private sum to public numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..errors import check_number, refuse
from ..privacy.events import GaussianEvent
from ..privacy.noise_split import DeltaNoise, split_noise
from ..random.streams import NormalGenerator
from ..settings import check
from .clipping import ClippedSum
from .draws import Noise, NoiseNow

_open = ClippedSum.take_key()  # no other module can read a private sum
_GRID_BITS = 20  # a release is a multiple of 2^-20 of the noise's standard deviation, rounded down to a power of two
SMALLEST_STDDEV = 1e-200  # far above the smallest float64: near those, noise could be rounded to nothing


@dataclass(frozen=True, eq=False)
class Release:
    """What a round releases: PUBLIC, and charged by its event. Only a mechanism makes one."""

    mean: Tensor = field(repr=False)  # (dim,) float64: noisy sum of updates over the declared cohort size
    read_fraction: Callable[[], float | None] = field(repr=False)  # on a GPU reading waits for the round
    is_ready: Callable[[], bool] = field(repr=False)  # whether `fraction_within` can be read without waiting
    event: GaussianEvent

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
        delta_stddev = self.delta_stddev(total.bound)
        private = _open(total)
        dim = len(private) - 1
        if isinstance(noise, NormalGenerator):
            noise = NoiseNow(noise, dim + 1, private.device)
        numbers = noise.numbers()
        if len(numbers) != dim + 1:
            raise refuse("noise", len(numbers), f"{dim + 1} numbers, one for each of the sum", "draw as many")
        noisy = numbers  # in place: the noise is not used again

        for part, stddev in ((slice(dim), delta_stddev), (slice(dim, None), self.count_stddev or 0.0)):
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

        event = GaussianEvent(total.sampling, self.noise_multiplier)
        return Release(noisy[:-1], read_fraction, centred.is_ready, event)


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
