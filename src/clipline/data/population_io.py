"""Populations from and to files and dataframes: the work of `Population.open`, `save`, `from_table` and so on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import PopulationError, SettingError, check_number, check_whole, refuse
from ..privacy.events import GaussianEvent
from ..random.streams import Streams
from .array_checks import check_finite, check_ids
from .chunks import Text, short
from .column_options import ZERO_UPDATE, ColumnOptions, charges_of
from .fields import fields_of_arrays
from .fingerprint import fingerprint
from .manifest import (
    MANIFEST,
    PACKED_VERSION,
    VERSION,
    WAY_OUT,
    check_field_names,
    packed_entry,
    read_entries,
    write_manifest,
)
from .packed_field import Field, PackedField, is_mapped, offsets_of
from .population import Population
from .readers.dataframes import (
    column_names,
    is_dataframe,
    read_column,
    read_dataframe,
    read_dataset,
    read_fields,
    read_rows,
)
from .readers.images import read_images, table_of
from .readers.tables import read_table
from .store import atomic_folder, write_store
from .user_ids import ids_array

_COPY_BYTES = 8 << 20  # of a field copied at a time
_IN_MEMORY = 1 << 28  # bytes of a memory-mapped field up to which `split` copies it to memory, not to disk


def save_population(population: Population, folder: str | Path) -> Path:
    """Store a population as one `.npy` file per array and a manifest; complete or, after an error, not there."""
    check_field_names(population.fields)
    packed = {name: field for name, field in population.fields.items() if isinstance(field, PackedField)}
    with atomic_folder(folder) as (new, _):
        np.save(new / "offsets.npy", population.offsets)
        for name, field in population.fields.items():
            if isinstance(field, PackedField):
                np.save(new / f"values.{name}.npy", field.values)
                np.save(new / f"offsets.{name}.npy", field.offsets)
            else:
                np.save(new / f"field.{name}.npy", field)
        if population.user_ids is not None:
            np.save(new / "user_ids.npy", population.user_ids)
        write_manifest(
            new, fields=population.fields, user_ids=population.user_ids is not None, users=len(population),
            examples=population.examples, source="Population.save", column_options=population.column_options,
            charges=population.charges,
            example_level=population.example_level,
            packed={name: packed_entry(field.width, field.pad) for name, field in packed.items()},
        )  # fmt: skip
    return Path(folder)


def open_population(folder: str | Path) -> Population:
    """A stored population as memory maps. Of the manifest, version, fields and user_ids have to be there."""
    if not isinstance(folder, str | PathLike):
        raise refuse("folder", type(folder).__name__, "the path of a store", "give Population.open('rides'), say")
    path = Path(folder)
    manifest = read_entries(path)
    if manifest.get("version") not in (VERSION, PACKED_VERSION):
        raise PopulationError(
            f"{str(path)!r} has version {manifest.get('version')!r} but this clipline reads {VERSION} and "
            f"{PACKED_VERSION}: {WAY_OUT}"
        )
    names, with_ids = manifest.get("fields"), manifest.get("user_ids")
    if not isinstance(names, list) or not isinstance(with_ids, bool):
        raise PopulationError(
            f"{str(path / MANIFEST)!r} must say fields, a list of names, and user_ids, true or false: "
            "prepare or save the data again"
        )
    packed = manifest.get("packed", {})
    if not isinstance(packed, dict):
        raise PopulationError(f"{str(path / MANIFEST)!r} has packed as a {type(packed).__name__}: {WAY_OUT}")
    fields = {name: _opened_field(path, name, packed.get(name)) for name in check_field_names(names)}
    offsets, user_ids = _mapped(path / "offsets.npy"), _mapped(path / "user_ids.npy") if with_ids else None
    try:
        options = ColumnOptions.of(manifest.get("column_options") or {}).entries()
        charges = tuple(GaussianEvent.from_json(entries) for entries in manifest.get("charges") or ())
        return Population(
            offsets, fields, user_ids, options, charges=charges, example_level=manifest.get("example_level") is True
        )
    except (PopulationError, SettingError, AttributeError, TypeError) as error:
        raise PopulationError(f"{str(path)!r}: {error}") from None


def population_from_arrays(
    user_ids: Any, fields: Mapping[str, Any], known_users: Any, column_options: Mapping[str, Any]
) -> Population:
    """Examples in arrays, lists or columns, grouped by user in memory."""
    options = ColumnOptions.of(column_options)
    ids = ids_array("user_ids", user_ids)
    return _grouped(ids, fields_of_arrays(fields, options), known_users, options, charges_of(column_options))


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
                    store, options.checked(chunks), source=Path(path).name, known_users=known_users,
                    column_options=options.entries(), charges=charges_of(column_options),
                )  # fmt: skip
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
    return _grouped(ids, arrays, known_users, options, charges_of(column_options))


def population_from_dataset(
    dataset: Any, user_ids: Any, fields: Sequence[str], known_users: Any, column_options: Mapping[str, Any]
) -> Population:
    """The items of a torch `Dataset`, grouped by user in memory."""
    ragged = ColumnOptions.of(column_options).lengths
    ids, columns = read_dataset(dataset, user_ids, fields, ragged)
    return population_from_arrays(ids, columns, known_users, column_options)


def population_from_images(
    folder: str | Path,
    table: Any,
    user: str,
    path: str,
    field: str,
    size: tuple[int, int],
    channels: int,
    known_users: Any,
    column_options: Mapping[str, Any],
) -> Population:
    """Pictures, whose users and labels a table has, grouped by user in memory."""
    options = ColumnOptions.of(column_options)
    frame = table_of(table, user, path)
    files = read_column(frame, path)
    labels = [name for name in column_names(frame) if name not in (user, path)]
    if field in labels:
        raise PopulationError(f"field={field!r} is the name of a column too: call the pictures something else")
    ids, arrays = read_dataframe(frame, user, fields=labels, options=options)
    pictures = read_images(folder, files, size, channels)
    return _grouped(ids, {field: pictures, **arrays}, known_users, options, charges_of(column_options))


def population_one_each(
    dataset: Any, names: Sequence[str] | None, arrays: Mapping[str, Any], column_options: Mapping[str, Any]
) -> Population:
    """Every row of a dataframe or of the arrays, or every item of a torch `Dataset`, as a user of its own."""
    if (dataset is None) == (not arrays):
        given = "both a dataset and arrays" if arrays else "neither a dataset nor arrays"
        raise PopulationError(f"one_each got {given} but needs one of them: give a torch Dataset, or x=... and y=...")
    options = ColumnOptions.of(column_options)
    if is_dataframe(dataset):
        fields = read_rows(dataset, fields=names, options=options)
    else:
        if dataset is not None:
            arrays = read_dataset(dataset, None, names or ("x", "y"), options.lengths)[1]
        fields = fields_of_arrays(arrays, options)
    first = next(iter(fields.values()))
    count = len(first) if first.ndim else 0
    entries, charges = options.entries(), charges_of(column_options)
    return Population(np.arange(count + 1), fields, np.arange(count), entries, charges, example_level=True)


def fields_like(population: Population, frame: Any, text: Text | None) -> dict[str, NDArray[Any]]:
    """The columns of a dataframe as fields of a population: its options applied, in its types and shapes, padded."""
    options = ColumnOptions.of(population.column_options)
    arrays = read_fields(frame, population.fields, text=text, options=options)
    for name, array in arrays.items():
        if name not in population.fields:
            raise PopulationError(f"population has no field {name!r} but its lengths say so: make it again")
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
    ids: NDArray[Any], arrays: Mapping[str, Field], known_users: Any, options: ColumnOptions,
    charges: tuple[GaussianEvent, ...],
) -> Population:  # fmt: skip
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
    list(options.checked([(ids, dict(arrays))]))
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
        arrays = {
            name: values.take(order) if isinstance(values, PackedField) else values[order]
            for name, values in arrays.items()
        }
    offsets = np.zeros(len(users) + 1, dtype=np.int64)
    np.cumsum(np.bincount(owner, minlength=len(users)), out=offsets[1:])
    return Population(offsets, arrays, users, options.entries(), charges)


def users_to_test(population: Population, test: float | int, seed: int) -> NDArray[np.bool_]:
    """Which users `Population.split` tests on, (users,): by a hash of the seed and each user's own id."""
    if len(population) < 2:
        raise PopulationError("population has 1 user but a split needs at least 2: give more users")
    users = len(population)
    hashes = Streams(seed).user_keys("split", 0, population.identities(np.arange(users)))
    if isinstance(test, int | np.integer) and not isinstance(test, bool):
        way_out = "leave users for both halves, or give a fraction such as 0.1"
        count = check_whole("test", test, at_least=1, at_most=users - 1, way_out=way_out)
        chosen = np.zeros(users, bool)
        chosen[np.argsort(hashes, kind="stable")[:count]] = True
        return chosen
    way_out = "0.1 tests on a tenth of the users; a whole number on so many users"
    share = check_number("test", test, above=0, below=1, way_out=way_out)
    chosen = hashes < np.uint64(int(share * 2.0**64))
    if chosen.all() or not chosen.any():
        half = "train" if chosen.all() else "test"
        raise PopulationError(
            f"test={test} of {users} users leaves nobody to {half} on: give a whole number, such as test=1; or another "
            f"seed than {seed} if these users are half of a split by it, which has taken all with such hashes"
        )
    return chosen


