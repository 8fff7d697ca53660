"""The paper's data sets: addresses, checksums, counts, downloads, and how fields become those that the tasks read."""

from __future__ import annotations

import hashlib
import http.client
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clipline.data import Progress, no_progress
from clipline.errors import PopulationError, check_choice

if TYPE_CHECKING:
    from clipline.data import Chunk, Convert, Manifest, StageProgress

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


_BUCKET = "https://storage.googleapis.com/tff-datasets-public"


@dataclass(frozen=True)
class Download:
    """One public file. The checksum is that of the compressed file, where somebody published it."""

    url: str
    sha256: str | None = None

    @property
    def file(self) -> str:
        """The name of the file."""
        return self.url.rsplit("/", 1)[1]


@dataclass(frozen=True)
class Split:
    """One part of a data set: its counts, its name inside the SQLite file, its own HDF5 file."""

    users: int
    examples: int
    sqlite: str
    hdf5: str


@dataclass(frozen=True)
class DataSet:
    """One data set. `convert` gives the tasks' fields; without it the fields are text and need a tokeniser."""

    name: str
    tasks: tuple[str, ...]
    what: str
    fields: tuple[str, ...]  # as they are named in TFF's files
    splits: Mapping[str, Split]
    downloads: tuple[Download, ...]  # the first holds the examples
    convert: Convert | None = None
    shared_users: bool = True  # whether users of train are users of test too, with other examples

    def read_by(self, name: str) -> tuple[str, ...]:
        """The tasks that can read what was prepared under this name: text is tokenised for one task."""
        return (name,) if self.convert is None and name in self.tasks else self.tasks

    def split(self, name: str) -> Split:
        """A split by name."""
        return self.splits[check_choice("split", name, self.splits)]

    @property
    def by_hand(self) -> str:
        """How to get it without `clipline data fetch`, in one sentence."""
        files = " and ".join(download.url for download in self.downloads)
        return (
            f"download {files} on a machine with a network, copy it here, then "
            f"clipline data prepare {self.name} --from {self.downloads[0].file} --to clipline-data/{self.name}"
        )

    def facts(self) -> dict[str, Any]:
        """What `clipline data list` says."""
        files = [part.hdf5 for part in self.splits.values()]
        for download in self.downloads:
            files += [download.file, download.file.removesuffix(".lzma")]
        return {
            "what": self.what,
            "splits": {name: {"users": part.users, "examples": part.examples} for name, part in self.splits.items()},
            "fields": list(self.fields),
            "downloads": [asdict(download) for download in self.downloads],
            "files": list(dict.fromkeys(files)),
            "by_hand": self.by_hand,
        }

    def prepare(
        self,
        task: str,
        source: Path,
        target: Path,
        *,
        split: str | None,
        lists: Mapping[str, Path],
        progress: StageProgress,
    ) -> dict[str, Manifest]:
        """Write the stores that training reads, or one split; `lists` are the word and tag lists by flag."""
        from .prepare_tff import prepare

        return prepare(self, source, target, task=task, split=split, lists=lists, progress=progress)

    def fetch(self, target: Path, progress: StageProgress) -> list[tuple[Path, bool]]:
        """Download all files."""
        return [
            (fetch(one, target, by_hand=self.by_hand, progress=partial(progress, one.file)), one.sha256 is not None)
            for one in self.downloads
        ]

    def find(self, folder: Path, split: str) -> Path:
        """The file with the examples of a split in a folder that holds files under their original names."""
        packed = self.downloads[0].file
        names = [packed.removesuffix(".lzma"), packed, self.split(split).hdf5]
        for name in names:
            if (folder / name).is_file():
                return folder / name
        raise PopulationError(f"{str(folder)!r} holds none of {', '.join(names)}: {self.by_hand}")


