"""The manifest of a stored population, `population.json`: its one format, its one writer, its readers and its check.

A store is a folder of `.npy` files, `offsets`, `user_ids` (if users have ids) and `field.NAME`, beside the manifest. A
field of lists is two files instead, `values.NAME` and `offsets.NAME`, and an entry in `packed`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from numpy.typing import NDArray

from .. import __version__
from ..errors import PopulationError, regular
from .chunks import is_file

MANIFEST = "population.json"
VERSION = 1
PACKED_VERSION = 2  # of a store with packed fields
_LONGEST = 200  # bytes of a field's name, which names files
WAY_OUT = "prepare or save the data again"

# "original": the files of the paper; "substitute": other real data in their place; "own": the user's own data.
Origin = Literal["original", "substitute", "own"]


@dataclass(frozen=True)
class Manifest:
    """The content of `population.json`: what the store holds, where it came from, and a checksum of every file."""

    version: int
    fields: list[str]
    user_ids: bool
    users: int
    examples: int
    source: str
    made_by: str
    sha256: dict[str, str]  # file name -> checksum
    tasks: list[str] = field(default_factory=list)  # which can read it; a table's fields belong to none
    origin: Origin = "own"
    shared_users: bool = False  # whether users of the train store are users of the test store too
    column_options: dict[str, Any] = field(default_factory=dict)  # how columns became fields: `ColumnOptions`
    charges: list[dict[str, Any]] = field(default_factory=list)  # private statistics they were made by: `GaussianEvent`
    example_level: bool = False  # whether every user is one example: `Population.one_each`
    packed: dict[str, dict[str, Any]] = field(default_factory=dict)  # of fields of lists: width and pad


def write_manifest(folder: Path, *, packed: Mapping[str, dict[str, Any]] | None = None, **entries: Any) -> Manifest:
    """Write the manifest of a store whose other files are all there, with a checksum of each. `entries`: `Manifest`.

    Call it last: a folder that has a manifest is complete.
    """
    check_field_names(entries["fields"])
    manifest = Manifest(
        version=PACKED_VERSION if packed else VERSION,
        made_by=f"clipline {__version__}",
        sha256={path.name: sha256(path) for path in sorted(folder.iterdir())},
        packed=dict(packed or {}),
        **entries,
    )
    written = asdict(manifest)
    if not packed:  # so that versions that know no packed fields can read it
        del written["packed"]
    (folder / MANIFEST).write_text(json.dumps(written, indent=1), encoding="utf-8")
    return manifest


def packed_entry(width: int, pad: NDArray[Any]) -> dict[str, Any]:
    """What the manifest says of a packed field; a pad is real, also of complex values."""
    return {"width": width, "pad": pad.real.item()}


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a store, checked."""
    entries, path = read_entries(folder), Path(folder) / MANIFEST
    if entries.get("version") not in (VERSION, PACKED_VERSION):
        raise PopulationError(
            f"{str(folder)!r} has version {entries.get('version')!r} but this clipline reads {VERSION} and "
            f"{PACKED_VERSION}: {WAY_OUT}"
        )
    try:
        return _checked(entries)
    except (ValueError, TypeError) as error:
        raise PopulationError(
            f"{str(path)!r} is no manifest with checksums ({error}): prepare the data again"
        ) from None


def read_entries(folder: str | Path) -> dict[str, Any]:
    """The entries of a manifest as they stand in the file, for the caller to check.

    A file that is missing, unreadable or no JSON object is refused.
    """
    path = Path(folder) / MANIFEST
    try:
        entries = json.loads(regular(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise PopulationError(
            f"{str(folder)!r} holds no {MANIFEST}: give a folder made by clipline data prepare or Population.save"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise PopulationError(f"{str(path)!r} is damaged ({error}): {WAY_OUT}") from None
    if not isinstance(entries, dict):
        raise PopulationError(f"{str(path)!r} is damaged (it holds no JSON object): {WAY_OUT}")
    return entries


def check_field_names(names: Iterable[object]) -> list[str]:
    """Names of fields, each of which names a file too; refused where one cannot, or where two are the same."""
    known: dict[str, None] = {}
    for name in names:
        # A name with a separator would lead out of the store's folder.
        if (
            not isinstance(name, str)
            or name != Path(name).name
            or not re.fullmatch(r"[^\0\ud800-\udfff]+", name)  # nor a lone surrogate
            or len(name.encode()) > _LONGEST
        ):
            shown = name if not isinstance(name, str) else name[:80]
            raise PopulationError(
                f"field {shown!r} cannot name a file: rename it to letters and digits, at most {_LONGEST}"
            )
        if name in known:
            raise PopulationError(f"field {name!r} comes twice: give every field a name of its own")
        known[name] = None
    return list(known)


def verify_store(folder: str | Path, *, largest: int | None = None) -> Manifest:
    """Read every file of a store again and compare its checksum with the manifest; raise for the first that differs.

    Files of more than `largest` bytes have to be there and are not read.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest.sha256.items():
        path = Path(folder) / name
        if not is_file(path):
            raise PopulationError(f"{str(path)!r} is missing: prepare the data again")
        if largest is not None and path.stat().st_size > largest:
            continue
        if (found := sha256(path)) != expected:
            raise PopulationError(
                f"{str(path)!r} has checksum {found[:12]}... but the manifest says {expected[:12]}...: "
                "the file was altered or damaged, prepare the data again"
            )
    return manifest


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checked(content: Any) -> Manifest:
    """The manifest with these entries; ValueError or TypeError where one is missing, unknown or of another type."""
    manifest = Manifest(**content)
    for name, kind in get_type_hints(Manifest).items():
        value, wanted = getattr(manifest, name), get_origin(kind) or kind
        if type(value) is not (str if wanted is Literal else wanted):
            raise ValueError(f"{name} is {value!r}")
    check_field_names(manifest.fields)
    if not all(isinstance(task, str) for task in manifest.tasks):
        raise ValueError(f"tasks is {manifest.tasks!r}")
    for name, checksum in manifest.sha256.items():
        if not isinstance(checksum, str) or name != Path(name).name:
            raise ValueError(f"sha256 of {name[:80]!r} is {checksum!r:.80}")
    if manifest.origin not in get_args(Origin):
        raise ValueError(f"origin is {manifest.origin!r}")
    return manifest
