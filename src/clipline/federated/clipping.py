"""Clips updates and adds them up. The only place where that is done; the sums are PRIVATE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import PrivateError, check_whole
from ..privacy.events import Sampling

_MARGIN = 4096  # ulps: a clipped row ends so far below the clip, more than the error of a pairwise summed norm


class UserUpdates(Protocol):
    """Updates (params after local training - params) of a block of users, in the form in which they were computed."""

    def __len__(self) -> int:
        """Number of users."""
        ...

    def norms(self) -> Tensor:
        """(users,) float64: the L2 norm of each update; infinite or NaN where an update is."""
        ...

    def add_to(self, totals: Tensor, scale: Tensor, runs: Tensor | None = None) -> None:
        """Add each update times its scale (users,) to the row of totals (runs, dim) float64 of the user's run.

        Without `runs` (users,) there is one row. A user whose scale is 0 adds nothing, whatever the update holds.
        """
        ...


class Private:
    """Private numbers, such as a sum over users: they cannot be read, printed, copied or pickled."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(private)"

    def __reduce__(self) -> NoReturn:
        raise PrivateError(f"{type(self).__name__} is private and must not be copied or pickled: release it first")


class PartialSums(Private):
    """The sums of some users (a block's, a worker's, a rank's), one for each of one or more runs: PRIVATE.

    It accumulates in the memory that it is given, (runs, dim + 1) float64, starting from zeros. The owner of the memory
    (a transport between processes) may add several of these together there.
    """

    __slots__ = ("__totals",)

    def __init__(self, memory: Tensor) -> None:
        self.__totals = memory.zero_()

    def add(self, updates: UserUpdates, clips: Sequence[float], runs: NDArray[np.int64]) -> None:
        """Clip each update to the clip of its run and add it to that run's sum, together with the bit: was it within?

        The bit is one more coordinate of the update, centred by 1/2: adding or removing a user changes it by 1/2, and
        whatever hides the update hides the bit. The sum equals that of `join_bit(*clip_rows(...))`, without storing the
        clipped rows.
        """
        totals = self.__totals
        if len(totals) == 1:
            scale, within = clip_factors(updates.norms(), clips[0])
            updates.add_to(totals[:, :-1], scale)
            totals[0, -1] += within.sum() - len(updates) / 2
            return
        # Not blocking: on a GPU that would wait for all that is under way.
        run = torch.from_numpy(runs).to(totals.device, non_blocking=True)
        clip = torch.tensor(clips, dtype=torch.float64).to(totals.device, non_blocking=True)[run]
        scale, within = clip_factors(updates.norms(), clip)
        updates.add_to(totals[:, :-1], scale, run)
        totals[:, -1].index_add_(0, run, within.double() - 0.5)

    def add_clipped(self, vector: Tensor, clip: float) -> bool:
        """Add what a client has clipped itself: update and centred bit (dim + 1,). Says whether it was added.

        The update is clipped once more and the bit kept within -1/2 and 1/2, so that no client moves the sum further
        than its bound. A vector that is not finite, not of floats or of another shape adds nothing.
        """
        total = self.__totals[0]
        if vector.shape != total.shape or not vector.is_floating_point() or not vector.isfinite().all():
            return False
        (update,), _ = clip_rows(vector[None, :-1], clip)
        total[:-1] += update
        total[-1] += vector[-1].double().clamp(-0.5, 0.5)
        return True

    def finished(
        self, clips: Sequence[float], samplings: Sequence[Sampling], *read_late: Callable[[Tensor], LateNumber]
    ) -> list[ClippedSum]:
        """The sum of each run, once all parts of it are added. `read_late`, if given: see `ClippedSum`."""
        return [ClippedSum(*one, *read_late) for one in zip(self.__totals, clips, samplings, strict=True)]


class ModularSum(Private):
    """A sum of vectors of whole numbers modulo 2^bits, as secure sums have it: PRIVATE."""

    __slots__ = ("__total", "bits")

    def __init__(self, dim: int, bits: int) -> None:
        self.__total = np.zeros(dim, np.uint32)  # wraps modulo 2^32, a multiple of 2^bits
        self.bits = check_whole("bits", bits, at_least=1, at_most=32, way_out="give the bits of the modulus")

    def add(self, vector: NDArray[np.unsignedinteger]) -> bool:
        """Add a vector, or the sum of several. Says whether it was added: one of another shape or type is not."""
        if vector.shape != self.__total.shape or vector.dtype.kind != "u" or vector.dtype.itemsize > 4:
            return False
        self.__total += vector
        return True

    def finished(self, clip: float, sampling: Sampling) -> ClippedSum:
        """The sum as int64 between -2^(bits - 1) and 2^(bits - 1), of updates that were clipped to `clip`."""
        return ClippedSum(torch.from_numpy(centred(self.__total, self.bits)), clip, sampling)


