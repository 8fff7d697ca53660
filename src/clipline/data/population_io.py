"""Populations from and to files and dataframes: the work of `Population.open`, `save`, `from_table` and so on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PopulationError, SettingError
from ..federated.population import Population, check_finite, check_ids
from .chunks import Text
from .column_options import ZERO_UPDATE, ColumnOptions
from .fields import fields_of_arrays
from .fingerprint import fingerprint
from .manifest import MANIFEST, VERSION, check_field_names, read_entries, write_manifest
from .readers.dataframes import read_dataframe, read_dataset, read_fields
from .readers.tables import read_table
from .store import atomic_folder, write_store
from .user_ids import ids_array


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
            examples=population.examples, source="Population.save", column_options=population.column_options,
            example_level=population.example_level,
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
        options = ColumnOptions.of(manifest.get("column_options") or {}).entries()
        return Population(offsets, fields, user_ids, options, manifest.get("example_level") is True)
    except (PopulationError, SettingError, AttributeError) as error:
        raise PopulationError(f"{str(path)!r}: {error}") from None


def population_from_arrays(
    user_ids: Any, fields: Mapping[str, Any], known_users: Any, column_options: Mapping[str, Any]
) -> Population:
    """Examples in arrays, lists or columns, grouped by user in memory."""
    options = ColumnOptions.of(column_options)
    ids = ids_array("user_ids", user_ids)
    return _grouped(ids, fields_of_arrays(fields, options), known_users, options)


def population_from_table(
    path: str | Path,
    user: str,
    fields: Sequence[str] | None,
    text: Text | None,
    known_users: Iterable[int | str],
    scratch: str | Path | None,
    column_options: Mapping[str, Any],
) -> Population:
    """The rows of a Parquet, CSV, JSONL or NPZ file, grouped by user out of core and memory-mapped.

    The maps are of temporary files that are deleted at once: the disk space is free again when the population is.
    """
    options = ColumnOptions.of(column_options)
    folder = Path(tempfile.gettempdir() if scratch is None else scratch)
    if not folder.is_dir():
        raise PopulationError(f"scratch={str(folder)!r} is no folder: make it, or leave scratch out")
    try:
        with tempfile.TemporaryDirectory(prefix="clipline-", dir=folder) as temporary:
            store = Path(temporary) / "store"
            with closing(read_table(path, user, fields=fields, text=text, options=options)) as chunks:
                write_store(
                    store, chunks, source=Path(path).name, known_users=known_users, column_options=options.entries()
                )
            return open_population(store)
    except OSError as error:
        raise PopulationError(
            f"{str(folder)!r} cannot hold temporary files ({error}): give a folder with space as scratch=..."
        ) from None


def population_from_dataframe(
    frame: Any,
    user: str,
    fields: Sequence[str] | None,
    text: Text | None,
    known_users: Any,
    column_options: Mapping[str, Any],
) -> Population:
    """The rows of a pandas, polars, pyarrow or Hugging Face table, grouped by user in memory."""
    options = ColumnOptions.of(column_options)
    ids, arrays = read_dataframe(frame, user, fields=fields, text=text, options=options)
    return _grouped(ids, arrays, known_users, options)


def population_from_dataset(
    dataset: Any, user_ids: Any, fields: Sequence[str], known_users: Any, column_options: Mapping[str, Any]
) -> Population:
    """The items of a torch `Dataset`, grouped by user in memory."""
    ids, columns = read_dataset(dataset, user_ids, fields)
    return population_from_arrays(ids, columns, known_users, column_options)


def population_one_each(dataset: Any, names: Sequence[str], arrays: Mapping[str, Any]) -> Population:
    """Every item of a torch `Dataset`, or every row of the arrays, as a user of its own."""
    if (dataset is None) == (not arrays):
        given = "both a dataset and arrays" if arrays else "neither a dataset nor arrays"
        raise PopulationError(f"one_each got {given} but needs one of them: give a torch Dataset, or x=... and y=...")
    options = ColumnOptions.of({})
    fields = fields_of_arrays(arrays if dataset is None else read_dataset(dataset, None, names)[1], options)
    first = next(iter(fields.values()))
    count = len(first) if first.ndim else 0
    return Population(np.arange(count + 1), fields, np.arange(count), example_level=True)


def fields_like(population: Population, frame: Any, text: Text | None) -> dict[str, NDArray[Any]]:
    """The columns of a dataframe as fields of a population: its options applied, in its types and shapes."""
    options = ColumnOptions.of(population.column_options)
    arrays = read_fields(frame, population.fields, text=text, options=options)
    for name, array in arrays.items():
        wanted = population.fields[name]
        if array.shape[1:] != wanted.shape[1:]:
            raise PopulationError(
                f"field {name!r} has rows of shape {array.shape[1:]} but the population has {wanted.shape[1:]}: "
                "give equal shapes"
            )
        if not np.can_cast(array.dtype, wanted.dtype, "same_kind"):
            raise PopulationError(f"field {name!r} is {array.dtype} but the population has {wanted.dtype}: convert it")
        arrays[name] = array.astype(wanted.dtype, copy=False)
        if options.missing != ZERO_UPDATE:
            check_finite(f"field {name!r}", array)
    return arrays


def _grouped(
    ids: NDArray[Any], arrays: Mapping[str, NDArray[Any]], known_users: Any, options: ColumnOptions
) -> Population:
    """The examples of each user beside each other, in the order they came; users sorted by id."""
    check_ids("user_ids", ids, "give one id for each example")
    known = None if known_users is None else ids_array("known_users", known_users)
    for name, values in arrays.items():
        if values.ndim == 0 or len(values) != len(ids):
            rows = 0 if values.ndim == 0 else len(values)
            raise PopulationError(
                f"field {name!r} has {rows} rows but must have {len(ids)}, one for each entry of user_ids: "
                "give arrays of equal length"
            )
    if known is not None and len(known):  # an empty list has no type to go by
        check_ids("known_users", known, "give one id for each user")
        if len(ids) and known.dtype.kind != ids.dtype.kind:  # joined they would become another type
            raise PopulationError(
                f"known_users are {known.dtype} and user_ids are {ids.dtype} but both must be text or both numbers, of "
                "one kind: convert one of them"
            )
    everyone = np.concatenate([ids, known]) if known is not None and len(known) else ids
    users, owner = np.unique(everyone, return_inverse=True)
    owner = owner[: len(ids)]
    if (np.diff(owner) < 0).any():
        order = np.argsort(owner, kind="stable")
        arrays = {name: values[order] for name, values in arrays.items()}
    offsets = np.zeros(len(users) + 1, dtype=np.int64)
    np.cumsum(np.bincount(owner, minlength=len(users)), out=offsets[1:])
    return Population(offsets, arrays, users, options.entries())


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
