"""Tables with a user column, read a chunk at a time: Parquet, CSV and JSONL (also compressed), NPZ."""

from __future__ import annotations

import csv
import io
import json
import lzma
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import PopulationError
from ..chunks import (
    CHUNK_BYTES,
    FieldChunk,
    Progress,
    Text,
    columns_of,
    existing_file,
    no_progress,
    short,
)
from ..column_options import NO_OPTIONS, ColumnOptions
from ..fields import (
    arrow_chunk,
    check_length_fields,
    half_letters,
    list_fields,
    not_numbers,
    places_without_number,
    validated,
)
from ..packed_field import Field

_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".xz": "xz"}
_KINDS = (".parquet", ".csv", ".tsv", ".jsonl", ".npz")
_SEPARATORS = (b",", b";", b"\t")  # of CSV, the usual one first
_DECIMAL_COMMA = r"^\s*[-+]?\d+,\d+\s*$"
_QUOTED = rb'"[^"]*+(?:""[^"]*+)*+"'  # a value of CSV, where it stands at the start of a cell
CSV_BYTES = 1 << 20  # of a block of CSV, of which Arrow reads some dozens ahead; a row has no more
ROW_BYTES = 16 << 20  # the most of a row of JSONL, or of a row of Parquet on average
NPZ_BYTES = 1 << 30  # the most of all members of an archive, unpacked
_OPEN_QUOTE = "a quote opens a value of CSV and is never closed"
_WAY_OUT = f"give a file that ends in {', '.join(_KINDS)}; .csv, .tsv and .jsonl also with {', '.join(_CODECS)}"


def read_table(
    path: str | Path,
    user_column: str,
    *,
    fields: Sequence[str] | None = None,
    text: Text | None = None,
    options: ColumnOptions = NO_OPTIONS,
    progress: Progress = no_progress,
) -> Generator[FieldChunk, None, None]:
    """The rows of a table, with the user column as ids and the chosen or all other columns as fields.

    The ending of the name says what it is. A column of lists becomes an array with one more axis. Its lists are equally
    long, or `options` declare a width. User ids in CSV are text, as written. Text becomes numbers if there is a
    function `text` for it. Gaps are refused unless `options` say what they become. `progress` counts bytes of the file.
    """
    file = existing_file(path)
    kind, codec = _kind(file)
    if kind in (".parquet", ".npz"):
        if codec is not None:
            raise PopulationError(
                f"{str(file)!r} is compressed twice: decompress it to {kind}, which compresses itself"
            )
        read = _parquet if kind == ".parquet" else _npz
        yield from read(file, user_column, fields, text, options, progress)
        return
    yield from _lines(file, kind, codec, user_column, fields, text, options, progress)