def centred(numbers: NDArray[np.integer], bits: int) -> NDArray[np.int64]:
    """Whole numbers modulo 2^bits, as those between -2^(bits - 1) and 2^(bits - 1)."""
    half = 1 << (bits - 1)
    wrapped: NDArray[np.int64] = ((numbers.astype(np.int64) + half) & (2 * half - 1)) - half
    return wrapped


class LateNumber(Protocol):
    """A released number that is read later: on a GPU reading waits for the work that computes it."""

    def is_ready(self) -> bool:
        """Whether it can be read without waiting."""
        ...

    def __call__(self) -> float:
        """The number."""
        ...


class ReadNow:
    """A number (1,) on a processor, copied: what it was read from may change."""

    def __init__(self, number: Tensor) -> None:
        self._value = number.clone()

    def is_ready(self) -> bool:
        """At once."""
        return True

    def __call__(self) -> float:
        """The number."""
        return float(self._value)


class ClippedSum(Private):
    """The sum of a round: PRIVATE. Only the mechanism can open it, and only to turn it into a `Release`."""

    __slots__ = ("__total", "bound", "read_late", "sampling")
    _key_is_free = True

    def __init__(
        self, total: Tensor, bound: float, sampling: Sampling, read_late: Callable[[Tensor], LateNumber] = ReadNow
    ) -> None:
        # (dim + 1,) float64: the summed updates, then the sum of (within - 1/2). Or encoded, as int64: `ModularSum`.
        self.__total = total
        self.bound = bound  # the clip that was used: no user's update in the sum has a larger norm
        self.sampling = sampling  # how the users were sampled
        self.read_late = read_late  # how the backend reads a number on its device, without waiting for later work

    @classmethod
    def take_key(cls) -> Callable[[ClippedSum], Tensor]:
        """The one function that reads a sum. `mechanism.py` takes it on import; every later call is refused."""
        if not cls._key_is_free:
            raise PrivateError("the key to private sums is given out once, to the mechanism: ask that for a Release")
        cls._key_is_free = False
        return lambda private: private.__total


def clip_factors(norms: Tensor, clip: float | Tensor) -> tuple[Tensor, Tensor]:
    """The factors that clip updates of these norms (users,) float64, and which are within the clip: (users,) each.

    `clip` is one number, or (users,). The factor is exactly 1 within the clip. Otherwise the clipped norm is a few ulps
    below the clip, never above. A norm that is not finite gets factor 0 and is not within; so does one for which the
    factor would be a denormal number, whose few bits could be rounded up to twice the clip.
    """
    double = torch.finfo(torch.float64)
    within = norms <= (clip.clamp(max=double.max) if isinstance(clip, Tensor) else min(clip, double.max))
    just_inside = clip * (1 - _MARGIN * double.eps)
    # An infinite norm gives 0. NaN becomes 0, and so does the infinity that a tiny norm would give.
    factors = (just_inside / norms).nan_to_num_(nan=0.0, posinf=0.0)
    return factors.masked_fill_(factors < double.tiny, 0.0).masked_fill_(within, 1.0), within


def clip_rows(deltas: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Scale each row so that its norm is at most `clip`; say which were within: (users, dim) float64, (users,) bool.

    The plain version, which stores all clipped rows. A row already within is unchanged; a zero row stays zero; a row
    that is not finite becomes zero and is not within. Computed in float64, whatever the model's type: in float32 the
    rounding of the factor for a huge row could leave the row above the clip.
    """
    scale, within = clip_factors(_norms(deltas.double()), clip)
    clipped = torch.where(scale.unsqueeze(1) > 0, deltas.double() * scale.unsqueeze(1), 0.0)
    return clipped, within


def join_bit(clipped: Tensor, within: Tensor) -> Tensor:
    """Update and centred bit as one vector for each user: (users, dim + 1)."""
    return torch.cat([clipped, within.to(clipped.dtype).unsqueeze(1) - 0.5], dim=1)


def _norms(rows: Tensor) -> Tensor:
    """(users,): norms of rows (users, dim) float64, without overflow: divided by the largest entry first."""
    if not rows.shape[1]:
        return rows.new_zeros(len(rows))
    unit = rows.abs().amax(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    return unit * (rows / unit.unsqueeze(1)).square().sum(dim=1).sqrt()
