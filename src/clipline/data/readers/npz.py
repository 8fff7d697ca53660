"""NPZ archives, a few rows of every array at a time: an archive larger than memory works."""

from __future__ import annotations

import math
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import PopulationError
from ..chunks import CHUNK_BYTES, FieldChunk, Progress, Text, columns_of, short
from ..column_options import ColumnOptions
from ..fields import list_fields
from ..packed_field import Field
from ..sequences import check_length_fields


class _Member:
    """One array inside an archive, read from its beginning on."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self.file, self.name = file, name
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            self.shape, fortran, self.dtype = read(file)
        except Exception as error:  # NumPy reads a header as Python code, and fails in as many ways
            raise ValueError(f"{name} has a damaged header, {short(error)}") from None
        if min(self.shape, default=0) < 0:
            raise ValueError(f"{name} has shape {self.shape}")
        if fortran and len(self.shape) > 1:
            raise ValueError(f"{name} is stored by columns, save it with np.ascontiguousarray")
        if self.dtype.hasobject:
            raise ValueError(f"{name} holds Python objects, save numbers or fixed-width text")
        self.rows = self.shape[0] if self.shape else 0
        self.width = self.dtype.itemsize * math.prod(self.shape[1:])

    def take(self, rows: int) -> NDArray[Any]:
        """The next rows."""
        data = self.file.read(rows * self.width)
        if len(data) < rows * self.width:
            raise EOFError(f"{self.name} ends early")
        if self.dtype.kind == "U" and np.frombuffer(data, self.dtype.byteorder + "u4").max(initial=0) > sys.maxunicode:
            raise ValueError(f"{self.name} holds letters that do not exist")
        return np.frombuffer(data, self.dtype).reshape(rows, *self.shape[1:])


def read_npz(
    file: Path, user_column: str, fields: Sequence[str] | None, text: Text | None, options: ColumnOptions,
    progress: Progress,
) -> Iterator[FieldChunk]:  # fmt: skip
    """The rows of an archive of equally long arrays; `progress` counts bytes of the file."""
    size, done = file.stat().st_size, 0
    try:
        with zipfile.ZipFile(file) as archive, ExitStack() as stack:
            known = [name.removesuffix(".npy") for name in archive.namelist()]
            names = columns_of(repr(str(file)), known, user_column, fields)
            options.check_columns(names)
            check_length_fields(names, options)
            members = {
                name: _Member(stack.enter_context(archive.open(f"{name}.npy")), name) for name in (user_column, *names)
            }
            total = members[user_column].rows
            for name, member in members.items():
                if member.rows != total:
                    raise PopulationError(
                        f"{str(file)!r} has {member.rows} rows of {name!r} but {total} of {user_column!r}: "
                        "give arrays of equal length, or choose some with fields"
                    )
            widest = sum(member.width for member in members.values()) + 8 * sum(options.lengths.values())
            at_once = max(1, CHUNK_BYTES // max(1, widest))
            while done < total:
                rows = min(at_once, total - done)
                arrays: dict[str, Field] = {}
                for name in names:
                    arrays |= _fields(name, members[name].take(rows), text, options)
                yield members[user_column].take(rows), arrays
                done += rows
                progress(size * done // total, size)
    except (ValueError, OSError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, PopulationError):
            raise
        raise PopulationError(f"{str(file)!r} cannot be read as NPZ ({short(error)}): save it again") from None


def npz_schema(file: Path) -> Any:
    """The arrays of an archive as an Arrow schema, from their headers alone; what has no place in a column is null."""
    import pyarrow as pa

    def kind(member: _Member) -> Any:
        if member.dtype.kind in "US":
            return pa.string()
        known = member.dtype.kind in "fiubM" and len(member.shape) == 1
        return pa.from_numpy_dtype(member.dtype.newbyteorder("=")) if known else pa.null()

    try:
        with zipfile.ZipFile(file) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            return pa.schema([(name, kind(_Member(archive.open(f"{name}.npy"), name))) for name in names])
    except (ValueError, OSError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise PopulationError(f"{str(file)!r} cannot be read as NPZ ({short(error)}): save it again") from None


def _fields(name: str, array: NDArray[Any], text: Text | None, options: ColumnOptions) -> dict[str, Field]:
    made: dict[str, Field]
    if text is not None and array.dtype.kind == "U" and name not in options.categories:
        values = text(array.tolist())
        made = list_fields(name, list(values), options) if name in options.lengths else {name: np.asarray(values)}
    elif name in options.lengths:
        made = list_fields(name, array, options)
    else:
        made = {name: options.applied(name, array)}
    return {field: options.scaled(field, values) for field, values in made.items()}
