"""The columns of a table by name and kind, from its header and types. No value is kept or shown."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...data.chunks import existing_file, short
from ...data.readers.tables import read_table, separator
from ...errors import PopulationError

Kind = Literal["fraction", "whole", "yes-no", "text", "time", "other"]


@dataclass(frozen=True)
class Column:
    """One column of a table, with one value a row: of a list or anything else the kind is other."""

    name: str
    kind: Kind

    @property
    def is_number(self) -> bool:
        """Whether a model can take it as it is."""
        return self.kind in ("fraction", "whole", "yes-no")


def table_columns(path: str | Path) -> list[Column]:
    """The columns of a Parquet, CSV, JSONL or NPZ file, in their order.

    CSV and JSONL name no types: there a type is what the first lines can be read as, as it is when they are trained on.
    """
    file = existing_file(path)
    kinds = [ending.lower() for ending in file.suffixes]
    read: Callable[[Path], list[Column]] | None = next((_READERS[kind] for kind in kinds if kind in _READERS), None)
    if read is None:
        next(read_table(file, ""))  # refuses a file of no known kind
        raise AssertionError("a kind that can be read has a reader here")
    try:
        return read(file)
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:  # Arrow's own are ValueErrors
        raise PopulationError(
            f"table={str(file)!r} cannot be read ({short(error)}): mend it or copy it again"
        ) from None


def _parquet(file: Path) -> list[Column]:
    import pyarrow.parquet as pq

    return _of_schema(pq.read_schema(file))


def _csv(file: Path) -> list[Column]:
    import pyarrow as pa
    import pyarrow.csv

    with pa.input_stream(str(file), compression="detect") as stream:
        lined = pyarrow.csv.ParseOptions(delimiter=separator(stream.read(1 << 16)), newlines_in_values=True)
    with pyarrow.csv.open_csv(str(file), parse_options=lined) as reader:  # which reads no more than the first block
        return _of_schema(reader.schema)


def _jsonl(file: Path) -> list[Column]:
    import pyarrow as pa
    import pyarrow.json

    with pa.input_stream(str(file), compression="detect") as stream:
        block = stream.read(1 << 20)
    lines = block[: block.rfind(b"\n") + 1] or block
    return _of_schema(pyarrow.json.read_json(pa.BufferReader(lines)).schema)


def _npz(file: Path) -> list[Column]:
    from numpy.lib import format as npy

    found = []
    with zipfile.ZipFile(file) as archive:
        for member in archive.namelist():
            with archive.open(member) as stream:
                version = npy.read_magic(stream)
                header: Any = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, dtype = header(stream)
            kinds: dict[str, Kind] = {"f": "fraction", "i": "whole", "u": "whole", "b": "yes-no", "M": "time"}
            kinds |= {"U": "text", "S": "text"}
            found.append(
                Column(member.removesuffix(".npy"), kinds.get(dtype.kind, "other") if len(shape) == 1 else "other")
            )
    return found


def _of_schema(schema: Any) -> list[Column]:
    return [Column(str(field.name), _kind(field.type)) for field in schema]


def _kind(arrow: Any) -> Kind:
    import pyarrow.types as types

    if types.is_dictionary(arrow):
        return _kind(arrow.value_type)
    if types.is_boolean(arrow):
        return "yes-no"
    if types.is_integer(arrow):
        return "whole"
    if types.is_floating(arrow):
        return "fraction"
    if types.is_string(arrow) or types.is_large_string(arrow):
        return "text"
    return "time" if types.is_timestamp(arrow) or types.is_date(arrow) else "other"


_READERS: dict[str, Callable[[Path], list[Column]]] = {
    ".parquet": _parquet,
    ".csv": _csv,
    ".tsv": _csv,
    ".jsonl": _jsonl,
    ".npz": _npz,
}
