"""`clipline data`: what is known, how to get it, and how to bring your own."""

from __future__ import annotations

import csv
import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import registry
from ..console import Stages, say
from ..errors import PopulationError, SettingError, refuse
from .parser import JSON, PATH, Argument, Command, Group, Option
from .tasks import state_in_words

if TYPE_CHECKING:
    from ..data.manifest import Manifest


def list_data(where: Path | None, as_json: bool) -> None:
    """Say which data sets are known, which are present, and how to get them."""
    from ..data.task_stores import data_home, data_sets, data_state
    from ..tasks import task_entries

    folder = data_home() if where is None else where
    prepared = _prepared(folder)
    answer: dict[str, dict[str, Any]] = {}
    entries = task_entries()
    for name, known in data_sets().items():
        facts = known.facts()
        answer[name] = {
            **facts,
            "tasks": list(known.tasks),
            "files": [str(folder / file) for file in facts["files"] if (folder / file).is_file()],
            "prepared": [place for place, tasks in prepared.items() if set(tasks) & set(known.tasks)],
            "state": {task: data_state(task, entries[task].data, folder) for task in known.tasks if task in entries},
        }
    if as_json:
        print(json.dumps(answer))
        return
    for name, entry in answer.items():
        train = entry["splits"]["train"]
        say(f"{name}: {entry['what']} ({train['users']:,} users, {train['examples']:,} examples)")
        for task, state in entry["state"].items():
            say(f"  for      {task}: {state_in_words(state, entries[task].stand_in_users)}")
        say(f"  present  {', '.join([*entry['files'], *entry['prepared']]) or f'nothing in {folder}'}")
        say(f"  get it   clipline data fetch {name} --to {folder}")
        say(f"  by hand  {entry['by_hand']}")
    say("table: your own Parquet, CSV, JSONL or NPZ\n  prepare  clipline data prepare table --from FILE --to DIR")


def prepare_data(
    name: str,
    source: Path,
    target: Path,
    user_column: str | None,
    fields: tuple[str, ...],
    missing: str | None,
    fill: tuple[str, ...],
    categories: tuple[str, ...],
    timestamps: tuple[str, ...],
    lengths: tuple[str, ...],
    pad: str | None,
    split: str | None,
    words: Path | None,
    tags: Path | None,
    as_json: bool,
) -> None:
    """Turn a file into a store grouped by user, however large it is.

    Of a known data set, the stores DIR/train and DIR/test, for clipline train TASK --data DIR.

    clipline data prepare table --from posts.parquet --to posts --user-column author

    Flags on columns may be given several times. What they say is stored with the data, and applied to new tables when a
    model trained on them predicts.
    """
    from ..data.column_options import NO_OPTIONS, ColumnOptions
    from ..data.store import prepare_table
    from ..data.task_stores import TABLE, data_set

    begun = time.perf_counter()
    columns = [column.strip() for given in fields for column in given.split(",") if column.strip()] if fields else None
    with _in_flags():
        options = ColumnOptions.of(_column_options(missing, fill, categories, timestamps, lengths, pad))
    known = None if name == TABLE else data_set(name, TABLE)
    if known is not None and (columns is not None or options != NO_OPTIONS):
        raise SettingError(f"fields and column options must be left out for {name!r}: its tasks say what they read")
    if known is None and user_column is None:
        raise SettingError(
            f"user_column is missing for {str(source)!r}: give --user-column, the column that says whose row it is"
        )
    lists = {flag: path for flag, path in (("words", words), ("tags", tags)) if path is not None}
    with _terminated_cleanly(), Stages() as progress, _in_flags():
        if known is None:
            made = {".": prepare_table(source, target, str(user_column), fields=columns, options=options,
                                       progress=progress.show)}  # fmt: skip
        else:
            made = dict(known.prepare(name, source, target, split=split, lists=lists, progress=progress.show))
    seconds = time.perf_counter() - begun
    reports = {}
    for part, manifest in made.items():
        folder = target / part
        size = sum(path.stat().st_size for path in folder.iterdir())
        reports[part] = {**asdict(manifest), "folder": str(folder), "bytes": size, "seconds": round(seconds, 3)}
        if not as_json:
            say(
                f"{folder}: {manifest.users:,} users, {manifest.examples:,} examples of {', '.join(manifest.fields)} "
                f"({size / 1e6:,.1f} MB in {seconds:.1f} s); source: {manifest.source}"
            )
    if as_json:
        print(json.dumps(reports["."] if "." in reports else {"folder": str(target), **reports}))
    elif known is not None and "." not in made:
        say(f"train on it: clipline train {next(iter(made.values())).tasks[0]} --data {target}")
        _compare(known.facts()["splits"], made)


