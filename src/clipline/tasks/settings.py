"""The settings of a run, as flags and TOML files spell them: a task's defaults, then the file, then the flags."""

from __future__ import annotations

import json
import numbers
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..data.task_stores import STAND_IN, with_users_of_store
from ..errors import SettingError, check_choice, check_number, check_whole, nearest, refuse
from ..federated.clip_controllers import ClipController, FixedClip, QuantileClip, check_clip
from ..federated.sampling import FIXED_IS_PUBLIC

_NOT_EVERYWHERE = ("data", "classes", "test_users", "evaluate_on", "augment", "group_count", "padding_in_loss")


@dataclass(frozen=True)
class TrainSettings:
    """Everything that decides what `clipline train` does. A task brings its own defaults."""

    task: str
    rounds: int
    cohort: int
    client_lr: float
    batch_size: int
    server_lr: float
    fixed_clip: float  # what `clip = "fixed"` means on this task
    users: int  # of a generated population, or as many as the store has
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None  # None: (number of users)^-1.1
    population_size: int | None = None  # the declared number of users; None: `users` if generated, else not declared
    max_epsilon: float | None = None
    sampling: str = "poisson"
    clip: str | float = "quantile"  # "quantile", "fixed", "none", or a number
    quantile: float = 0.5
    clip_start: float = 0.1
    clip_lr: float = 0.2
    clip_rule: str = "geometric"
    clamp_fraction: bool = False
    count_stddev: float | None = None  # None: cohort / 20
    client_epochs: int = 1
    max_examples: int | None = None
    server: str = "sgd"  # "sgd", "adam", "yogi"
    server_momentum: float = 0.9
    seed: int = 0
    noise_source: str = "seed"  # "seed", "system"
    evaluate_every: int = 10
    device: str = "auto"
    engine: str = "auto"  # "auto", "one-by-one", "stacked"
    precision: str = "float32"  # "float32", "tf32", "bf16"
    workers: int | None = None  # None: a process for every core that may be used, one where there is a GPU
    unprivate_timing: bool = False  # whether metrics.jsonl says how long each round took, which depends on who came
    # Settings that some tasks have and others have not: None is "has not", and cannot be set to anything else.
    data: str | None = None  # the folder of prepared data, or "stand-in"
    classes: int | None = None  # of a generated population
    test_users: int | None = None  # of a generated population, to measure on
    evaluate_on: str | None = None  # "validation", "test" (two disjoint halves of the test users) or "original" (all)
    augment: bool | None = None  # random crops and flips in training
    group_count: int | None = None  # of group normalisation
    padding_in_loss: bool | None = None  # whether the training loss averages over padding too

    def __post_init__(self) -> None:
        check_choice("sampling", self.sampling, ("poisson", "fixed"))
        check_choice("clip_rule", self.clip_rule, ("geometric", "linear"))
        check_choice("server", self.server, ("sgd", "adam", "yogi"))
        check_choice("noise_source", self.noise_source, ("seed", "system"))
        check_choice("engine", self.engine, ("auto", "one-by-one", "stacked"))
        check_choice("precision", self.precision, ("float32", "tf32", "bf16"))
        if not isinstance(self.device, str):
            raise refuse("device", self.device, "auto, cpu or cuda", "leave it out to take what is there")
        if self.data is not None and any(0xD800 <= ord(letter) < 0xE000 for letter in self.data):
            raise refuse("data", self.data, "text in UTF-8, as settings are stored so", "rename the folder")
        words = ("quantile", "fixed", "none")
        if isinstance(self.clip, str) and self.clip not in words:
            raise refuse("clip", self.clip, "one of quantile, fixed, none or a number", nearest(self.clip, words))
        check_clip("fixed_clip", self.fixed_clip, "give a clip near the norms of updates, such as 1.0")
        if not isinstance(self.clamp_fraction, bool):
            raise refuse("clamp_fraction", self.clamp_fraction, "true or false", "false is the paper's choice")
        if not isinstance(self.unprivate_timing, bool):
            raise refuse("unprivate_timing", self.unprivate_timing, "true or false", "false keeps times out of files")
        check_whole("rounds", self.rounds, at_least=1, at_most=10**9, way_out="train for at least one round")
        check_whole("cohort", self.cohort, at_least=1, way_out="sample at least one user a round")
        check_whole("users", self.users, at_least=1, at_most=10**10, way_out="give a population with users")
        if self.population_size is not None:
            way_out = "give the number of users that is known beforehand"
            check_whole("population_size", self.population_size, at_least=1, at_most=10**12, way_out=way_out)
            if self.sampling == "fixed":
                limit = "left out where sampling='fixed'"
                raise refuse("population_size", self.population_size, limit, FIXED_IS_PUBLIC)
        most, name = (
            (self.users, "users") if self.population_size is None else (self.population_size, "population_size")
        )
        if self.cohort > most:
            limit = f"at most the population, {most} users"
            raise refuse("cohort", self.cohort, limit, f"lower the cohort or raise {name}")
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise SettingError(
                f"epsilon={self.epsilon!r} and noise_multiplier={self.noise_multiplier!r} are both set but one follows "
                "from the other: drop one of them, or give the limit as max_epsilon"
            )
        for name in ("epsilon", "max_epsilon"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0, way_out="4.0 is a usual target")
        if self.noise_multiplier is not None:
            check_number("noise_multiplier", self.noise_multiplier, at_least=0, way_out="0 is no noise and no privacy")
            if self.noise_multiplier == 0 and self.max_epsilon is not None:
                raise refuse(
                    "max_epsilon", self.max_epsilon, "left out where there is no noise", "add noise or drop it"
                )
        if self.delta is not None:
            check_number("delta", self.delta, above=0, below=1, way_out="leave it out for (number of users)^-1.1")
        if self.workers is not None:
            check_whole("workers", self.workers, at_least=1, way_out="leave it out for one process a core")
        if self.test_users is not None:
            check_whole("test_users", self.test_users, at_least=2, way_out="one to validate on and one to test on")
        if self.evaluate_on is not None:
            check_choice("evaluate_on", self.evaluate_on, ("validation", "test", "original"))
        for name in ("augment", "padding_in_loss"):
            if not isinstance(getattr(self, name), bool | None):
                raise refuse(name, getattr(self, name), "true or false", "leave it out for the original's choice")
        if self.group_count not in (None, 2, 32):
            raise refuse("group_count", self.group_count, "2 or 32", "the original had one of these")
        self.controller()  # checks quantile, clip, clip_start and clip_lr

    @property
    def declared_size(self) -> int | None:
        """How many users are declared; None where their number is read from the data and so is public.

        The number of a generated population is itself a setting. A fixed-size cohort takes no declared number.
        """
        if self.population_size is not None or self.sampling == "fixed" or not self._generated:
            return self.population_size
        return self.users

    @property
    def users_private(self) -> bool:
        """Whether `users` may not be told: counted in a store, where another number is declared."""
        return self.population_size is not None and not self._generated

    @property
    def _generated(self) -> bool:
        return self.data in (None, STAND_IN)

    def controller(self) -> ClipController:
        """The clip controller that `clip` names."""
        if self.clip == "quantile":
            rule: Any = self.clip_rule
            return QuantileClip(self.quantile, self.clip_start, self.clip_lr, rule, self.clamp_fraction)
        if self.clip == "none":
            return FixedClip(float("inf"))
        clip = self.fixed_clip if self.clip == "fixed" else self.clip
        return FixedClip(
            check_number("clip", clip, above=0, infinite=True, way_out="give a positive clip, or quantile")
        )

    def overridden(self, changes: Mapping[str, Any], where: str) -> TrainSettings:
        """These settings with `changes`; an unknown key is refused with the nearest known one.

        Setting epsilon drops a noise_multiplier that was there before, and the other way round. With prepared data,
        users and test_users are those that the stores have.
        """
        known = [field.name for field in fields(self)]
        for key in changes:
            if key not in known:
                raise SettingError(f"{where} has the unknown key {key!r}: {nearest(key, known)}")
            if key in _NOT_EVERYWHERE and changes[key] is not None and getattr(self, key) is None:
                raise refuse(key, changes[key], f"left out, as task {self.task!r} has no such setting", "drop it")
        changes = with_users_of_store(changes, self.task, changes.get("data", self.data))
        if "epsilon" in changes:
            changes.setdefault("noise_multiplier", None)
        if "noise_multiplier" in changes:
            changes.setdefault("epsilon", None)
        return replace(self, **changes)

    def to_toml(self) -> str:
        """One `key = value` a line, for `read_toml`; settings that are None are left out.

        So are private `users`: when the settings are read back, the store says how many they are.
        """
        settings = asdict(self) | ({"users": None} if self.users_private else {})
        lines = [f"{name} = {_toml(value)}" for name, value in settings.items() if value is not None]
        return "\n".join(lines) + "\n"


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a settings file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingError(f"config={str(path)!r} does not exist: give the path of a TOML file") from None
    except (ValueError, RecursionError, OSError) as error:  # ValueError: no TOML, no UTF-8, thousands of digits
        raise SettingError(
            f"config={str(path)!r} cannot be read as TOML ({error}): write lines such as rounds = 100"
        ) from None


def _toml(value: str | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's but for two: it leaves DEL as it is, and writes an emoji as a pair of surrogates.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(int(value) if isinstance(value, numbers.Integral) else float(value))
