"""The mechanism for sums of whole numbers, whose noise is an exact discrete Gaussian."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..errors import refuse
from ..privacy.discrete_noise import discrete_event
from ..privacy.events import GaussianEvent, NoSampling, Sampling
from ..random.discrete_gaussian import discrete_gaussian
from ..random.streams import NormalGenerator
from .clipping import ClippedSum
from .draws import Noise, WholeNoise
from .mechanism import GaussianMechanism, MeanNoise, NoiseState, Release, open_sum


class WholeNumbers(Protocol):
    """How update and bit become a vector of whole numbers; `federation/encoders.py` has one."""

    @property
    def dim(self) -> int:
        """How many numbers a vector has."""
        ...

    @property
    def bound(self) -> float:
        """The largest norm of one user's vector."""
        ...

    @property
    def stddev(self) -> float:
        """Deviation of the noise on each number of the sum."""
        ...

    @property
    def unit(self) -> float:
        """How much of a clip one whole number is."""
        ...

    def decode_sum(self, total: NDArray[np.int64], clip: float, round_index: int) -> Tensor:
        """(dim of the model + 1,) float64: the sum of updates, then of (within - 1/2), from the noisy sum."""
        ...


@dataclass(frozen=True)
class DiscreteMechanism(GaussianMechanism):
    """Discrete Gaussian noise on a sum of encoded vectors; what it costs is in docs/howto/federation.md.

    The server adds the noise, unless `shares` says that clients have: it is then in the sum already, made of shares of
    so many honest clients at least.
    """

    code: WholeNumbers = field(kw_only=True)
    shares: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._charged(NoSampling()).noise_multiplier < self.noise_multiplier:
            limit = f"{self._charged(NoSampling()).noise_multiplier:g} at most, by the noise of the code"
            raise refuse("noise_multiplier", self.noise_multiplier, limit, "make the code for this multiplier")

    def _charged(self, sampling: Sampling) -> GaussianEvent:
        code = self.code
        return discrete_event(
            sampling,
            stddev=code.stddev,
            bound=code.bound,
            dim=code.dim,
            shares=1 if self.shares is None else self.shares,
        )

    def event(self, sampling: Sampling) -> GaussianEvent:
        """What a release is charged as: the multiplier that was asked for, which the noise has at least."""
        return replace(self._charged(sampling), noise_multiplier=self.noise_multiplier)

    def release(self, total: ClippedSum, noise: Noise | NormalGenerator) -> NoReturn:
        """Refused: the code of a round has to be known."""
        raise refuse("total", "of no round", "that of a round, whose code is known", "call step")

    def step(
        self, total: ClippedSum, noise: Noise, state: NoiseState | None, round_index: int
    ) -> tuple[Release, NoiseState | None]:
        """The release of a round: noise on the encoded sum, then whatever follows from that alone."""
        private = open_sum(total)
        if private.is_floating_point() or len(private) != self.code.dim:
            limit = f"a sum of {self.code.dim} whole numbers"
            raise refuse("total", f"{len(private)} of {private.dtype}", limit, "encode by the code of this mechanism")
        numbers = private.numpy()
        if self.shares is None:
            if not isinstance(noise, WholeNoise):
                raise refuse("noise", type(noise).__name__, "WholeNoise", "draw it by PlainDraws(noise=WholeNoise)")
            numbers = numbers + discrete_gaussian(len(numbers), self.code.stddev, noise.words())
        sums = self.code.decode_sum(numbers, total.bound, round_index) / self.cohort_size
        fraction = None if self.count_stddev is None else float(sums[-1]) + 0.5
        stddev = self.code.stddev * self.code.unit / self.cohort_size
        told = MeanNoise(total.bound, stddev, stddev)
        return Release(sums[:-1].clone(), lambda: fraction, lambda: True, self.event(total.sampling), told), None
