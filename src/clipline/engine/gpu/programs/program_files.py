"""A folder of compiled programs for later processes, of this user and on this machine alone.

A file is a program: it is run when it is read. So the folder is made for its owner alone, and is not used where another
user owns it or may write to it. A file that was cut off or changed on the disk is deleted, never run.

Plain twin: to compile anew.
Switch: `FastParts.stored_programs`.
Held equal by: tests/engine/gpu/programs/test_program_files.py, test_stored_programs.py.
Buys: 3.0 s to load a program that takes 20 to 35 to compile (emnist_cr's step on a core, benchmarks/results/README.md).
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path

LIMIT = 2 << 30  # bytes: beyond, the files that were not read for longest are deleted

_MARK = b"clipline program 1\n"
_ENDING, _UNFINISHED = ".program", ".unfinished-program-"  # of names: other files in the folder are not ours
_LEFT_BEHIND = 24 * 3600  # seconds: older unfinished files are what a crash left


class ProgramCacheWarning(UserWarning):
    """Compiled programs cannot be stored or read; training goes on and compiles."""


def cache_folder() -> Path | None:
    """Where programs are stored: below CLIPLINE_CACHE_DIR, or clipline in XDG_CACHE_HOME or ~/.cache; None: nowhere."""
    own = os.environ.get("CLIPLINE_CACHE_DIR")
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if own:
            return Path(own).expanduser().absolute() / "programs"  # "~" in a file of settings is no shell's
        return (shared if shared.is_absolute() else Path.home() / ".cache") / "clipline" / "programs"
    except RuntimeError:  # a user without a home, as in some containers
        return None


class ProgramFiles:
    """Programs by name, as bytes. What goes wrong is said once, as a warning, and then there is no program."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder, self._limit = folder, limit
        self._refused = False

    def read(self, name: str) -> bytes | None:
        """The program of this name; None if there is none that can be trusted. A damaged one is deleted."""
        if self._refused:
            return None
        path = self._path(name)
        try:
            self._check_folder()
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            with os.fdopen(handle, "rb") as file:
                _check_own(os.fstat(file.fileno()), path)
                content = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refuse(error)
            return None
        head = len(_MARK) + 32
        if content[: len(_MARK)] != _MARK or content[len(_MARK) : head] != _checksum(name, content[head:]):
            self.drop(name, "is damaged")
            return None
        with suppress(OSError):
            os.utime(path)  # read last: deleted last
        return content[head:]

    def write(self, name: str, program: bytes) -> None:
        """Store a program, whole or not at all, whoever else writes it meanwhile; delete old ones beyond the limit."""
        if self._refused:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_folder()
            handle, partial = tempfile.mkstemp(prefix=_UNFINISHED, dir=self.folder)  # readable by its owner alone
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_MARK + _checksum(name, program) + program)
                Path(partial).replace(self._path(name))
            except BaseException:
                with suppress(OSError):
                    Path(partial).unlink()
                raise
            self._shrink()
        except OSError as error:
            self._refuse(error)

    def drop(self, name: str, why: str) -> None:
        """Delete a program that cannot be used, and say so."""
        with suppress(OSError):
            self._path(name).unlink()
        self._warn(f"the stored program {str(self._path(name))!r} {why}: it was deleted and is compiled anew")

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_ENDING}"

    def _check_folder(self) -> None:
        """Raise if another user could have put a program here."""
        found = os.lstat(self.folder)
        if not stat.S_ISDIR(found.st_mode):
            raise PermissionError(f"{str(self.folder)!r} is no folder")
        _check_own(found, self.folder)
        for above in self.folder.resolve().parents:
            mode = above.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise PermissionError(f"everybody may write to {str(above)!r}")

    def _shrink(self) -> None:
        files = []
        for path in self.folder.iterdir():
            with suppress(OSError):
                found = path.lstat()
                if path.name.startswith(_UNFINISHED):
                    if time.time() - found.st_mtime > _LEFT_BEHIND:
                        path.unlink()
                elif path.suffix == _ENDING:
                    files.append((found.st_mtime_ns, found.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files)[:-1]:  # the newest stays
            if total <= self._limit:
                break
            with suppress(OSError):
                path.unlink()
            total -= size

    def _refuse(self, error: OSError) -> None:
        self._refused = True
        self._warn(
            f"compiled programs are not stored ({error}): give a folder of your own as CLIPLINE_CACHE_DIR, or switch "
            "stored_programs off"
        )

    @staticmethod
    def _warn(sentence: str) -> None:
        warnings.warn(sentence, ProgramCacheWarning, stacklevel=2)


def _check_own(found: os.stat_result, path: Path) -> None:
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        raise PermissionError(f"{str(path)!r} belongs to another user")
    if os.name == "posix" and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write to {str(path)!r}")


def _checksum(name: str, program: bytes) -> bytes:
    """Of the name too: a file that was renamed is not what its name says."""
    return hashlib.sha256(name.encode() + b"\n" + program).digest()
