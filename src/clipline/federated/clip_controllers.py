"""Chooses the clip of every round. A controller sees released numbers only, so it costs no privacy beyond them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Protocol

from ..errors import check_whole, refuse
from ..settings import LARGEST_CLIP, SETTINGS, SMALLEST_CLIP, check_clip, check_declared, declared
from ..synonyms import refuses_unknown_keywords

if TYPE_CHECKING:
    from .mechanism import Release


@dataclass(frozen=True)
class ClipState:
    """The clip of round `round_index`."""

    clip: float
    round_index: int = 0


def checked_clip(given: object, method: str) -> ClipState:
    """What a rule returned, which may be one of the caller's own."""
    if not isinstance(given, ClipState):
        way_out = "return clipline.federated.ClipState(clip, state.round_index + 1), or ClipState(clip) from init()"
        raise refuse(f"what {method} of the clip rule returned", given, "a ClipState", way_out)
    return given


class LateClip:
    """The next clip, computed when it is first read; what it was computed from is then let go."""

    def __init__(self, update: Callable[[], ClipState]) -> None:
        self._update = update

    def __call__(self) -> ClipState:
        """The clip of the next round."""
        clip = checked_clip(self._update(), "update(state, release)")
        self._update = lambda: clip
        return clip

    def __reduce__(self) -> tuple[Callable[[ClipState], LateClip], tuple[ClipState]]:
        """For pickle and `torch.save`: the clip alone, read now."""
        return LateClip.known, (self(),)

    @classmethod
    def known(cls, clip: ClipState) -> LateClip:
        """A clip that is computed already."""
        return cls(lambda: clip)


class ClipController(Protocol):
    """Chooses the clip of every round."""

    @property
    def needs_fraction(self) -> bool:
        """Whether the noisy fraction of updates within the clip is needed (and has to be paid for)."""
        ...

    def init(self) -> ClipState:
        """The clip of round 0."""
        ...

    def update(self, state: ClipState, release: Release) -> ClipState:
        """The clip of the next round, given what this round released."""
        ...


@refuses_unknown_keywords
@dataclass(frozen=True)
class FixedClip:
    """The same clip in every round.

    Args:
      clip: The clip, from 1e-30 to 1e30. Infinity means no clipping, which no noise can make private: for study only.

    Raises:
      SettingError: If `clip` is outside this range.

    Example:
      >>> cl.Training(model, loss, people, clip=cl.FixedClip(1.0), ...)
    """

    clip: float

    def __post_init__(self) -> None:
        if self.clip != math.inf:
            check_clip("clip", self.clip, SETTINGS["clip"].way_out)

    @property
    def needs_fraction(self) -> bool:
        """No fraction is released: all of the round's z is spent on the update."""
        return False

    def init(self) -> ClipState:
        """The fixed clip."""
        return ClipState(self.clip)

    def update(self, state: ClipState, release: Release) -> ClipState:
        """The fixed clip again."""
        return ClipState(self.clip, state.round_index + 1)


@refuses_unknown_keywords
@dataclass(frozen=True)
class ScheduledClip:
    """A clip that changes at chosen rounds, as in McMahan et al. (2018).

    The schedule has to be known before training, from public data.

    Args:
      schedule: Round to clip, as a dict or as pairs. Round t uses the last entry at or before t, so that 0 must be
        there.

    Raises:
      SettingError: If the schedule is empty, has no entry for round 0, or has a clip outside its range.

    Example:
      >>> cl.Training(model, loss, people, clip=cl.ScheduledClip({0: 1.0, 500: 0.5}), ...)
    """

    schedule: Mapping[int, float] | Sequence[tuple[int, float]]

    def __post_init__(self) -> None:
        entries = self.schedule.items() if isinstance(self.schedule, Mapping) else self.schedule
        try:
            pairs = tuple((round_index, clip) for round_index, clip in entries)
        except (TypeError, ValueError):
            limit = "a mapping from rounds to clips, or pairs of these"
            raise refuse("schedule", self.schedule, limit, "give {0: 1.0, 500: 0.5}, say") from None
        for round_index, clip in pairs:
            check_whole("schedule round", round_index, at_least=0, way_out="count rounds from 0")
            check_clip("schedule clip", clip, "give clips near the norms of updates, such as 1.0")
        rounds = [round_index for round_index, _ in pairs]
        if not rounds or rounds[0] != 0 or any(b <= a for a, b in pairwise(rounds)):
            raise refuse("schedule", dict(pairs), "rounds that start at 0 and rise", "begin with an entry for round 0")
        object.__setattr__(self, "schedule", pairs)

    @property
    def needs_fraction(self) -> bool:
        """No fraction is released."""
        return False

    def init(self) -> ClipState:
        """The clip of the entry for round 0."""
        return ClipState(self._at(0))

    def update(self, state: ClipState, release: Release) -> ClipState:
        """The clip that the schedule names for the next round."""
        return ClipState(self._at(state.round_index + 1), state.round_index + 1)

    def _at(self, round_index: int) -> float:
        pairs: Sequence[tuple[int, float]] = self.schedule  # type: ignore[assignment]
        return [clip for start, clip in pairs if start <= round_index][-1]


@refuses_unknown_keywords
@dataclass(frozen=True)
class QuantileClip:
    """Clip norm that tracks a quantile of the users' update norms, privately.

    Each round releases a noisy count of the updates within the clip. The clip then moves by
    `clip *= exp(-lr * (fraction_within - quantile))` and stays between 1e-30 and 1e30.

    Args:
      quantile: Share of users whose update should pass unclipped. The median is a good default.
      start: Clip of the first round. Too low costs rounds, too high costs noise.
      lr: Step size. 0.2 moves the clip tenfold in 23 rounds at most.
      rule: "geometric" as above, or "linear": `clip -= lr * (fraction_within - quantile)`. One linear step takes away
        at most half of the clip, so that it stays above zero.
      clamp_fraction: Limit the noisy fraction to [0, 1] first. Algorithm 1 does not.

    Raises:
      SettingError: If `quantile` is outside (0, 1), or `start` or `lr` is not positive.

    Example:
      >>> cl.Training(model, loss, people, clip=cl.QuantileClip(0.7), ...)
    """

    quantile: float = declared("quantile")
    start: float = declared("clip_start")
    lr: float = declared("clip_lr")
    rule: Literal["geometric", "linear"] = declared("clip_rule")
    clamp_fraction: bool = declared("clamp_fraction")

    def __post_init__(self) -> None:
        check_declared(self)

    @property
    def needs_fraction(self) -> bool:
        """The noisy fraction is what drives the clip."""
        return True

    def init(self) -> ClipState:
        """`start`."""
        return ClipState(self.start)

    def update(self, state: ClipState, release: Release) -> ClipState:
        """One gradient step on the quantile loss: down when more updates are within than wanted, up when fewer."""
        assert release.fraction_within is not None, "a mechanism without count_stddev was paired with QuantileClip"
        fraction = release.fraction_within
        if self.clamp_fraction:
            fraction = min(max(fraction, 0.0), 1.0)
        step = self.lr * (fraction - self.quantile)
        if self.rule == "geometric":
            log_clip = math.log(state.clip) - step
            clip = math.exp(min(max(log_clip, math.log(SMALLEST_CLIP)), math.log(LARGEST_CLIP)))
        else:
            clip = min(max(state.clip - step, state.clip / 2, SMALLEST_CLIP), LARGEST_CLIP)
        return ClipState(clip, state.round_index + 1)