def whole_table(path: str | Path, options: ColumnOptions = NO_OPTIONS, *, as_text: Sequence[str] = ()) -> Any:
    """All rows of a Parquet, CSV or JSONL file as one Arrow table, for predictions: no user column is needed.

    Columns of CSV and texts of JSONL that are named in `as_text` are read as they are written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind, codec = _kind(Path(path))
    file = existing_file(path)
    try:
        if kind == ".parquet" and codec is None:
            return pq.read_table(file)
        if kind in (".csv", ".jsonl"):
            with file.open("rb") as raw, _opened(raw, codec) as stream:
                text = {*options.as_text(), *as_text}
                batches = list(_rows(stream, text, file) if kind == ".csv" else _objects(stream, file))
                if sum(batch.num_rows for batch in batches):
                    return pa.Table.from_batches(batches)
                raise PopulationError(f"{str(file)!r} has no rows: give a table with examples")
    except (pa.ArrowException, OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise PopulationError(f"{str(file)!r} cannot be read ({short(error)}): mend it or copy it again") from None
    raise PopulationError(f"{str(file)!r} is no table that can be read at once: {_WAY_OUT}")


def table_schema(path: str | Path) -> Any:
    """The columns of a table and their types as an Arrow schema. Of CSV and JSONL the first lines say them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = existing_file(path)
    kind, codec = _kind(file)
    try:
        if kind == ".parquet":
            return pq.read_schema(file)
        if kind == ".npz":
            return _npz_schema(file)
        with file.open("rb") as raw, _opened(raw, codec) as stream:
            return next(_rows(stream, set(), file) if kind == ".csv" else _objects(stream, file)).schema
    except StopIteration:
        raise PopulationError(f"{str(file)!r} has no rows: give a table with examples") from None
    except (pa.ArrowException, OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise PopulationError(f"{str(file)!r} cannot be read ({short(error)}): mend it or copy it again") from None


def _kind(file: Path) -> tuple[str, str | None]:
    """The format and the compression that the name of the file says."""
    endings = [ending.lower() for ending in file.suffixes]
    codec = _CODECS.get(endings[-1]) if endings else None
    kind = (endings[:-1] if codec else endings)[-1:]
    if not kind or kind[0] not in _KINDS:
        raise PopulationError(f"{str(file)!r} is of no known kind: {_WAY_OUT}")
    return ".csv" if kind[0] == ".tsv" else kind[0], codec  # the header says what separates columns


def _parquet(
    file: Path, user_column: str, fields: Sequence[str] | None, text: Text | None, options: ColumnOptions,
    progress: Progress,
) -> Iterator[FieldChunk]:  # fmt: skip
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as table:
            names = columns_of(repr(str(file)), table.schema_arrow.names, user_column, fields)
            options.check_columns(names)
            check_length_fields(names, options)
            total, size, rows = table.metadata.num_rows, file.stat().st_size, 0
            width = _parquet_bytes(table, file, {user_column, *names}) // max(total, 1)
            width += 8 * sum(options.lengths.values())
            at_once = max(1, min(65536, CHUNK_BYTES // max(width, 1)))
            for batch in table.iter_batches(at_once, columns=[user_column, *names], use_threads=False):
                part = validated(batch, [user_column, *names])
                yield arrow_chunk(repr(str(file)), part, user_column, names, text, options, rows)
                rows += batch.num_rows
                progress(size * rows // max(total, 1), size)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise PopulationError(f"{str(file)!r} cannot be read as Parquet ({short(error)}): copy it again") from None


def _too_long(where: str) -> PopulationError:
    return PopulationError(f"{where} has more than {ROW_BYTES} bytes, the limit of a row: leave its longest column out")


def _parquet_bytes(table: Any, file: Path, wanted: set[str]) -> int:
    """About what these columns take in memory: a long run of one value is short in the file. No value is read.

    A group whose rows have more bytes than the limit on average is refused.
    """
    total, every = 0, range(table.metadata.num_columns)
    for number in range(table.num_row_groups):
        group, before = table.metadata.row_group(number), total
        # No rows: what is wrong with a column is an exception here, and ends the process in `column` below (26.0.1).
        next(table.reader.iter_batches(0, row_groups=[number], column_indices=every, use_threads=False), None)
        for column in map(group.column, every):
            name = column.path_in_schema  # of lists `x.list.element`
            if name in wanted or name.partition(".")[0] in wanted:
                total += max(8 * column.num_values, column.total_uncompressed_size)
        if total - before > ROW_BYTES * group.num_rows:
            raise _too_long(f"a row of {str(file)!r}, at 8 bytes an entry or more,")
    return total


def _lines(
    file: Path, kind: str, codec: str | None, user_column: str, fields: Sequence[str] | None, text: Text | None,
    options: ColumnOptions, progress: Progress,
) -> Iterator[FieldChunk]:  # fmt: skip
    import pyarrow as pa

    size, rows = file.stat().st_size, 0
    at_once = max(1, CHUNK_BYTES // (8 * sum(options.lengths.values()) or 1))  # as wide as lists may be
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(file.open("rb"))
            stream = stack.enter_context(_opened(raw, codec))
            as_text = {user_column, *options.as_text()}  # 007 and 7 are two users, and two categories
            batches = _rows(stream, as_text, file) if kind == ".csv" else _objects(stream, file, fields is None)
            names: list[str] | None = None
            for batch in batches:
                if names is None:
                    names = columns_of(repr(str(file)), batch.schema.names, user_column, fields)
                    options.check_columns(names)
                    check_length_fields(names, options)
                    if kind == ".csv" and text is not None:
                        _check_texts(batch, [name for name in names if name not in as_text])
                batch = validated(batch, [user_column, *names])
                for part in (batch.slice(start, at_once) for start in range(0, batch.num_rows, at_once)):
                    yield arrow_chunk(repr(str(file)), part, user_column, names, text, options, rows)
                    rows += part.num_rows
                progress(raw.tell(), size)
    except (pa.ArrowException, OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise PopulationError(f"{str(file)!r} cannot be read ({short(error)}): mend it or copy it again") from None


def separator(lines: bytes) -> str:
    """What separates the columns of a CSV file that begins so: a comma, a semicolon or a tab, as its header has it."""
    header = re.sub(rb"(?<![^,;\t\r\n\xbf])%b?" % _QUOTED, b"", lines[: 1 << 16])
    header = header.lstrip(b"\r\n").split(b"\n")[0].split(b"\r")[0]
    return max(_SEPARATORS, key=header.count).decode()  # the first of equals


class _Csv(io.RawIOBase):
    """A stream of CSV for Arrow, with a row of empty cells at the end, and no read that ends in CR.

    Where a quote is never closed, Arrow takes the rest of the file for a value, and so this row too. Of CR LF inside a
    value it loses the LF if they come in two reads.
    """

    def __init__(self, stream: Any) -> None:
        self.stream, self.ended = stream, False
        self.rest: bytes = stream.read(1 << 16)
        self.delimiter = separator(self.rest)
        lines = io.StringIO(self.rest.decode("utf-8-sig", "replace"), newline="")
        columns = next(filter(None, csv.reader(lines, delimiter=self.delimiter)), [])
        self.end = b"\n" + self.delimiter.join(['""'] * len(columns)).encode()

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next bytes, at least one before the end."""
        if not self.ended and len(self.rest) < len(buffer):
            new = self.stream.read(len(buffer) - len(self.rest))
            self.ended = not new
            self.rest += new or self.end
        count = min(len(buffer), len(self.rest))
        count -= count > 1 and self.rest[count - 1 : count] == b"\r"
        buffer[:count], self.rest = self.rest[:count], self.rest[count:]
        return count


def _rows(stream: Any, as_text: set[str], file: Path) -> Iterator[Any]:
    """Batches of a CSV stream. The first block says what the columns are and of which type, but for those of text."""
    import pyarrow as pa
    import pyarrow.csv

    lines = _Csv(stream)
    whole = pyarrow.csv.ReadOptions(use_threads=False, block_size=CSV_BYTES)
    parsed = pyarrow.csv.ParseOptions(delimiter=lines.delimiter, newlines_in_values=True)
    typed = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(as_text, pa.string()))
    names: list[str] = []
    try:
        with pyarrow.csv.open_csv(pa.PythonFile(lines, mode="r"), whole, parsed, typed) as reader:
            names, batch = reader.schema.names, reader.read_next_batch()
            _check_points(batch, as_text, file)
            for after in reader:
                yield batch
                batch = after
    except pa.ArrowInvalid as error:
        if found := re.search(r"CSV column #(\d+): Row #(\d+): .*: invalid value", str(error)):
            raise _mixed(file, names[int(found[1])], f"line {found[2]}") from None
        if "straddling" in str(error):
            raise PopulationError(
                f"{str(file)!r} cannot be read ({_OPEN_QUOTE}, or a row has more than {CSV_BYTES} bytes): mend it, "
                "or convert it to Parquet"
            ) from None
        raise
    if any(value not in (None, "") for value in batch.slice(batch.num_rows - 1).to_pylist()[0].values()):
        raise pa.ArrowInvalid(_OPEN_QUOTE)
    yield batch.slice(0, batch.num_rows - 1)


def _check_texts(table: Any, names: Sequence[str]) -> None:
    """Refuse columns of numbers with a few cells of text, which would all go through `text`: mistakes, most likely.

    One user's cell must not decide what becomes of everybody's numbers.
    """
    import pyarrow as pa

    for name in names:
        column = table.column(name)
        if pa.types.is_string(column.type) and places_without_number(texts := column.to_numpy(zero_copy_only=False)):
            raise not_numbers(name, "text", texts)


def _check_points(table: Any, as_text: set[str], file: Path) -> None:
    """Refuse columns of numbers with decimal commas: Arrow takes them for text, and 1,234 may mean two numbers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for name, column in zip(table.schema.names, table.columns, strict=True):
        if name in as_text or not pa.types.is_string(column.type):
            continue
        values = column.filter(pc.not_equal(column, ""))
        if len(values) and pc.all(pc.match_substring_regex(values, _DECIMAL_COMMA)).as_py():
            raise PopulationError(
                f"{str(file)!r} has numbers with a decimal comma in {name!r}, which are read as text: write them "
                "with a point, as with pandas.read_csv(..., decimal=',') and to_csv"
            )


def _objects(stream: Any, file: Path, every_key: bool = False) -> Iterator[Any]:
    """Batches of a JSONL stream. The first block says what the columns are and of which type.

    A key that only later blocks have is ignored, or refused with `every_key`. Arrow's own reader shifts lists that
    begin with null (apache/arrow#51305) and crashes over nested brackets.
    """
    import pyarrow as pa

    lines, kinds, before, done = io.BufferedReader(stream), dict[str, Any](), 0, 0
    for block in _blocks(lines):
        rows = [_object(line, file, number) for number, line in enumerate(block, done + 1) if line.strip()]
        done += len(block)
        for name in dict.fromkeys(key for row in rows for key in row):
            if not before:
                kinds[name] = None
            elif every_key and name not in kinds:
                raise PopulationError(
                    f"{str(file)!r} has {name!r} in a row after {before}, but not in the rows before: give it a value "
                    "in the first row, leave it out (fields=...) or convert to Parquet"
                )
        columns = {
            name: _column(name, [row.get(name) for row in rows], kind, file, before) for name, kind in kinds.items()
        }
        kinds = {name: column.type for name, column in columns.items()}
        before += len(rows)
        if rows:
            yield pa.RecordBatch.from_pydict(columns)


def _blocks(lines: Any) -> Iterator[list[bytes]]:
    """Lines, some at a time, as they take far more as Python objects; of one that is too long the beginning."""
    while block := lines.read(CHUNK_BYTES // 4):
        yield io.BytesIO(block + lines.readline(ROW_BYTES + 1)).readlines()


def _object(line: bytes, file: Path, number: int) -> dict[str, Any]:
    if len(line) > ROW_BYTES:
        raise _too_long(f"line {number} of {str(file)!r}")
    try:
        row = _DECODER.decode(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        if not isinstance(row, dict):
            raise ValueError("it holds no JSON object")
    except (ValueError, RecursionError) as error:
        found = "its brackets are nested too deep" if isinstance(error, RecursionError) else short(error)
        raise PopulationError(
            f"{str(file)!r} cannot be read in line {number} ({found}): mend it or copy it again"
        ) from None
    return row


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key comes twice")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct)


def _column(name: str, values: list[Any], wanted: Any, file: Path, before: int) -> Any:
    """The values as an Arrow array, of the type that the first block gave."""
    import pyarrow as pa

    try:
        array = pa.array(values)
        kind = _settled(array.type) if wanted is None else wanted
        if _fits(array.type, kind):
            return array.cast(kind)
    except UnicodeEncodeError:
        raise half_letters(repr(str(file)), name) from None
    except OverflowError:
        raise PopulationError(
            f"{str(file)!r} has whole numbers of 2^63 or more in {name!r}, which would lose digits: write them as "
            "text, in quotes"
        ) from None
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        pass
    first = wanted is None
    for row, value in enumerate(values, before + 1):
        try:
            kind = pa.array([value]).type
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):  # a list of several types, a huge number in a list
            raise _mixed(file, name, f"row {row}") from None
        if wanted is None or (first and _fits(wanted, kind)):
            wanted = kind
        if not _fits(kind, wanted):
            raise _mixed(file, name, f"row {row}")
    raise _mixed(file, name, f"a row after {before}")


def _settled(kind: Any) -> Any:
    """A type for later blocks too: lists of nothing but nulls are lists of floats."""
    import pyarrow as pa

    inner, depth = kind, 0
    while pa.types.is_list(inner):
        inner, depth = inner.value_type, depth + 1
    if depth and pa.types.is_null(inner):
        kind = pa.float64()
        for _ in range(depth):
            kind = pa.list_(kind)
    return kind


def _fits(kind: Any, wanted: Any) -> bool:
    """Whether values of a type are values of another one: whole numbers are numbers, and a gap is anything."""
    import pyarrow as pa

    while pa.types.is_list(kind) and pa.types.is_list(wanted):
        kind, wanted = kind.value_type, wanted.value_type
    whole = pa.types.is_integer(kind) and pa.types.is_floating(wanted)
    return bool(kind == wanted or pa.types.is_null(kind) or whole)


def _mixed(file: Path, column: str, where: str) -> PopulationError:
    return PopulationError(
        f"{str(file)!r} has a value in {column!r}, {where}, of another type than those before: mend it, or write all "
        "values as one type (1.0 for 1)"
    )


def _opened(raw: Any, codec: str | None) -> Any:
    """A stream of Arrow over a file that may be compressed."""
    import pyarrow as pa

    if codec == "xz":  # which Arrow cannot decompress
        return pa.PythonFile(lzma.LZMAFile(raw), mode="r")
    plain = pa.PythonFile(raw, mode="r")
    return plain if codec is None else pa.CompressedInputStream(plain, codec)


def _npz(
    file: Path, user_column: str, fields: Sequence[str] | None, text: Text | None, options: ColumnOptions,
    progress: Progress,
) -> Iterator[FieldChunk]:  # fmt: skip
    """The rows of an archive of equally long arrays, all at once."""
    arrays = members(file)
    names = columns_of(repr(str(file)), list(arrays), user_column, fields)
    options.check_columns(names)
    check_length_fields(names, options)
    made: dict[str, Field] = {}
    for name in names:
        made |= _fields_of_member(name, arrays[name], text, options)
    yield arrays[user_column], made
    progress(file.stat().st_size, file.stat().st_size)


def _npz_schema(file: Path) -> Any:
    """The arrays of an archive as an Arrow schema; what has no place in a column is null."""
    import pyarrow as pa

    def kind(array: NDArray[Any]) -> Any:
        if array.dtype.kind in "US":
            return pa.string()
        known = array.dtype.kind in "fiubM" and array.ndim == 1
        return pa.from_numpy_dtype(array.dtype.newbyteorder("=")) if known else pa.null()

    return pa.schema([(name, kind(array)) for name, array in members(file).items()])


def members(file: Path) -> dict[str, NDArray[Any]]:
    """All arrays of an archive by name."""
    try:
        with np.load(file) as archive:
            if (size := sum(member.file_size for member in archive.zip.infolist())) > NPZ_BYTES:
                raise ValueError(f"it unpacks to {size} bytes, the limit is {NPZ_BYTES}")
            arrays = dict(archive.items())
        if odd := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
            raise ValueError(f"{odd[0]!r} is no array")
        return arrays
    except Exception as error:  # NumPy reads a header as Python code, and fails in as many ways
        raise PopulationError(
            f"{str(file)!r} cannot be read as NPZ ({short(error)}): save it again, or give Population.from_arrays its "
            "arrays"
        ) from None


def _fields_of_member(name: str, array: NDArray[Any], text: Text | None, options: ColumnOptions) -> dict[str, Field]:
    made: dict[str, Field]
    if text is not None and array.dtype.kind == "U" and name not in options.categories:
        values = text(array.tolist())
        made = list_fields(name, list(values), options) if name in options.lengths else {name: np.asarray(values)}
    elif name in options.lengths:
        made = list_fields(name, array, options)
    else:
        made = {name: options.applied(name, array)}
    return {field: options.scaled(field, values) for field, values in made.items()}
