"""Prepares a table: from a file to a store that training reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from .chunks import Text
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
    text: Text | None = None,
    options: ColumnOptions = NO_OPTIONS,
    progress: StageProgress = no_stages,
) -> Manifest:
    """Write the store of a table of your own, however large it is.

    Args:
      source: The table: Parquet, CSV, TSV, JSONL or NPZ.
      target: The folder to write, new or empty. It is complete or, after an error, untouched.
      user_column: The column that says whose row it is.
      fields: Columns to keep; all others are by default.
      text: Turns each column of text into numbers.
      options: What becomes of gaps, categories and timestamps. They are stored.
      progress: Called with what is being done, how much of it is done, of how much.

    Returns:
      What the store holds.

    Raises:
      PopulationError: If the table cannot be read or the folder cannot be written.

    """
    file = Path(source)
    with atomic_folder(target) as (folder, scratch):
        chunks = read_table(
            file,
            user_column,
            fields=fields,
            text=text,
            options=options,
            progress=lambda *now: progress("reading", *now),
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
