"""Tables with a user column, read a chunk at a time: Parquet, CSV and JSONL (also compressed), NPZ."""

from __future__ import annotations

import io
import json
import lzma
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import PopulationError
from ..chunks import CHUNK_BYTES, FieldChunk, Progress, Text, columns_of, existing_file, no_progress, short
from ..column_options import NO_OPTIONS, ColumnOptions
from ..sequences import check_length_fields
from .arrow_columns import DEEPEST, arrow_chunk, validated
from .npz import read_npz

_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".xz": "xz"}
_KINDS = (".parquet", ".csv", ".tsv", ".jsonl", ".npz")
_SEPARATORS = (b",", b";", b"\t")  # of CSV, the usual one first
_DECIMAL_COMMA = r"^\s*[-+]?\d+,\d+\s*$"
_NO_MARK = bytes(set(range(256)) - set(b'[]{}"'))
_QUOTED = rb'"[^"]*+(?:""[^"]*+)*+"'  # a value of CSV, where it stands at the start of a cell
_LONGEST = 64 << 20  # bytes of a row with quotes: one that is longer lacks a closing quote
_OBJECT = re.compile(rb"(?:\xef\xbb\xbf)?\s*\{")
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
        read = _parquet if kind == ".parquet" else read_npz
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
                read = _rows if kind == ".csv" else _objects
                rows = read(stream, {*options.as_text(), *as_text}, file)
                if batches := list(rows):
                    return pa.Table.from_batches(batches)
                raise PopulationError(f"{str(file)!r} has no rows: give a table with examples")
    except (pa.ArrowException, OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise PopulationError(f"{str(file)!r} cannot be read ({short(error)}): mend it or copy it again") from None
    raise PopulationError(f"{str(file)!r} is no table that can be read at once: {_WAY_OUT}")


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
            groups = (table.metadata.row_group(i).total_byte_size for i in range(table.num_row_groups))
            width = sum(groups) // max(total, 1) + 8 * sum(options.lengths.values())
            at_once = max(1, min(65536, CHUNK_BYTES // max(width, 1)))
            for batch in table.iter_batches(at_once, columns=[user_column, *names], use_threads=False):
                part = validated(batch, [user_column, *names])
                yield arrow_chunk(repr(str(file)), part, user_column, names, text, options, rows)
                rows += batch.num_rows
                progress(size * rows // max(total, 1), size)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise PopulationError(f"{str(file)!r} cannot be read as Parquet ({short(error)}): copy it again") from None


def _lines(
    file: Path, kind: str, codec: str | None, user_column: str, fields: Sequence[str] | None, text: Text | None,
    options: ColumnOptions, progress: Progress,
) -> Iterator[FieldChunk]:  # fmt: skip
    import pyarrow as pa

    size, rows = file.stat().st_size, 0
    try:
        with ExitStack() as stack:
            raw = _Counted(stack.enter_context(file.open("rb")))
            stream = stack.enter_context(_opened(raw, codec))
            as_text = {user_column, *options.as_text()}
            every_key = fields is None
            batches = _rows(stream, as_text, file) if kind == ".csv" else _objects(stream, as_text, file, every_key)
            names: list[str] | None = None
            for batch in batches:
                if names is None:
                    names = columns_of(repr(str(file)), batch.schema.names, user_column, fields)
                    options.check_columns(names)
                    check_length_fields(names, options)
                batch = validated(batch, [user_column, *names])
                at_once = max(1, CHUNK_BYTES // (8 * sum(options.lengths.values()) or 1))  # as wide as lists may be
                for part in (batch.slice(start, at_once) for start in range(0, batch.num_rows, at_once)):
                    yield arrow_chunk(repr(str(file)), part, user_column, names, text, options, rows)
                    rows += part.num_rows
                progress(raw.done, size)
    except (pa.ArrowException, OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        where = _damaged_line(file, codec) if kind == ".jsonl" else ""
        raise PopulationError(
            f"{str(file)!r} cannot be read{where} ({short(error)}): mend it or copy it again"
        ) from None


def _blocks(stream: Any, cut: Callable[[bytes], int]) -> Iterator[bytes]:
    """A stream some lines at a time, about a chunk each; `cut` says how much of some bytes are whole lines.

    Arrow's own streaming readers read ahead without a limit, so memory would grow with a slow consumer.
    """
    rest, block = b"", b"-"
    while block:
        block = stream.read(CHUNK_BYTES)
        data = rest + block
        end = cut(data if block else data + b"\n")
        lines, rest = data[:end], data[end:]
        if lines.strip():
            yield lines
    if rest:
        raise _open_quote()


def _objects_end(data: bytes) -> int:
    return data.rfind(b"\n") + 1


def _rows_end(data: bytes, delimiter: str) -> int:
    """Where the last whole row of CSV ends, in CR, LF or both; line ends inside quoted values belong to them.

    As for Arrow and Python, a quote opens a value only at the start of a cell; anywhere else it is a character.
    """
    if b'"' not in data:
        return max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    at = delimiter.encode()
    # A quote at the end may be the first of two, so it closes nothing yet. Nothing is ever matched twice.
    cell = rb'(?:%b(?!\Z)|(?!"))[^%b\r\n]*+' % (_QUOTED, at)
    rows = re.match(rb"(?:\xef\xbb\xbf)?(?:%b(?:%b%b)*+[\r\n])++" % (cell, at, cell), data)
    end = rows.end() if rows else 0
    if len(data) - end > _LONGEST and re.compile(rb"[\r\n]").search(data, end):
        raise _open_quote()
    return end


def _open_quote() -> Exception:
    import pyarrow as pa

    error: Exception = pa.ArrowInvalid("a quote opens a value of CSV and is never closed")
    return error


def separator(lines: bytes) -> str:
    """What separates the columns of a CSV file that begins so: a comma, a semicolon or a tab, as its header has it."""
    header = re.sub(rb"(?<![^,;\t\r\n\xbf])%b?" % _QUOTED, b"", lines[: 1 << 16])
    header = header.lstrip(b"\r\n").split(b"\n")[0].split(b"\r")[0]
    return max(_SEPARATORS, key=header.count).decode()  # the first of equals


def _check_points(table: Any, as_text: set[str], file: Path) -> None:
    """Refuse columns of numbers with decimal commas: Arrow takes them for text, and 1,234 may mean two numbers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for name, column in zip(table.schema.names, table.columns, strict=True):
        if name in as_text or not pa.types.is_string(column.type):
            continue
        values = column.drop_null()
        if len(values) and pc.all(pc.match_substring_regex(values, _DECIMAL_COMMA)).as_py():
            raise PopulationError(
                f"{str(file)!r} has numbers with a decimal comma in {name!r}, which are read as text: write them "
                "with a point, as with pandas.read_csv(..., decimal=',') and to_csv"
            )


def _rows(stream: Any, as_text: set[str], file: Path) -> Iterator[Any]:
    """Batches of a CSV stream. The first block says what the columns are and of which type, but for those of text."""
    import pyarrow as pa
    import pyarrow.csv

    types: Any = dict.fromkeys(as_text, pa.string())  # 007 and 7 are two users, and two categories
    names, before, delimiter = None, 0, ""

    def whole_rows(data: bytes) -> int:
        return _rows_end(data, delimiter or separator(data))

    for lines in _blocks(stream, whole_rows):
        delimiter = delimiter or separator(lines)
        whole = pyarrow.csv.ReadOptions(use_threads=False, block_size=len(lines) + 1, column_names=names)
        lined = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        typed = pyarrow.csv.ConvertOptions(column_types=types)
        try:
            table = pyarrow.csv.read_csv(pa.BufferReader(lines), whole, lined, typed)
        except pa.ArrowInvalid as error:
            message = _from_the_top(str(error), before)
            found = re.search(r"CSV column #(\d+): Row #(\d+): .*: invalid value", message)
            if found and names:  # the first block has said its type
                raise _mixed(file, names[int(found[1])], f"line {found[2]}") from None
            raise pa.ArrowInvalid(message) from None
        if names is None:
            _check_points(table, as_text, file)
        before += table.num_rows + (names is None)  # the first line names the columns
        names, types = table.schema.names, table.schema if table.num_rows else types
        yield from table.combine_chunks().to_batches()


def _from_the_top(message: str, before: int) -> str:
    """Arrow's message with the row counted from the top of the file, not of the block."""
    return re.sub(r"Row #(\d+)", lambda row: f"Row #{before + int(row[1])}", message)


def _objects(stream: Any, as_text: set[str], file: Path, every_key: bool = False) -> Iterator[Any]:
    """Batches of a JSONL stream. The first block says what the columns are and of which type.

    A key that only later blocks have is ignored, or refused with `every_key`.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    schema, before = None, 0
    for lines in _blocks(stream, _objects_end):
        # Two things would crash the process inside Arrow: a first value of null, which it takes for an object, and
        # thousands of nested brackets, on which its parser recurses.
        if not _OBJECT.match(lines):
            raise pa.ArrowInvalid("it holds no JSON object")
        if _too_deep(lines):
            raise PopulationError(
                f"{str(file)!r} has brackets nested more than {DEEPEST} deep: flatten them into fewer lists"
            )
        try:
            # While Arrow infers what a list holds, it loses nulls at its beginning and shifts all later rows
            # (apache/arrow#51305): what it infers is only a schema to read by.
            schema = schema or _explicit(_read_objects(lines).schema, as_text)
            table = _read_objects(lines, schema, "error" if every_key else "ignore")
        except pa.ArrowInvalid as error:
            raise _another_type(file, str(error), lines, schema, before) from None
        for name in as_text.intersection(table.schema.names):
            if pa.types.is_float64(table.schema.field(name).type) and (pc.max(table[name]).as_py() or 0) >= 1 << 63:
                raise PopulationError(
                    f"{str(file)!r} has whole numbers of 2^63 or more in {name!r}, which would lose digits: write them "
                    "as text, in quotes"
                )
        before += table.num_rows
        yield from table.combine_chunks().to_batches()


def _read_objects(lines: bytes, schema: Any = None, others: str = "infer") -> Any:
    import pyarrow as pa
    import pyarrow.json

    whole = pyarrow.json.ReadOptions(use_threads=False, block_size=len(lines) + 1)
    typed = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others)
    return pyarrow.json.read_json(pa.BufferReader(lines), read_options=whole, parse_options=typed)


def _explicit(inferred: Any, as_text: set[str]) -> Any:
    """A schema to read by: lists of nothing but nulls are lists of floats, and dates stay text where asked."""
    import pyarrow as pa

    def filled(kind: Any) -> Any:
        if not pa.types.is_list(kind):
            return kind
        return pa.list_(pa.float64() if pa.types.is_null(kind.value_type) else filled(kind.value_type))

    def of(one: Any) -> Any:
        return pa.string() if one.name in as_text and pa.types.is_timestamp(one.type) else filled(one.type)

    return pa.schema([(one.name, of(one)) for one in inferred])


def _another_type(file: Path, message: str, lines: bytes, schema: Any, before: int) -> Exception:
    """Arrow's error as ours, where a column is new or of two types: with its name, and the row if Arrow has it."""
    import pyarrow as pa

    if "unexpected field" in message:
        new = [name for name in _read_objects(lines).schema.names if name not in schema.names]
        return PopulationError(
            f"{str(file)!r} has {', '.join(map(repr, new)) or 'a key inside an object'} in a row after {before}, but "
            "not in the rows before: give it a value in the first row, leave it out (fields=...) or convert to Parquet"
        )
    if found := re.search(r"Column\(/([^/)]*)\S* changed from \w+ to \w+ in row (\d+)", message):
        return _mixed(file, found[1], f"row {before + int(found[2]) + 1}")
    if "Failed to convert JSON to" in message and schema is not None:
        for one in _explicit(_read_objects(lines).schema, set(schema.names)):
            if one.name in schema.names and schema.field(one.name).type != one.type:
                return _mixed(file, one.name, f"a row after {before}")
    known: Exception = pa.ArrowInvalid(message)
    return known


def _mixed(file: Path, column: str, where: str) -> PopulationError:
    return PopulationError(
        f"{str(file)!r} has a value in {column!r}, {where}, of another type than those before: mend it, or write all "
        "values as one type (1.0 for 1)"
    )


def _too_deep(lines: bytes) -> bool:
    """Whether brackets of JSON are nested more than `DEEPEST` deep; fast, as every line is looked at."""
    plain = re.sub(rb"\\.", b"", lines, flags=re.DOTALL) if b"\\" in lines else lines
    marks = plain.translate(None, _NO_MARK).replace(b'""', b"")
    if b'"' in marks:  # texts with brackets in them, which do not nest
        marks = re.sub(rb'"[^"]*"', b"", marks)
    rest = marks
    for _ in range(DEEPEST // 2):  # each pass removes the innermost level, or two
        if not rest:
            return False
        rest = rest.replace(b"[]", b"").replace(b"{}", b"")
    brackets = np.frombuffer(marks, np.uint8)
    depths = np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1).cumsum()
    return int(depths.max(initial=0)) > DEEPEST


class _Counted(io.RawIOBase):
    """A file that counts the bytes read from it, also where Arrow decompresses it."""

    def __init__(self, file: io.BufferedReader) -> None:
        self.file, self.done = file, 0

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes and count them."""
        count = self.file.readinto(buffer)
        self.done += count
        return count


def _opened(raw: Any, codec: str | None) -> Any:
    """A stream of Arrow over a file that may be compressed."""
    import pyarrow as pa

    if codec == "xz":  # which Arrow cannot decompress
        return pa.PythonFile(lzma.LZMAFile(raw), mode="r")
    plain = pa.PythonFile(raw, mode="r")
    return plain if codec is None else pa.CompressedInputStream(plain, codec)


def _damaged_line(file: Path, codec: str | None) -> str:
    """Where the first line that is no JSON object stands, in words: Arrow counts within its own blocks only."""
    number = 0
    try:
        with file.open("rb") as raw, _opened(raw, codec) as stream:
            rest = b""
            while True:
                block = stream.read(CHUNK_BYTES)
                *lines, rest = (rest + block).split(b"\n") if block else (rest, b"")
                for line in lines:
                    number += 1
                    if line.strip() and not isinstance(json.loads(line), dict):
                        return f" in line {number}"
                if not block:
                    return ""
    except (ValueError, RecursionError):
        return f" in line {number}"
    except (OSError, EOFError, lzma.LZMAError):
        return f" after line {number}"
