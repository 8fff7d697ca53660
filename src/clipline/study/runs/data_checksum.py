"""A checksum of the data that settings name, the same wherever the data lie."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ...data.manifest import MANIFEST, read_entries, sha256
from ...errors import refuse
from ...tasks.settings import TrainSettings

GENERATED = "generated"  # settings and program decide the users


def data_checksum(settings: TrainSettings) -> str:
    """What stands for the users' data in the identity of a run: PRIVATE where they are real, no noise is in it.

    Of stores the checksums in their manifests, which opening a store compares with its files; of a table that of the
    file. Generated users follow from the settings.
    """
    if not settings.stored:
        return GENERATED
    path = Path(str(settings.data))
    if path.is_file():
        return sha256(path)
    stores = [folder for folder in (path, path / "train", path / "test") if (folder / MANIFEST).is_file()]
    if not stores:
        raise refuse("data", str(path), "a store or a table", "clipline data prepare makes a store")
    digest = hashlib.sha256()
    for folder in stores:
        known = read_entries(folder).get("sha256") or {}
        names = sorted(known or (file.name for file in folder.glob("*.npy")))
        sums = [(name, known.get(name) or sha256(folder / name)) for name in names]
        digest.update(repr((folder.relative_to(path).as_posix(), sums)).encode())
    return digest.hexdigest()
