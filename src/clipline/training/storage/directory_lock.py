"""One process at a time in a run directory."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from multiprocessing.util import register_after_fork
from pathlib import Path
from types import TracebackType

from ...errors import RunError

try:
    import fcntl
except ImportError:  # as on Windows
    fcntl = None  # type: ignore[assignment]


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
