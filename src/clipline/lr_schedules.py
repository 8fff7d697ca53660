"""Learning rates over the rounds: a factor for every round, from a short text or from a function.

A schedule is public: it depends on the round alone, and neither on data nor on what was released. A function that
remembers its calls would break this if it were asked as often as users train: its factors are tabulated once, before.
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections.abc import Callable

from .errors import SettingError, nearest, refuse

LrSchedule = str | Callable[[int], float]  # a text as below, or round -> factor

WAY_OUT = 'give "warmup:10,cosine" or "linear:0.1", say, or in Python a function of the round'
_ARGUMENTS = {"constant": (0, 0), "warmup": (1, 1), "linear": (0, 1), "cosine": (0, 1), "step": (2, 2)}  # least, most
_RECORDED = 4096  # rounds of which a function's factors enter its checksum, at most


def check_schedule(name: str, schedule: object) -> None:
    """Refuse what is neither a function nor a text such as "cosine", "linear:0.1", "step:50:0.5" or "warmup:10"."""
    if callable(schedule):
        return
    if not isinstance(schedule, str):
        raise refuse(name, schedule, "the name of a schedule or a function of the round", WAY_OUT)
    for part in schedule.split(","):
        kind, *given = part.strip().split(":")
        if kind not in _ARGUMENTS:
            raise refuse(name, schedule, f"made of {', '.join(_ARGUMENTS)}", nearest(kind, _ARGUMENTS))
        try:
            numbers = [float(number) for number in given]
        except ValueError:
            numbers = [math.nan]
        least, most = _ARGUMENTS[kind]
        if not least <= len(numbers) <= most or not all(0 <= number < math.inf for number in numbers):
            raise refuse(name, schedule, f"{_form(kind)}, with finite numbers at least 0", WAY_OUT)
        if kind in ("warmup", "step") and (numbers[0] < 1 or numbers[0] % 1):
            raise refuse(name, schedule, f"{_form(kind)}, with a whole number of rounds", WAY_OUT)


def lr_factor(schedule: LrSchedule | None, round_index: int, rounds: int) -> float:
    """What the rate of this round, of `rounds` from 0 on, is multiplied by.

    Parts of a text that are joined by commas are multiplied. "warmup:N" grows from 1/N in the first round to 1 in round
    N; "linear:END" and "cosine:END" fall from 1 towards END (0 if left out), which they would reach after the last
    round; "step:EVERY:FACTOR" multiplies by FACTOR after every EVERY rounds.
    """
    if schedule is None:
        return 1.0
    if not isinstance(schedule, str):
        return _asked(schedule, round_index)
    factor = 1.0
    for part in schedule.split(","):
        kind, *given = part.strip().split(":")
        numbers = [float(number) for number in given]
        end = numbers[0] if numbers else 0.0
        if kind == "warmup":
            factor *= min(1.0, (round_index + 1) / numbers[0])
        elif kind == "linear":
            factor *= 1 + (end - 1) * round_index / rounds
        elif kind == "cosine":
            factor *= end + (1 - end) * (1 + math.cos(math.pi * round_index / rounds)) / 2
        elif kind == "step":
            factor *= numbers[1] ** (round_index // int(numbers[0]))
    return factor


class FactorTable:
    """The factors of a function, asked once for each of `rounds` in order and only read afterwards.

    Refused with the round, where the function fails or does not give a finite number at least 0.
    """

    def __init__(self, schedule: Callable[[int], float], rounds: int) -> None:
        self._factors = array("d", (_asked(schedule, t) for t in range(rounds)))

    def __len__(self) -> int:
        return len(self._factors)

    def __call__(self, round_index: int) -> float:
        """The factor of this round; a round beyond the table is refused."""
        if not 0 <= round_index < len(self):
            raise SettingError(
                f"round {round_index} must be below {len(self)}, the rounds that lr_schedule was tabulated for: give "
                "the function itself, not that of another training"
            )
        return self._factors[round_index]

    def __repr__(self) -> str:
        return f"FactorTable({len(self)} rounds)"


def tabulated(schedule: LrSchedule | None, rounds: int) -> LrSchedule | None:
    """The schedule as something that gives the same factor however often it is asked: a text is so already."""
    if schedule is None or isinstance(schedule, str):
        return schedule
    if isinstance(schedule, FactorTable) and len(schedule) == rounds:
        return schedule
    return FactorTable(schedule, rounds)


def schedule_text(schedule: LrSchedule | None, rounds: int) -> str | None:
    """A schedule as it is recorded: a text as it is; of a function its first and last factor and a checksum of all.

    Of more than 4096 rounds the checksum takes about 4096, evenly spaced.
    """
    if schedule is None or isinstance(schedule, str):
        return schedule
    every = max(1, rounds // _RECORDED)
    factors = [lr_factor(schedule, t, rounds) for t in (*range(0, rounds, every), rounds - 1)]
    checksum = hashlib.sha256(struct.pack(f"<{len(factors)}d", *factors)).hexdigest()[:16]
    return f"a function, {factors[0]:.6g} in the first round, {factors[-1]:.6g} in the last, checksum {checksum}"


def _asked(schedule: Callable[[int], float], round_index: int) -> float:
    """The factor that a function gives for this round, checked. A class such as torch's schedulers is refused."""
    if isinstance(schedule, FactorTable):
        return schedule(round_index)
    try:
        factor = schedule(round_index)
    except Exception as error:
        named = getattr(schedule, "__name__", type(schedule).__name__)
        raise SettingError(
            f"lr_schedule={named} must give a factor for every round and failed in round {round_index} "
            f"({type(error).__name__}: {error}): {WAY_OUT}"
        ) from error
    try:
        number = float(factor) if hasattr(factor, "__float__") else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):  # an array of several numbers, say
        number = math.nan
    if not 0 <= number < math.inf:
        shown = repr(factor) if isinstance(factor, float | int | str) or factor is None else type(factor).__name__
        raise SettingError(
            f"lr_schedule gave {shown} in round {round_index} but must give a finite number at least 0: return the "
            "factor by which the rate is multiplied"
        )
    return number


def _form(kind: str) -> str:
    forms = {"warmup": "warmup:ROUNDS", "step": "step:EVERY:FACTOR", "constant": "constant"}
    return forms.get(kind, f"{kind} or {kind}:END")