def _column_options(
    missing: str | None, fill: Sequence[str], categories: Sequence[str], timestamps: Sequence[str],
    lengths: Sequence[str], pad: str | None,
) -> dict[str, Any]:  # fmt: skip
    """The options as Python has them, of flags such as --fill age=40; those that were not given are left out."""
    given = {
        "missing": _number_or_word(missing),
        "fill": {column: _number_or_word(value) for column, value in _by_column("fill", fill, "age=40")},
        "categories": {
            column: _listed(values) for column, values in _by_column("categories", categories, "city=Bern,Rome")
        },
        "timestamps": dict(_by_column("timestamps", timestamps, '"start=hours since 2026-01-01"')),
        "lengths": {column: _number_or_word(width) for column, width in _by_column("lengths", lengths, "tokens=128")},
        "pad": _number_or_word(pad),
    }
    return {name: value for name, value in given.items() if value not in (None, {})}


def _by_column(flag: str, given: Sequence[str], example: str) -> Iterator[tuple[str, str]]:
    """Column and value of each COLUMN=VALUE; one that comes twice is refused."""
    known = set()
    for one in given:
        column, equals, value = one.partition("=")
        if not equals or not column.strip() or not value.strip():
            raise refuse(f"--{flag}", one, "COLUMN=VALUE", f"give --{flag} {example}")
        if (column := column.strip()) in known:
            raise refuse(f"--{flag}", one, f"given once for {column!r}", "leave all but one out")
        known.add(column)
        yield column, value.strip()


def _listed(values: str) -> list[str] | list[int]:
    """A,B,C as a list of text, or of whole numbers if all are written as such: 007 is text. Quotes keep a comma."""
    (words,) = csv.reader([values], skipinitialspace=True)
    whole = all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", word.strip()) for word in words)
    return [int(word) for word in words] if whole else [word.strip() for word in words]


def _number_or_word(given: str | None) -> float | str | None:
    """A number if it is one, whole if it is written so."""
    for kind in (int, float):
        try:
            return given if given is None else kind(given)
        except ValueError:
            continue
    return given


def _compare(splits: Mapping[str, Any], made: Mapping[str, Manifest]) -> None:
    """Print a note where a split has another number of users than the published file, which may be a sample of it."""
    for split, manifest in made.items():
        published = splits[split]["users"]
        if manifest.users != published:
            say(f"note: {split} has {manifest.users:,} users where the published file has {published:,}")


def fetch_data(name: str, target: Path) -> None:
    """Download a known data set; the same command goes on with what was interrupted."""
    from ..data.task_stores import data_set

    known = data_set(name)
    if target.exists() and not target.is_dir():
        raise PopulationError(f"{str(target)!r} is a file: give a folder")
    with Stages() as progress:
        files = known.fetch(target, progress.show)
    for path, checked in files:
        told = "checksum right" if checked else "no checksum is published"
        say(f"{path}: {path.stat().st_size / 1e6:,.1f} MB, {told}")


def _prepared(folder: Path) -> dict[str, list[str]]:
    """The stores in a folder, up to two levels down, and the tasks that each is for."""
    from ..data.manifest import MANIFEST, read_manifest

    found = {}
    for depth in ("", "*/", "*/*/"):
        for path in sorted(folder.glob(depth + MANIFEST)):
            with suppress(PopulationError):  # no store of ours, or a damaged one: `state` has the reason
                found[str(path.parent)] = read_manifest(path.parent).tasks
    return found


