"""Populations from and to files and dataframes: the work of `Population.open`, `save`, `from_table` and so on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import PopulationError
from ..federated.population import Population, group_by_user
from .chunks import Text
from .fingerprint import fingerprint
from .manifest import MANIFEST, VERSION, check_field_names, read_entries, write_manifest
from .readers.dataframes import read_dataframe
from .readers.tables import read_table
from .spill import check_text_id
from .store import atomic_folder, write_store


def save_population(population: Population, folder: str | Path) -> Path:
    """Store a population as one `.npy` file per array and a manifest; complete or, after an error, not there."""
    check_field_names(population.fields)
    with atomic_folder(folder) as (new, _):
        np.save(new / "offsets.npy", population.offsets)
        for name, field in population.fields.items():
            np.save(new / f"field.{name}.npy", field)
        if population.user_ids is not None:
            np.save(new / "user_ids.npy", population.user_ids)
        write_manifest(
            new, fields=population.fields, user_ids=population.user_ids is not None, users=len(population),
            examples=population.examples, source="Population.save",
        )  # fmt: skip
    return Path(folder)


def open_population(folder: str | Path) -> Population:
    """A stored population as memory maps. Of the manifest, version, fields and user_ids have to be there."""
    path = Path(folder)
    manifest = read_entries(path)
    if manifest.get("version") != VERSION:
        raise PopulationError(
            f"{str(path)!r} has version {manifest.get('version')!r} but this clipline reads {VERSION}: "
            "prepare or save the data again"
        )
    names, with_ids = manifest.get("fields"), manifest.get("user_ids")
    if not isinstance(names, list) or not isinstance(with_ids, bool):
        raise PopulationError(
            f"{str(path / MANIFEST)!r} must say fields, a list of names, and user_ids, true or false: "
            "prepare or save the data again"
        )
    fields = {name: _mapped(path / f"field.{name}.npy") for name in check_field_names(names)}
    offsets, user_ids = _mapped(path / "offsets.npy"), _mapped(path / "user_ids.npy") if with_ids else None
    try:
        return Population(offsets, fields, user_ids)
    except PopulationError as error:
        raise PopulationError(f"{str(path)!r}: {error}") from None


def population_from_table(
    path: str | Path,
    user: str,
    *,
    fields: Sequence[str] | None = None,
    text: Text | None = None,
    known_users: Iterable[int | str] = (),
    scratch: str | Path | None = None,
) -> Population:
    """The rows of a Parquet, CSV, JSONL or NPZ file, grouped by user out of core and memory-mapped.

    The maps are of temporary files that are deleted at once: the disk space is free again when the population is.
    """
    folder = Path(tempfile.gettempdir() if scratch is None else scratch)
    if not folder.is_dir():
        raise PopulationError(f"scratch={str(folder)!r} is no folder: make it, or leave scratch out")
    try:
        with tempfile.TemporaryDirectory(prefix="clipline-", dir=folder) as temporary:
            store = Path(temporary) / "store"
            with closing(read_table(path, user, fields=fields, text=text)) as chunks:
                write_store(store, chunks, source=Path(path).name, known_users=known_users)
            return open_population(store)
    except OSError as error:
        raise PopulationError(
            f"{str(folder)!r} cannot hold temporary files ({error}): give a folder with space as scratch=..."
        ) from None


def population_from_dataframe(
    frame: Any,
    user: str,
    *,
    fields: Sequence[str] | None = None,
    text: Callable[[Sequence[str]], NDArray[Any]] | None = None,
    known_users: ArrayLike | None = None,
) -> Population:
    """The rows of a pandas, polars or pyarrow table, grouped by user in memory."""
    ids, arrays = read_dataframe(frame, user, fields=fields, text=text)
    if ids.dtype == object:
        for one in ids:
            check_text_id(one)
        ids = ids.astype(str)
    return group_by_user(ids, arrays, known_users=known_users)


def population_fingerprint(population: Population, *, times: bool) -> str:
    """The checksum of all arrays of a population, by names that differ."""
    ids = {} if population.user_ids is None else {"user_ids": population.user_ids}
    fields = {f"field {name!r}": field for name, field in population.fields.items()}
    return fingerprint({"offsets": population.offsets, **ids, **fields}, times=times)


def _mapped(path: Path) -> NDArray[Any]:
    """An `.npy` file as a memory map."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # NumPy reads a header as Python code, and fails in as many ways
        raise PopulationError(f"{str(path)!r} cannot be opened ({error}): prepare or save the data again") from None
