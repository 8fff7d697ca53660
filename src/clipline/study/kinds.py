"""Kinds of experiments that installed packages make of a study's runs, such as the paper's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from .. import registry

if TYPE_CHECKING:
    from .runs.directory import StudyDirectory


@runtime_checkable
class ExperimentKind(Protocol):
    """A kind of experiments, registered under the entry point group `clipline.experiments`. A module may be one.

    The name of the entry point is what `study.json` has as the `kind` of each experiment.
    """

    def summaries(self, directory: StudyDirectory) -> Mapping[str, Sequence[str]]:
        """What each finished experiment of this kind has found, in sentences, by its name."""
        ...

    def table_problems(self, directory: StudyDirectory) -> list[str]:
        """Where the tables in the folder are not what the records give, a sentence each."""
        ...

    def verdicts(self, directory: StudyDirectory) -> list[str]:
        """What the finished experiments conclude, computed again from the records, a sentence each."""
        ...

    def without_tables(self, directory: StudyDirectory) -> list[str]:
        """The experiments of this kind that have no table, so that there is nothing to compare."""
        ...


def experiment_kinds() -> dict[str, ExperimentKind]:
    """All kinds by name. Warns of those that cannot be used, and leaves them out."""
    return registry.all_registered("experiments", ExperimentKind)  # type: ignore[type-abstract]
