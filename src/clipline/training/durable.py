"""Files that outlast a power cut, in folders that one process at a time writes into."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.util import register_after_fork
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

from ..errors import GO_ON, RunError, regular

if TYPE_CHECKING:
    from torch import Tensor

try:
    import fcntl
except ImportError:  # as on Windows
    fcntl = None  # type: ignore[assignment]

CHECKSUM = "checksum"  # of the metadata of a safetensors file
_BLANK = "0" * 64  # stands in its place while it is computed
_PLACE = f'"{CHECKSUM}":"'.encode()  # before it in the header; within a text the quotes would be escaped
_LONGEST_HEADER = 100_000_000  # of safetensors
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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which gets the name `path` at once on leaving: several processes may end at the same moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{secrets.token_hex(4)}.partial.{path.name}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def save_tensors(
    tensors: dict[str, Tensor],
    path: Path,
    metadata: dict[str, str],
    *,
    private: bool = False,
    keep_as: Path | None = None,
) -> None:
    """Write tensors as safetensors, whole and to disk, or not at all, with a checksum over tensors and metadata.

    If `private`, nobody else may read the file. The file that was there before gets the name `keep_as`.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    unfinished = partial_path(path)
    try:
        if private:
            unfinished.unlink(missing_ok=True)
            unfinished.touch(mode=0o600)
        save_file(tensors, unfinished, {**metadata, CHECKSUM: _BLANK})
        with unfinished.open("r+b") as file:
            place, _, checksum = _checksum(file)
            file.seek(place)
            file.write(checksum.encode())
            sync(file, unfinished)
        if keep_as is not None and path.exists():
            path.replace(keep_as)
        put(unfinished, path)
    except SafetensorError as error:  # as of a full disk
        raise RunError(f"{str(path)!r} cannot be written ({error}): make room, then save again, or {GO_ON}") from None


def damage(path: Path) -> str | None:
    """What is wrong with a file of `save_tensors`, by its checksum; None if it is whole.

    Raises:
      OSError: If it cannot be read.
    """
    with regular(path).open("rb") as file:
        _, noted, found = _checksum(file)
    if not noted:
        return "it has no checksum"
    return None if noted == found else "its checksum is that of other content"


def _checksum(file: IO[bytes]) -> tuple[int, str, str]:
    """Where the checksum of a file stands, what stands there, and SHA-256 of the file with zeros in that place."""
    length = int.from_bytes(file.read(8), "little")
    file.seek(0)
    head = bytearray(file.read(8 + min(length, _LONGEST_HEADER)))
    place = head.find(_PLACE) + len(_PLACE)
    if place < len(_PLACE):
        return 0, "", ""
    noted = head[place : place + len(_BLANK)].decode(errors="replace")
    head[place : place + len(_BLANK)] = _BLANK.encode()
    digest = hashlib.sha256(head)
    while part := file.read(1 << 20):
        digest.update(part)
    return place, noted, digest.hexdigest()


def partial_path(path: Path) -> Path:
    """Where a file is written before it gets its name: what a cut leaves there is as private as the file itself."""
    return path.with_name(path.name + ".partial")


def _failed(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{str(path)!r} could not be synced to disk ({error.strerror or error}), so a power cut could lose it: check "
        f"the disk and make room, then {GO_ON}"
    )


class UnlockedWarning(UserWarning):
    """A run directory could not be locked: nothing keeps a second process out."""


class DirectoryLock:
    """Keeps every other `DirectoryLock` out of an existing folder, of this process or another, until it is closed.

    The system holds the lock on the folder itself: no file is left behind, and a process that ends, however it ends,
    holds it no more. Processes that multiprocessing forks, as workers are, drop it when they begin: else they would
    hold it after their parent was killed. Where the system or the file system knows no such locks (Windows, some
    network drives) nothing is locked, and a warning says so.
    """

    def __init__(self, path: Path) -> None:
        self._close: Callable[[], object] = lambda: None
        if fcntl is None:
            _warn(path, "the system has no such locks")
            return
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            raise RunError(f"run directory {str(path)!r} does not exist or is no folder: give another") from None
        self._close = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RunError(
                f"run directory {str(path)!r} must be free, and another process is at work there: wait until it has "
                "ended, or stop it"
            ) from None
        except OSError as error:  # as on NFS, which locks no folders
            self.close()
            _warn(path, str(error))
            return
        register_after_fork(self, DirectoryLock.close)

    def close(self) -> None:
        """Let go of the folder. In a forked copy this closes the copy's share and leaves the lock with the parent."""
        self._close()

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _warn(path: Path, reason: str) -> None:
    warnings.warn(
        f"run directory {str(path)!r} cannot be locked ({reason}): start no second process in it",
        UnlockedWarning,
        stacklevel=3,
    )
