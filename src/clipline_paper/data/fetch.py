"""Downloads with resume and a checksum."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from pathlib import Path

from clipline.data import Progress, no_progress
from clipline.errors import PopulationError

from .catalogue import Download

_TIMEOUT = 10.0  # seconds without an answer
_BLOCK = 1 << 20


def fetch(
    download: Download, folder: str | Path, *, by_hand: str, timeout: float = _TIMEOUT, progress: Progress = no_progress
) -> Path:
    """Download one file into `folder` and check it. A file that is there already is checked, not downloaded again.

    An interrupted download is kept beside it as `.part`, and the next call resumes it. Without a network nothing is
    created, and the error says `by_hand`, the manual way. A file with another checksum than published is removed.
    `progress` counts bytes.
    """
    path = Path(folder) / download.file
    if path.exists():
        return _checked(path, path, download)
    part = path.with_name(path.name + ".part")
    begun = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(download.url, headers={"Range": f"bytes={begun}-"} if begun else {})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            begun = begun if answer.status == http.client.PARTIAL_CONTENT else 0  # 200: the server begins anew
            total = begun + int(answer.headers.get("Content-Length", 0))
            part.parent.mkdir(parents=True, exist_ok=True)
            with part.open("ab" if begun else "wb") as file:
                while block := answer.read(_BLOCK):
                    file.write(block)
                    begun += len(block)
                    progress(begun, max(total, begun))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:  # that one: all of it is here already
            raise PopulationError(f"{download.url} answers {error.code} {error.reason}: {by_hand}") from None
        total = begun
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        kept = f"{begun} bytes are kept, try again or " if part.exists() and begun else ""
        raise PopulationError(f"{download.url} cannot be reached ({reason}): {kept}{by_hand}") from None
    if begun < total:
        raise PopulationError(
            f"{download.url} stopped after {begun} of {total} bytes: the same command goes on from there"
        )
    return _checked(part, path, download)


def _checked(found: Path, path: Path, download: Download) -> Path:
    """Rename a complete download to its name, or remove it if it is not what was published."""
    if download.sha256 is not None:
        with found.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != download.sha256:
            if found != path:
                found.unlink()
            raise PopulationError(
                f"{str(found)!r} has checksum {sha256[:12]}... but {download.sha256[:12]}... was published: "
                "remove it if it is still there, and download it again"
            )
    found.rename(path)
    return path