# An option of columns in an error: fill={'age': 0}, fill['age']='x', missing=0, or `fill names 'aeg'`.
_OPTION = re.compile(
    r"""(?<![-\w])(fill|categories|timestamps|lengths|missing|pad)"""
    r"""(?:=\{'?([^:{}]+?)'?: ([^{}]+)\}|=("[^"]*"|'[^']*'|[\w.-]+)|\['([^']+)'\]=|(?= names '))"""
)


@contextmanager
def _in_flags() -> Iterator[None]:
    """Turn options of columns in errors, which readers call as Python does, into flags: --fill age=0."""
    try:
        yield
    except (PopulationError, SettingError) as error:
        said = _OPTION.sub(_as_flag, str(error))
        ways: dict[str, dict[str, Any]] = getattr(error, "ways", {})  # of several columns: all flags at once
        given = [
            (option, f"{name}={','.join(value) if isinstance(value, list) else value}")
            for option, columns in ways.items()
            for name, value in columns.items()
        ]
        if given:
            said += "\nall at once: " + " ".join(f"--{option} {shlex.quote(value)}" for option, value in given)
        raise type(error)(said) from error.__cause__


def _as_flag(found: re.Match[str]) -> str:
    option, column, value, plain, refused = found.groups()
    if plain is not None:
        return "--" + option + " " + plain.strip('"')
    if column is None:
        return f"--{option}" + (f" {refused}=" if refused else "")
    shown = "A,B,..." if option == "categories" else value.strip('"')
    named = f"{column.upper() if column in ('column', 'field') else column}={shown}"
    return f'--{option} "{named}"' if " " in named else f"--{option} {named}"


@contextmanager
def _terminated_cleanly() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that temporary files are removed."""

    def stop(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_NAME = ", ".join([*registry.names("data_sets"), "a task that reads one of these"])
_in = Option(["--in", "where"], type=PATH, unset="CLIPLINE_DATA or clipline-data", help="The folder to look in.")
_column = partial(Option, multiple=True)
list_command = Command("list", list_data, [_in, JSON])
prepare_command = Command(
    "prepare",
    prepare_data,
    [
        Argument(["name"], help=f"{_NAME}; or table, for your own."),
        Option(["--from", "source"], type=PATH, required=True, help="The file, or a folder with the original files."),
        Option(["--to", "target"], type=PATH, required=True, help="The folder to write; new or empty."),
        Option(["--user-column"], metavar="TEXT", help="The column that says whose row it is."),
        _column(["--fields"], metavar="TEXT", unset="all others", help="Columns to keep, as a,b."),
        Option(
            ["--missing"], metavar="NUMBER", unset="gaps are refused",
            help="A number for gaps; or zero-update: their users contribute nothing.",
        ),
        _column(["--fill"], metavar="COLUMN=NUMBER", help="For gaps of one column, as age=40; goes before --missing."),
        _column(
            ["--categories"], metavar="COLUMN=A,B,...",
            help="Codes 0, 1, ... for these values of a column, and the next for all others, as city=Bern,Rome.",
        ),
        _column(["--timestamps"], metavar="COLUMN=UNITS", help='What to count, as "start=hours since 2026-01-01".'),
        _column(
            ["--lengths"], metavar="COLUMN=N",
            help="The width to which lists of a column are cut or filled, as tokens=128; adds tokens_length.",
        ),
        Option(["--pad"], metavar="NUMBER", unset="0", help="What fills lists that are shorter."),
        Option(["--split"], metavar="TEXT", help="Only this one, straight into DIR: train, test, or a data set's own."),
        Option(["--words"], type=PATH, help="stackoverflow.word_count, if it is not beside the examples."),
        Option(["--tags"], type=PATH, help="stackoverflow.tag_count, if it is not beside the examples."),
        JSON,
    ],
)  # fmt: skip
fetch_command = Command(
    "fetch",
    fetch_data,
    [
        Argument(["name"], help=f"{_NAME}."),
        Option(["--to", "target"], type=PATH, required=True, help="The folder to download into."),
    ],
)
command = Group(
    "data",
    help="List, fetch and prepare data.",
    modules={"list": ".data:list_command", "prepare": ".data:prepare_command", "fetch": ".data:fetch_command"},
)
