"""Public data sets that installed packages know: what `clipline data` lists, downloads and prepares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .. import registry
from ..errors import check_choice

if TYPE_CHECKING:
    from .manifest import Manifest
    from .store import StageProgress

TABLE = "table"  # the name for data that no package knows


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
