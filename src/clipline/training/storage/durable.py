"""Files that outlast a power cut: what is written is synced to disk before anything else goes by it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO

from ...errors import RunError

_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)  # of a file system that syncs no folders


def sync(file: IO[str] | IO[bytes], path: Path) -> None:
    """Have an open file on disk. A failure ends the run: what was written may be lost, however often one tries."""
    file.flush()
    try:
        getattr(os, "fdatasync", os.fsync)(file.fileno())  # macOS and Windows have no fdatasync
    except OSError as error:
        raise _failed(path, error) from error


def sync_file(path: Path) -> None:
    """Have a file on disk that somebody else wrote."""
    with path.open("r+b") as file:
        sync(file, path)


def sync_folder(path: Path) -> None:
    """Have the names of a folder's files on disk, where the system can: Windows opens no folder."""
    if os.name == "nt":
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise _failed(path, error) from error


def make_folder(path: Path) -> None:
    """Make a folder and those above it, and have all of their names on disk."""
    whole = path.absolute()
    made = [one for one in (whole, *whole.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in made or [whole]:
        sync_folder(one.parent)


def append(path: Path, text: str) -> None:
    """Add to the end of a file; it is on disk when this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        sync(file, path)


def write(path: Path, text: str, mode: int = 0o666) -> None:
    """Write all of a file at once: a crash leaves the old one or the new one."""
    unfinished = partial_path(path)
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
        file.write(text)
        sync(file, path)
    put(unfinished, path)


def put(unfinished: Path, path: Path) -> None:
    """Give a file that is on disk its name, and have the name there too."""
    unfinished.replace(path)
    sync_folder(path.parent)


def partial_path(path: Path) -> Path:
    """Where a file is written before it gets its name: what a cut leaves there is as private as the file itself."""
    return path.with_name(path.name + ".partial")


def _failed(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{str(path)!r} could not be synced to disk ({error.strerror or error}), so a power cut could lose it: check "
        "the disk and make room, then resume the run"
    )