def labelled_images(chunk: Chunk, *, field: str, shape: tuple[int, ...], unit: float, classes: int) -> Chunk:
    """Images as `pixels`, uint8 (rows, *shape), and classes as `labels`, uint8 (rows,).

    `unit` is the value that becomes 255; values below 0 or above it are refused, as are classes out of range.
    """
    ids, fields = chunk
    for name, one, kinds, most in ((field, shape, "biuf", unit), ("label", (), "iu", classes - 1)):
        values = fields[name]
        if values.dtype.kind not in kinds:
            raise PopulationError(f"field {name!r} is {values.dtype} but must hold numbers: wrong file?")
        if values.size != len(ids) * math.prod(one):
            held = f"{one}" if one else "one"
            raise PopulationError(
                f"field {name!r} has rows of shape {values.shape[1:]} but must hold {held}: wrong file?"
            )
        if values.size and not (values.min() >= 0 and values.max() <= most):
            found = f"values from {values.min()} to {values.max()}"
            raise PopulationError(f"field {name!r} has {found} but must lie from 0 to {most:g}: wrong file?")
    raw, labels = fields[field], fields["label"]
    pixels = raw if unit == 255 else np.rint(raw * np.float32(255 / unit))
    return ids, {
        "pixels": pixels.astype(np.uint8).reshape(len(ids), *shape),
        "labels": labels.reshape(-1).astype(np.uint8),
    }


def _emnist(chunk: Chunk) -> Chunk:
    """TFF's pixels are floats in which white paper is 1.0: here paper is 255."""
    return labelled_images(chunk, field="pixels", shape=(28, 28), unit=1, classes=62)


def _cifar100(chunk: Chunk) -> Chunk:
    return labelled_images(chunk, field="image", shape=(32, 32, 3), unit=255, classes=100)


EMNIST = DataSet(
    "emnist",
    ("emnist_cr", "emnist_ae"),
    "handwritten characters of 62 classes by writer",
    ("pixels", "label"),
    {
        "train": Split(3400, 671_585, "all_train", "fed_emnist_train.h5"),
        "test": Split(3400, 77_483, "all_test", "fed_emnist_test.h5"),
    },
    (
        Download(
            f"{_BUCKET}/emnist_all.sqlite.lzma", "c3aaf91b4cf4e69d53d81627ad119eccdc878ff906f68e66063ff10f67faad48"
        ),
    ),
    _emnist,
)
CIFAR100 = DataSet(
    "cifar100",
    ("cifar100",),
    "photographs of 100 classes, assigned to users by Pachinko allocation",
    ("image", "label"),
    {
        "train": Split(500, 50_000, "train", "fed_cifar100_train.h5"),
        "test": Split(100, 10_000, "test", "fed_cifar100_test.h5"),
    },
    (Download(f"{_BUCKET}/cifar100.sqlite.lzma", "23d3916c9caa33395737ee560cc7cb77bbd05fc7b73647ee7be3a7e764172939"),),
    _cifar100,
    shared_users=False,
)
SHAKESPEARE = DataSet(
    "shakespeare",
    ("shakespeare",),
    "speeches by role and play",
    ("snippets",),
    {
        "train": Split(715, 16_068, "train", "shakespeare_train.h5"),
        "test": Split(715, 2_356, "test", "shakespeare_test.h5"),
    },
    (
        Download(
            f"{_BUCKET}/shakespeare.sqlite.lzma", "d3d11fceb9e105439ac6f4d52af6efafed5a2a1e1eb24c5bd2dd54ced242f5c4"
        ),
    ),
)
STACKOVERFLOW = DataSet(
    "stackoverflow",
    ("so_nwp", "so_lr"),
    "questions and answers, sentence by sentence, by author",
    ("tokens", "title", "tags"),
    {
        "train": Split(342_477, 135_818_730, "train", "stackoverflow_train.h5"),
        "heldout": Split(38_758, 16_491_230, "heldout", "stackoverflow_held_out.h5"),
        "test": Split(204_088, 16_586_035, "test", "stackoverflow_test.h5"),
    },
    (
        Download(f"{_BUCKET}/stackoverflow.sqlite.lzma"),
        Download(
            f"{_BUCKET}/stackoverflow.word_count.tar.bz2",
            "1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c",
        ),
        Download(
            f"{_BUCKET}/stackoverflow.tag_count.tar.bz2",
            "6fe281cec490d9384a290d560072438e7e2b377bbb823876ce7bd6f82696772d",
        ),
    ),
)
CATALOGUE = {data.name: data for data in (EMNIST, CIFAR100, SHAKESPEARE, STACKOVERFLOW)}
