"""Claims on runs: one process at a time makes a run, and a claim ends with its process."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.util import register_after_fork
from pathlib import Path
from types import TracebackType

try:
    import fcntl
except ImportError:  # as on Windows
    fcntl = None  # type: ignore[assignment]


class UnclaimedWarning(UserWarning):
    """Runs cannot be claimed here: nothing keeps two processes from making the same run."""


class Claims:
    """Runs that this process alone is to make, until they are released.

    The system holds each claim as a lock on the file `<id>.lock`, and frees it when the process ends, however it ends.
    The file itself is deleted on release and means nothing by itself. Processes that multiprocessing forks, as workers
    are, drop the claims when they begin: else they would hold them after their parent was killed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}  # id -> descriptor
        register_after_fork(self, Claims._forget)

    @property
    def ids(self) -> list[str]:
        """What is claimed now, in the order of claiming."""
        return list(self._held)

    def take(self, run: str) -> bool:
        """Claim this run; False if another process, or another object of this one, has it."""
        if run in self._held:
            return True
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(self._folder / f"{run}.lock")
        if descriptor is None:
            return False
        self._held[run] = descriptor
        return True

    def release(self, runs: Iterable[str] | None = None) -> None:
        """Let others have these runs, or all."""
        for run in self.ids if runs is None else list(runs):
            descriptor = self._held.pop(run, None)
            if descriptor is not None:
                with suppress(OSError):
                    (self._folder / f"{run}.lock").unlink()  # while it is held: see `_lock`
                os.close(descriptor)

    def __enter__(self) -> Claims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _forget(self) -> None:
        for descriptor in self._held.values():
            with suppress(OSError):
                os.close(descriptor)
        self._held.clear()


def claimed_elsewhere(folder: Path) -> set[str]:
    """The runs that some process has claimed now. Looking takes each free lock for a moment."""
    found = set()
    for path in folder.glob("*.lock") if folder.is_dir() else ():
        descriptor = _lock(path, create=False)
        if descriptor is None:
            if path.exists():
                found.add(path.stem)
        else:
            os.close(descriptor)
    return found


def _lock(path: Path, *, create: bool = True) -> int | None:
    """The descriptor of the file, locked; None if another has it (or, with `create` False, if there is no file).

    Whoever releases a lock deletes its file first. So a file that was locked may be one that is no longer there, and
    others may lock a new one of its name: then try again.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666) if create else _opened(path)
        except FileNotFoundError:
            if not create:
                return None
            raise
        try:
            if fcntl is None:
                raise OSError("the system has no such locks")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            warnings.warn(
                f"runs in {str(path.parent)!r} cannot be claimed ({error}): start no second process in this study",
                UnclaimedWarning,
                stacklevel=3,
            )
            return descriptor
        try:
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)
        if not create:
            return None


def _opened(path: Path) -> int:
    """A descriptor of a file that is there: to read it alone where it is a colleague's, or the disk is read-only."""
    try:
        return os.open(path, os.O_RDWR)  # which some network drives need for a lock
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return os.open(path, os.O_RDONLY)
