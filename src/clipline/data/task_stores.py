"""Public data sets that installed packages know, and the prepared data of a task: a folder with its two stores.

Torch is not imported here, so that `clipline tasks` is fast.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .. import registry
from ..errors import CliplineError, PopulationError, check_choice, refuse
from ..settings import STAND_IN
from .manifest import MANIFEST, Manifest, read_manifest, verify_store

if TYPE_CHECKING:
    from .population import Population
    from .store import StageProgress

HOME_VARIABLE, HOME = "CLIPLINE_DATA", "clipline-data"
TABLE = "table"  # the name for data that no package knows
CHECKSUM_BYTES = 1 << 30  # larger files are not read through when a run begins; `verify_store` reads all


@runtime_checkable
class DataSet(Protocol):
    """A data set as its package registers it, under the entry point group `clipline.data_sets`. Light to import."""

    @property
    def tasks(self) -> Sequence[str]:
        """The tasks that read it."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """What `clipline data list --json` says: what, splits, fields, downloads, files and by_hand.

        `splits` maps a name to its users and examples; `files` are names to look for.
        """
        ...

    def prepare(
        self, task: str, source: Path, target: Path, *, split: str | None, lists: Mapping[str, Path],
        progress: StageProgress,
    ) -> Mapping[str, Manifest]:  # fmt: skip
        """Write the stores `target/train` and `target/test`, or one split as `target`; gives manifests by folder.

        `task` is the name as it was asked for: the data set's or that of a task. `lists` are files beside the examples.
        """
        ...

    def fetch(self, target: Path, progress: StageProgress) -> Sequence[tuple[Path, bool]]:
        """Download all files; gives each path, and whether the file was compared with a published checksum."""
        ...


def data_sets() -> dict[str, DataSet]:
    """All data sets by name. Those that cannot be used are left out with a warning."""
    return registry.all_registered("data_sets", DataSet)  # type: ignore[type-abstract]


def data_set(name: str, *others: str) -> DataSet:
    """A data set by its own name or that of a task that reads it; `others` are allowed names beside these."""
    known = data_sets()
    by_task = {task: data for data in known.values() for task in data.tasks}
    return {**by_task, **known}[check_choice("data", name, [*known, *by_task, *others])]


def data_set_of(task: str) -> str | None:
    """The name of the data set that a task reads, if a package knows one."""
    return next((name for name, data in data_sets().items() if task in data.tasks), None)


@dataclass(frozen=True)
class TaskStore:
    """Both stores of a task, as their manifests describe them."""

    folder: Path
    train: Manifest
    test: Manifest

    def __str__(self) -> str:
        users, tested = f"{self.train.users:,}", f"{self.test.users:,}"
        return f"{self.train.origin} data of {users} users and {tested} to measure on, {self.train.source}"


OUTSIDERS = "users outside the training population"
INSIDERS = "other examples of the training users, which the guarantee does not cover"


@dataclass(frozen=True)
class DataUsed:
    """What a run trains and measures on, in words that stand beside its results."""

    kind: str  # "embedded", "stand-in", "original", "substitute" or "own"
    title: str  # for the line before the work begins
    source: str | None  # of a store, as its manifest says
    measured_on: str
    checksum: str | None = None  # of a public data set; that of private data would tell of them


def data_used(task: str, kind: str, title: str, data: str | None) -> DataUsed:
    """What the setting `data` means on a task: what it generates itself, or the store."""
    if data in (None, STAND_IN):
        return DataUsed(kind, title, None, OUTSIDERS)
    store = read_store(str(data), task)
    measured_on = INSIDERS if store.train.shared_users else OUTSIDERS
    checksum = None if store.train.origin == "own" else _checksum(store)
    return DataUsed(store.train.origin, f"{task} on {store}", store.train.source, measured_on, checksum)


def _checksum(store: TaskStore) -> str:
    """One for all files of both stores, from the checksums in their manifests."""
    files = [sorted(manifest.sha256.items()) for manifest in (store.train, store.test)]
    return hashlib.sha256(repr(files).encode()).hexdigest()[:16]


def data_home() -> Path:
    """Where stores are looked for: the folder that CLIPLINE_DATA names, or `clipline-data` here."""
    named = os.environ.get(HOME_VARIABLE)
    if named and not Path(named).is_dir():
        raise PopulationError(f"{HOME_VARIABLE}={named!r} is no folder: make it, or unset {HOME_VARIABLE}")
    return Path(named or HOME)


def find_store(task: str, home: Path | None = None) -> Path | None:
    """The folder of a task's data in `home`, or the default place: by the name of the task, else of its data set.

    A folder counts where `train` or `test` in it holds a store; whether both do is for `read_store` to say.
    """
    data_set = data_set_of(task)
    if data_set is None:
        return None
    for name in (task, data_set):
        folder = (data_home() if home is None else home) / name
        if any((folder / split / MANIFEST).is_file() for split in ("train", "test")):
            return folder
    return None


def read_store(folder: str | Path, task: str) -> TaskStore:
    """What a folder holds for a task, by its manifests; refused where a part is missing or belongs to another task."""
    path = Path(folder)
    if not path.is_dir():
        raise refuse("data", str(folder), "a folder with the stores train and test", _way_out(task))
    if (path / MANIFEST).is_file():
        raise refuse("data", str(folder), "the folder of both train and test, and it is one of the two", "give both")
    parts = []
    for split in ("train", "test"):
        if not (path / split / MANIFEST).is_file():
            raise refuse("data", str(folder), f"complete, and it holds no {split}/{MANIFEST}", _way_out(task))
        manifest = read_manifest(path / split)
        if task not in manifest.tasks:
            made_for = ", ".join(manifest.tasks) or "no task"
            raise refuse("data", str(path / split), f"prepared for {task}, and it is for {made_for}", _way_out(task))
        for name in manifest.sha256:
            if not (path / split / name).is_file():
                raise refuse("data", str(folder), f"complete, and {split}/{name} is missing", _way_out(task))
        parts.append(manifest)
    return TaskStore(path, *parts)


def open_store(folder: str | Path, task: str) -> tuple[Population, Population]:
    """The users to train on and those to measure on, as memory maps, after every file up to 1 GiB was checked."""
    from .population import Population

    store = read_store(folder, task)
    opened = []
    for split, manifest in (("train", store.train), ("test", store.test)):
        verify_store(store.folder / split, largest=CHECKSUM_BYTES)
        population = Population.open(store.folder / split)
        if len(population) != manifest.users or population.examples != manifest.examples:
            raise PopulationError(
                f"{str(store.folder / split)!r} has {len(population)} users and {population.examples} examples but its "
                f"manifest says {manifest.users} and {manifest.examples}: prepare the data again"
            )
        opened.append(population)
    return opened[0], opened[1]


def data_state(task: str, generated: str, home: Path | None = None) -> dict[str, Any]:
    """What `clipline train TASK` would find now, unless told otherwise.

    `data` is "present" where both stores are there, "missing" where something is there that cannot be used, with the
    reason as `problem`, and `generated` (such as "stand-in") where there is nothing.
    """
    state: dict[str, Any] = {"data": generated, "folder": None, "origin": None, "store_users": None, "problem": None}
    try:
        folder = find_store(task, home)
        if folder is not None:
            state |= {"data": "missing", "folder": str(folder)}
            store = read_store(folder, task)
            state |= {"data": "present", "origin": store.train.origin, "store_users": store.train.users}
    except CliplineError as error:
        state |= {"data": "missing", "problem": str(error)}
    return state


def _way_out(task: str) -> str:
    return f"clipline data prepare {task} --from PATH --to DIR makes one, and --data {STAND_IN} needs none"
