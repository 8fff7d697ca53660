"""Uploads of a federation in a simulated training: the same encoding, sums and noise, without a network or masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..engine.isolation.generators import preserve_generators
from ..errors import refuse
from ..federated.backend import Backend, CohortRequest, LocalTrainer
from ..federated.clipping import ClippedSum, ModularSum, PartialSums, UserUpdates, clip_factors
from ..federated.discrete_mechanism import DiscreteMechanism
from ..federated.mechanism import GaussianMechanism
from ..federated.round import Algorithm
from ..privacy.events import FixedSizeSampling
from ..random.discrete_gaussian import words_of
from ..random.streams import Streams
from ..synonyms import refuses_unknown_keywords
from .encoders import Encoder, KeptShare, RotatedLevels, secure_integers

if TYPE_CHECKING:
    from ..training.training import Training

_AT_ONCE = 1 << 23  # numbers of users' updates held together, 64 MiB


@refuses_unknown_keywords
@dataclass(frozen=True)
class SecureSum:
    """Users send whole numbers for a secure sum, and the noise is an exact discrete Gaussian.

    More bits allow finer numbers: rounding then adds less noise. How much it adds is in docs/howto/federation.md.

    Args:
      bits: Of the modulus of the sum, 14 to 32.
      least_survivors: If given, clients add the noise. Each adds a share that is made for so many clients in a sum, the
        least that there will be. If left out, the server adds it.

    Raises:
      SettingError: If `bits` or `least_survivors` is outside its range. A training refuses bits in which its update or
        count would drown in rounding, and names the least bits that fit.

    Example:
      >>> cl.Training(model, loss, people, upload=cl.SecureSum(bits=18), ...)
    """

    bits: int = 18
    least_survivors: int | None = None

    def __post_init__(self) -> None:  # refuses what fits no training at all
        secure_integers(
            1, self.bits, cohort_size=1, noise_multiplier=1.0, count_stddev=None, survivors=self.least_survivors
        )

    def simulated(self, training: Training) -> tuple[Algorithm, Backend]:
        """Algorithm and backend of a training whose users upload in this way."""
        plain = _plain_mechanism(training)
        code = secure_integers(
            training.dim, self.bits, cohort_size=training.cohort_size, noise_multiplier=plain.noise_multiplier,
            count_stddev=plain.count_stddev, survivors=self.least_survivors,
            fixed_size=isinstance(training.algorithm.sampler.sampling, FixedSizeSampling),
        )  # fmt: skip
        mechanism = DiscreteMechanism(
            plain.cohort_size, plain.noise_multiplier, plain.count_stddev, code=code, shares=self.least_survivors
        )
        streams = training.problem.runs[0].streams

        def total(request: CohortRequest, vectors: Iterator[Tensor]) -> ClippedSum:
            t, sums, least = request.round_index, ModularSum(code.dim, code.bits), self.least_survivors or 0
            rounding, noise = streams.rounding(t), words_of(streams.shares(t)) if least else None
            # In a cohort that is too small, clients who have nothing to say send their shares of the noise.
            zeros = torch.zeros(training.dim + 1, dtype=torch.float64)
            for vector in chain(vectors, repeat(zeros, max(least - len(request.cohort.users), 0))):
                sums.add(code.encode(vector, request.clip, t, rounding, noise, max(least, 1)))
            return sums.finished(request.clip, request.cohort.sampling)

        return replace(training.algorithm, mechanism=mechanism), UploadBackend(training.trainer, total)


@refuses_unknown_keywords
@dataclass(frozen=True)
class Quantised:
    """Users send a few bits for each parameter; the server decodes each update, clips it again and adds it up.

    Args:
      bits: For each parameter, 1 to 16. 8 cost no accuracy that one can see.

    Raises:
      SettingError: If `bits` is not a whole number from 1 to 16.

    Example:
      >>> cl.Training(model, loss, people, upload=cl.Quantised(8), ...)
    """

    bits: int = 8

    def __post_init__(self) -> None:
        RotatedLevels(1, self.bits)  # refuses what cannot be

    def simulated(self, training: Training) -> tuple[Algorithm, Backend]:
        """Algorithm and backend of a training whose users upload in this way."""
        return _decoded_one_by_one(training, RotatedLevels(training.dim, self.bits))


@refuses_unknown_keywords
@dataclass(frozen=True)
class RandomMask:
    """Users send a random share of the parameters, others in every round; the server clips what it gets again.

    Args:
      share: Of the parameters, above 0 and at most 1.

    Raises:
      SettingError: If `share` is not a number in this range.

    Example:
      >>> cl.Training(model, loss, people, upload=cl.RandomMask(0.1), ...)
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        KeptShare(1, self.share)  # refuses what cannot be

    def simulated(self, training: Training) -> tuple[Algorithm, Backend]:
        """Algorithm and backend of a training whose users upload in this way."""
        return _decoded_one_by_one(training, KeptShare(training.dim, self.share))


