"""The settings of a run: a task's defaults, then a TOML file, then the flags. Declared in `clipline.settings`."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from ..engine.core.fast_parts import FastParts
from ..errors import SettingError, refuse, regular
from ..federated.clip_controllers import ClipController, FixedClip, QuantileClip
from ..federated.local_sgd import LocalAdam, LocalSGD, LocalTraining
from ..federated.mechanism import BandedNoise, IndependentNoise
from ..federated.sampling import sampler_named
from ..federated.server_optimisers import ServerAdam, ServerNormalised, ServerOptimiser, ServerSGD, ServerYogi
from ..settings import SETTINGS, STAND_IN, Settings, check, keywords_for, toml_text
from ..synonyms import meant
from ..training.options import Compute, Privacy


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """Everything that decides what `clipline train` does, checked alone and together. A task brings its own defaults.

    Of a generated population `population_size` users are drawn. Of stored data it is the declared number of users, or
    None: then they are counted, and their number is public.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stored and self.test_users is not None:
            way_out = f"leave it out to measure on all test users of the store, or set data to {STAND_IN}"
            raise refuse("test_users", self.test_users, "left out where data are stored", way_out)
        # The objects that training takes check what these settings mean together.
        self.privacy()
        self.controller()
        self.correlation()
        self.server_optimiser()
        self.local()
        if self.population_size is not None:
            sampler_named(self.sampling, self.population_size, self.cohort_size, self.declared_size)

    @property
    def stored(self) -> bool:
        """Whether the users come from a store or a file: not generated."""
        return self.data not in (None, STAND_IN)

    @property
    def declared_size(self) -> int | None:
        """How many users are declared; None where their number is public, as it is for every fixed-size cohort.

        The number of a generated population is itself a setting, so that it counts as declared.
        """
        return None if self.sampling == "fixed" and not self.stored else self.population_size

    def drawn_users(self) -> int:
        """How many users to generate."""
        if self.population_size is None:
            raise refuse("population_size", None, "given where users are generated", "give the number to draw")
        return self.population_size

    def privacy(self) -> Privacy:
        """The promise that these settings ask for."""
        return Privacy(**{**keywords_for(Privacy, self), "population_size": self.declared_size})

    def compute(self) -> Compute:
        """How they ask to compute."""
        return Compute(**keywords_for(Compute, self), fast=FastParts(**keywords_for(FastParts, self)))

    def local(self, reduction: str = "mean") -> LocalTraining:
        """How they ask users to train. `reduction` is the loss's own."""
        if self.client_optimiser == "sgd":
            return LocalSGD(**keywords_for(LocalSGD, self), reduction=reduction)
        if self.client_momentum:
            way_out = "drop it: adam has a momentum of its own"
            raise refuse("client_momentum", self.client_momentum, "left out where client_optimiser='adam'", way_out)
        return LocalAdam(**keywords_for(LocalAdam, self), reduction=reduction)

    def server_optimiser(self) -> ServerOptimiser:
        """The optimiser that `server` names."""
        if self.server == "normalised" and self.server_lr is not None:
            way_out = "drop it, or add server='sgd'"
            raise refuse("server_lr", self.server_lr, "left out where server='normalised', which needs none", way_out)
        if self.server_name == "normalised":
            return ServerNormalised(momentum=self.server_momentum, lr_schedule=self.server_lr_schedule)
        if self.server_name == "sgd":
            return ServerSGD(self.server_rate, self.server_momentum, self.server_lr_schedule)
        kind = ServerAdam if self.server == "adam" else ServerYogi
        return kind(self.server_rate, lr_schedule=self.server_lr_schedule)

    @property
    def server_name(self) -> str:
        """The server's optimiser, also where it is left out: whoever gives a rate means SGD."""
        return self.server or ("normalised" if self.server_lr is None else "sgd")

    @property
    def server_rate(self) -> float:
        """The rate of sgd, adam or yogi at the server, also where it is left out."""
        usual = 0.01 if self.server in ("adam", "yogi") else 1.0
        return usual if self.server_lr is None else self.server_lr

    def correlation(self) -> IndependentNoise | BandedNoise:
        """How noise is correlated over rounds, as `noise` names it."""
        if self.noise == "independent" and self.bands != "auto":
            raise refuse("bands", self.bands, "left out where noise='independent'", "set noise='banded'")
        return BandedNoise(self.bands) if self.noise == "banded" else IndependentNoise()

    def controller(self) -> ClipController:
        """The clip controller that `clip` names."""
        if self.clip == "quantile":
            return QuantileClip(**keywords_for(QuantileClip, self))
        if self.clip == "none":
            return FixedClip(float("inf"))
        if self.clip == "fixed" and self.fixed_clip is None:
            raise refuse("fixed_clip", None, "given where clip='fixed'", "give it, or set clip to a number")
        clip: Any = self.fixed_clip if self.clip == "fixed" else self.clip
        return FixedClip(clip)

    def overridden(self, changes: Mapping[str, Any], where: str) -> Self:
        """These settings with `changes`; an unknown key is refused with the nearest known one.

        Setting epsilon drops a noise_multiplier that was there before, and the other way round. Setting data to a store
        drops the population_size and test_users of what was there before, and another server the server_lr.
        """
        check_given(changes, where)
        for key, value in changes.items():
            if SETTINGS[key].some_tasks and value is not None and getattr(self, key) is None:
                raise refuse(key, value, f"left out, as task {self.task!r} has no such setting", "drop it")
        if changes.get("server") not in (None, self.server_name):  # the rate of one is none for the other
            changes = {"server_lr": None, **changes}
        return replace(self, **completed(changes))

    def to_toml(self) -> str:
        """One `key = value` a line, for `read_toml`; settings that are None are left out."""
        return toml_text(asdict(self))


