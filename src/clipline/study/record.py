"""What a run of a study is: what was asked (`RunSpec`), its identity, and what came of it (`RunRecord`)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from .. import __version__
from ..data.manifest import MANIFEST, read_entries, sha256
from ..errors import RunError, check_whole, refuse
from ..metric_direction import lower_is_better
from ..settings import SETTINGS
from ..tasks import short_name
from ..tasks.train_settings import TrainSettings

# Raise the number when the results of a run change by more than rounding: its record is then computed anew.
COMPUTES = f"clipline {__version__}/1"
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the update norms that `unprivate_quantiles` records
ID_DIGITS = 20

Outcome = Literal["finished", "diverged", "budget"]

# What changes a result by rounding alone, or where things lie. The task and its data enter by name and checksum.
_NOT_PART = ("task", "data", "device", "engine", "workers", "compiled_steps", "unprivate_timing")
# These came when there were records: where they have their defaults, a run is what it was and keeps its name.
_LATER = ("client_optimiser", "client_momentum", "client_weight_decay", "client_proximal", "noise", "bands")


@dataclass(frozen=True)
class RunSpec:
    """One run to make: complete settings, and what to record beside the usual.

    `settings.evaluate_every` decides which rounds are measured; of the last `evaluate_last` rounds each one is. With
    `unprivate_quantiles` the true quantiles of the update norms are recorded in every round, without noise.
    """

    settings: TrainSettings
    unprivate_quantiles: bool = False
    evaluate_last: int = 0

    def __post_init__(self) -> None:
        check_whole("evaluate_last", self.evaluate_last, at_least=0, way_out="0 measures by evaluate_every alone")
        if self.settings.noise_source != "seed":
            raise refuse(
                "noise_source", self.settings.noise_source, "'seed' in a study, whose runs can be made again",
                "leave it out",
            )  # fmt: skip

    def parts(self, data: str, code: str | None) -> dict[str, Any]:
        """Everything that decides the numbers of this run, as JSON can hold it.

        `data` is a checksum of the users' data (`data_checksum`), `code` that of the file that defines the task. Where
        the data lie, how many workers and which device compute is no part of it.
        """
        given = {name: value for name, value in asdict(self.settings).items() if name not in _NOT_PART}
        named = {
            name: _canonical(name, value)
            for name, value in given.items()
            if value is not None and not (name in _LATER and value == SETTINGS[name].default)
        }
        return {
            "computes": COMPUTES,
            "task": short_name(self.settings.task),
            "code": code,
            "unprivate_data_checksum": data,
            "unprivate_quantiles": self.unprivate_quantiles,
            "evaluate_last": self.evaluate_last,
            "settings": dict(sorted(named.items())),
        }

    def identity(self, data: str, code: str | None = None) -> str:
        """The name of this run in every study directory: the hash of its `parts`."""
        return identity_of(self.parts(data, code))


def identity_of(parts: Mapping[str, Any]) -> str:
    """The identity that these parts have: the first digits of a SHA-256 in hexadecimal."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_DIGITS]


def _canonical(name: str, value: Any) -> Any:
    """One form for equal values: 1 and 1.0, and powers of ten whose last digit another machine rounds otherwise."""
    if name == "clip" and value == math.inf:
        return "none"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(f"{value:.12g}") if number and SETTINGS[name].kind is float else value


@dataclass(frozen=True)
class RunRecord:
    """One run that has ended, with all that a figure may be made from.

    `rounds` has columns of equal length: "round", "clip", "fraction_within" and each metric, with None where a round
    was not measured or a number is not finite; with `unprivate_quantiles` also "unprivate_quantile_0.1" and so on.
    A run whose model, clip or metric is no longer finite has ended early as "diverged".
    """

    id: str
    identity: Mapping[str, Any]  # the parts that the id is the hash of
    outcome: Outcome
    rounds: Mapping[str, Sequence[Any]]
    final: Mapping[str, float | None]  # metrics of the last model
    guarantee: Mapping[str, Any] | None  # epsilon, delta and all that they rest on, and in words
    circumstances: Mapping[str, Any]  # machine, device, versions, date: nothing that should decide a number

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that are part of the identity, by name; those that are None are left out."""
        settings: Mapping[str, Any] = self.identity["settings"]
        return settings

    def average(self, metric: str, last: int = 100) -> float:
        """The mean of a metric over the measured ones of the last `last` rounds.

        A diverged run gives the worst value there is: infinity for a loss or an error, minus infinity otherwise.
        """
        if self.outcome == "diverged":
            return worst(metric)
        if metric not in self.rounds:
            raise refuse("metric", metric, f"one of {', '.join(self.final)}", "give one that the run was measured by")
        values = [value for value in self.rounds[metric][-last:] if value is not None]
        return sum(values) / len(values) if values else worst(metric)

    def to_json(self) -> str:
        """The record as text, with a checksum of its own content."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps({**content, "checksum": _checksum(content)}, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "the record") -> RunRecord:
        """The record that `to_json` wrote; refused where it is damaged, changed, or another run's."""
        try:
            content = json.loads(text)
            checksum = content.pop("checksum")
            record = cls(**content)
            same = checksum == _checksum(content)
            columns = {len(column) for column in record.rounds.values()}
            right = record.id == identity_of(record.identity)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RunError(f"{where} is no record of a run ({error}): delete it, and the run is made again") from None
        if not same:
            raise RunError(f"{where} was changed after it was written: delete it, and the run is made again")
        if not right:
            raise RunError(f"{where} has another identity than its id {record.id}: delete it")
        if len(columns) != 1:
            raise RunError(f"{where} has columns of different lengths: delete it, and the run is made again")
        return record


def worst(metric: str) -> float:
    """What a diverged run counts as."""
    return math.inf if lower_is_better(metric) else -math.inf


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


GENERATED = "generated"  # settings and program decide the users


def data_checksum(settings: TrainSettings) -> str:
    """What stands for the users' data in the identity of a run: PRIVATE where they are real, no noise is in it.

    Of stores the checksums in their manifests, which opening a store compares with its files; of a table that of the
    file. Generated users follow from the settings.
    """
    if not settings.stored:
        return GENERATED
    path = Path(str(settings.data))
    if path.is_file():
        return sha256(path)
    stores = [folder for folder in (path, path / "train", path / "test") if (folder / MANIFEST).is_file()]
    if not stores:
        raise refuse("data", str(path), "a store or a table", "clipline data prepare makes a store")
    digest = hashlib.sha256()
    for folder in stores:
        known = read_entries(folder).get("sha256") or {}
        names = sorted(known or (file.name for file in folder.glob("*.npy")))
        sums = [(name, known.get(name) or sha256(folder / name)) for name in names]
        digest.update(repr((folder.relative_to(path).as_posix(), sums)).encode())
    return digest.hexdigest()
