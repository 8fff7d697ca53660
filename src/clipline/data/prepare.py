"""Prepares a table: from a file to a store that training reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from .column_options import NO_OPTIONS, ColumnOptions
from .manifest import Manifest
from .readers.tables import read_table
from .store import atomic_folder, write_store

StageProgress = Callable[[str, int, int], None]  # what is being done, how much is done, of how much


def no_stages(stage: str, done: int, total: int) -> None:
    """The default for `progress`: nothing is shown."""


def prepare_table(
    source: str | Path,
    target: str | Path,
    user_column: str,
    *,
    fields: Sequence[str] | None = None,
    options: ColumnOptions = NO_OPTIONS,
    progress: StageProgress = no_stages,
) -> Manifest:
    """Write the store of a table of your own, however large it is.

    `options` say what becomes of gaps, categories and timestamps; they are stored. `target` is complete or untouched.
    """
    file = Path(source)
    with atomic_folder(target) as (folder, scratch):
        chunks = read_table(
            file, user_column, fields=fields, options=options, progress=lambda *now: progress("reading", *now)
        )
        with closing(chunks):  # before the scratch folder goes, also after an error
            return write_store(
                folder,
                options.checked(chunks),
                source=f"table from {file.name}",
                tasks=(),
                origin="own",
                progress=lambda *now: progress("grouping", *now),
                scratch=scratch,
                column_options=options.entries(),
            )