def settings_from(given: Mapping[str, Any], where: str, without: Iterable[str] = ()) -> TrainSettings:
    """Settings from their defaults and what is given; a name that is unknown, missing or in `without` is refused."""
    check_given(given, where)
    for name in without:
        if given.get(name) is not None:
            raise refuse(name, given[name], "left out, as this task has no such setting", "drop it")
    for field in dataclasses.fields(Settings):
        if field.default is MISSING and field.name not in given:
            raise SettingError(f"{field.name} is missing: give {SETTINGS[field.name].flag}, or {field.name} in {where}")
    return TrainSettings(**completed(given))


def merged(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Both, where the later ones count. One of epsilon and noise_multiplier replaces the other."""
    pair = {"epsilon", "noise_multiplier"}
    dropped = pair if pair & later.keys() else set()
    return {**{name: value for name, value in earlier.items() if name not in dropped}, **later}


def completed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes to settings with the None that follow from them."""
    complete = dict(changes)
    for one, other in (("epsilon", "noise_multiplier"), ("noise_multiplier", "epsilon")):
        if one in changes:
            complete.setdefault(other, None)
    if changes.get("data") not in (None, STAND_IN):
        complete.setdefault("population_size", None)
        complete.setdefault("test_users", None)
    return complete


def check_given(given: Mapping[str, Any], where: str) -> None:
    """Refuse a name that is no setting, with the nearest that is, and a value outside its limits."""
    for key, value in given.items():
        if key not in SETTINGS:
            raise SettingError(f"{where} has the unknown key {key!r}: {meant(key, SETTINGS)}")
        if value is not None:
            check(key, value)


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a settings file."""
    try:
        return tomllib.loads(regular(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingError(f"config={str(path)!r} does not exist: give the path of a TOML file") from None
    except (ValueError, RecursionError, OSError) as error:  # ValueError: no TOML, no UTF-8, thousands of digits
        raise SettingError(
            f"config={str(path)!r} cannot be read as TOML ({error}): write lines such as rounds = 100"
        ) from None
