"""What a prepared store says about itself, and whether it is still true."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from .errors import PopulationError

MANIFEST = "population.json"  # as Population.open reads it
VERSION = 1

# "original": the files of the paper; "substitute": other real data in their place; "own": somebody's table.
Origin = Literal["original", "substitute", "own"]
_KINDS: dict[str, type] = {
    "version": int, "fields": list, "user_ids": bool, "users": int, "examples": int, "source": str, "made_by": str,
    "sha256": dict, "tasks": list, "origin": str, "shared_users": bool,
}  # fmt: skip


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


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a store that `write_store` made."""
    path = Path(folder) / MANIFEST
    try:
        return _checked(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        raise PopulationError(f"{str(folder)!r} holds no {MANIFEST}: give a folder made by clipline data") from None
    except (ValueError, TypeError) as error:
        raise PopulationError(
            f"{str(path)!r} is no manifest with checksums ({error}): prepare the data again"
        ) from None


def verify_store(folder: str | Path, *, largest: int | None = None) -> Manifest:
    """Read every file of a store again and compare its checksum with the manifest; raise for the first that differs.

    Files of more than `largest` bytes have to be there and are not read.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest.sha256.items():
        path = Path(folder) / name
        if not path.is_file():
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
    """A manifest of which every entry has its type, so that what reads it need not look."""
    manifest = Manifest(**content)
    for entry in fields(manifest):
        value = getattr(manifest, entry.name)
        if type(value) is not _KINDS[entry.name]:
            raise ValueError(f"{entry.name} is {value!r}")
    if manifest.origin not in get_args(Origin):
        raise ValueError(f"origin is {manifest.origin!r}")
    return manifest