def scaled_population(population: Population, scale: Mapping[str, Any], charge: GaussianEvent | None) -> Population:
    """The population with fields less an offset and over a divisor, as `ColumnOptions.scale` has them, copied."""
    options = {**population.column_options, "scale": {**population.column_options.get("scale", {}), **scale}}
    checked = ColumnOptions.of(options)
    checked.check_columns(population.fields)
    if twice := set(scale) & set(population.column_options.get("scale", {})):
        raise PopulationError(f"field {min(twice)!r} has a scale already: scale the population that it was made of")
    fields = dict(population.fields)
    for name in scale:
        field = fields[name]
        if isinstance(field, PackedField) and checked.scales_alike(name):
            values = _scaled_copy(checked, name, field.values)
            pad = checked.scaled_array(name, field.pad).astype(values.dtype)
            fields[name] = replace(field, values=values, pad=pad)
        else:
            fields[name] = _scaled_copy(checked, name, field)
    charges = population.charges if charge is None else (*population.charges, charge)
    return replace(population, fields=fields, column_options=checked.entries(), charges=charges)


def _scaled_copy(options: ColumnOptions, name: str, field: Field) -> NDArray[Any]:
    out = _like(field, len(field), np.dtype(np.float64 if field.dtype.itemsize > 4 else np.float32))
    step = max(1, _COPY_BYTES // max(1, field.nbytes // max(1, len(field))))
    for start in range(0, len(field), step):
        out[start : start + step] = options.scaled_array(name, field[start : start + step])
    return out


def users_at(population: Population, users: ArrayLike) -> NDArray[np.bool_]:
    """Which users `Population.subset` takes, (users,), from places or from an array of bool."""
    places = np.asarray(users)
    if places.dtype == bool and places.shape == (len(population),):
        places = np.flatnonzero(places)
    if places.ndim != 1 or places.dtype.kind not in "iu" or not len(places):
        raise PopulationError(
            f"users are {places.dtype} of shape {places.shape} but must be places or {len(population)} of bool, at "
            "least one user: give whole numbers"
        )
    if int(places.min()) < 0 or int(places.max()) >= len(population) or len(np.unique(places)) < len(places):
        raise PopulationError(f"users must be distinct places from 0 to {len(population) - 1}: give each once")
    chosen = np.zeros(len(population), bool)
    chosen[places] = True
    return chosen


def copied_rows(field: Field, rows: NDArray[np.bool_], count: int) -> Field:
    """The `count` rows where `rows` is true, read in pieces; those of a large memory map go to disk again."""
    if isinstance(field, PackedField):
        return _copied_lists(field, rows)
    out = _like(field, count, field.dtype)
    step, done = max(1, _COPY_BYTES // max(1, field.nbytes // max(1, len(field)))), 0
    for start in range(0, len(field), step):
        piece = field[start : start + step][rows[start : start + step]]
        out[done : done + len(piece)] = piece
        done += len(piece)
    return out


def _copied_lists(field: PackedField, rows: NDArray[np.bool_]) -> PackedField:
    offsets = offsets_of(np.diff(field.offsets)[rows])
    out = _like(field.values, int(offsets[-1]), field.dtype)
    step, done = max(1, _COPY_BYTES // max(1, field.nbytes // max(1, len(field)))), 0
    for start in range(0, len(field), step):
        bounds = field.offsets[start : start + step + 1]
        chosen = np.repeat(rows[start : start + step], np.diff(bounds))
        piece = field.values[bounds[0] : bounds[-1]][chosen]
        out[done : done + len(piece)] = piece
        done += len(piece)
    return replace(field, values=out, offsets=offsets)


def _like(field: Field, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Room for `count` rows of the shape of those of a field: on disk if it is a large memory map."""
    shape = (count, *field.shape[1:])
    if is_mapped(field) and field.nbytes > _IN_MEMORY and count:
        with tempfile.TemporaryFile() as file:  # the map outlives its file, which has no name to clean up
            return np.memmap(file, dtype, "w+", shape=shape)
    return np.empty(shape, dtype)


def population_fingerprint(population: Population, *, times: bool) -> str:
    """The checksum of all arrays of a population, by names that differ."""
    ids = {} if population.user_ids is None else {"user_ids": population.user_ids}
    fields = {f"field {name!r}": field for name, field in population.fields.items()}
    return fingerprint({"offsets": population.offsets, **ids, **fields}, times=times)


def _opened_field(folder: Path, name: str, packed: Any) -> Field:
    """A field of a store as memory maps; `packed` is what the manifest says of one of lists."""
    if packed is None:
        return _mapped(folder / f"field.{name}.npy")
    values, offsets = _mapped(folder / f"values.{name}.npy"), _mapped(folder / f"offsets.{name}.npy")
    try:
        width, pad = packed["width"], packed["pad"]
        if type(width) is not int or not isinstance(pad, int | float):
            raise TypeError(f"width is {width!r} and pad {pad!r}")
        return PackedField(values, offsets, width, np.array(pad).astype(values.dtype))
    except PopulationError as error:
        raise PopulationError(f"{str(folder)!r}: field {name!r}: {error}") from None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise PopulationError(
            f"{str(folder / MANIFEST)!r} does not say width and pad of {name!r} ({short(error)}): {WAY_OUT}"
        ) from None


def _mapped(path: Path) -> NDArray[Any]:
    """An `.npy` file as a memory map."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # NumPy reads a header as Python code, and fails in as many ways
        found = short(error).partition("; expected")[0]  # NumPy goes on with bytes of the file
        raise PopulationError(f"{str(path)!r} cannot be opened ({found}): prepare or save the data again") from None