Totals = Callable[[CohortRequest, Iterator[Tensor]], ClippedSum]


@dataclass(frozen=True, eq=False)
class UploadBackend:
    """Trains all users in this process, and hands their clipped vectors to `total`, one after the other."""

    trainer: LocalTrainer
    total: Totals
    size = 1  # process

    @contextmanager
    def running(self) -> Iterator[None]:
        """Nothing to start or end."""
        yield

    def sums(self, requests: Sequence[CohortRequest]) -> list[ClippedSum]:
        """The sum of each request: PRIVATE."""
        with preserve_generators():
            return [self.total(request, self._vectors(request)) for request in requests]

    def _vectors(self, request: CohortRequest) -> Iterator[Tensor]:
        """Clipped update and centred bit (dim + 1,) of each user: PRIVATE."""
        for updates, _ in self.trainer.train([request]):
            yield from clipped_vectors(updates, request.clip, len(request.params))


def clipped_vectors(updates: UserUpdates, clip: float, dim: int) -> Iterator[Tensor]:
    """Clipped update and centred bit (dim + 1,) float64 of each user of a block, on the processor: PRIVATE."""
    scale, within = clip_factors(updates.norms(), clip)
    step = max(1, _AT_ONCE // dim)
    for first in range(0, len(updates), step):
        place = torch.arange(len(updates), device=scale.device) - first
        here = (place >= 0) & (place < step)
        rows = torch.zeros(min(step, len(updates) - first), dim + 1, dtype=torch.float64, device=scale.device)
        updates.add_to(rows[:, :-1], scale * here, place.clamp(0, len(rows) - 1))
        rows[:, -1] = within[first : first + step].double() - 0.5
        yield from rows.cpu()


def _decoded_one_by_one(training: Training, encoder: Encoder) -> tuple[Algorithm, Backend]:
    """Algorithm and backend of a training whose server decodes every upload, clips it again and adds it up."""
    _plain_mechanism(training)
    streams: Streams = training.problem.runs[0].streams

    def total(request: CohortRequest, vectors: Iterator[Tensor]) -> ClippedSum:
        t, rounding = request.round_index, streams.rounding(request.round_index)
        sums = PartialSums(torch.empty(1, training.dim + 1, dtype=torch.float64))
        for vector in vectors:
            decoded = encoder.decode(encoder.encode(vector, request.clip, t, rounding), request.clip, t)
            assert decoded is not None, "made by the encoder"
            sums.add_clipped(decoded, request.clip)
        (found,) = sums.finished([request.clip], [request.cohort.sampling])
        return found

    return training.algorithm, UploadBackend(training.trainer, total)


def _plain_mechanism(training: Training) -> GaussianMechanism:
    """The mechanism, which must not be one with banded noise; and users must train on the processor."""
    mechanism = training.algorithm.mechanism
    if type(mechanism) is not GaussianMechanism:
        raise refuse("noise", "BandedNoise", "IndependentNoise where upload is given", "leave noise out")
    if training.device.type != "cpu":
        raise refuse("device", str(training.device), "'cpu' where upload is given", "leave upload out, or the device")
    return mechanism
