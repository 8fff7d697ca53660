"""Images of other collections as `pixels` and `labels`, by user."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clipline.data.chunks import Chunk
from clipline_paper.preprocessing import Whole, pachinko_labels

TRAIN_USERS, TEST_USERS = 500, 100  # of CIFAR-100, as in the original
IMAGES_PER_USER = 200  # of EMNIST: 197.5 in the original, so that a user takes as many steps as there
CONCENTRATION = 1.0  # of the Dirichlet that deals one class to all users
SIDE, TILES = 32, 25  # pixels of a tile, tiles in a row of a sheet
_AT_ONCE = 5000  # images in a chunk

Pixels = NDArray[np.uint8]


def cifar100(folder: Path, seed: int) -> tuple[dict[str, Iterator[Chunk]], dict[str, Any]]:
    """500 users to train on and 100 others, each of as many images as there are for them, by Pachinko allocation."""
    names = json.loads((folder / "labels.json").read_text())
    coarse_of_fine = np.array(names["fine_to_coarse"])

    def dealt(files: list[str], users: int, stream: int) -> Iterator[Chunk]:
        pixels, labels = _sheets([folder / file for file in files], names["fine"])
        rng = np.random.default_rng([seed, stream])
        rows = pachinko_split(labels, coarse_of_fine, users, len(labels) // users, rng)
        yield from _chunks(np.repeat(np.arange(users), rows.shape[1]), pixels, labels, rows.ravel())

    return {
        "train": dealt(["cifar100_train_a.zip", "cifar100_train_b.zip"], TRAIN_USERS, 0),
        "test": dealt(["cifar100_test.zip"], TEST_USERS, 1),
    }, {}


def pachinko_split(
    labels: Whole, coarse_of_fine: Whole, users: int, examples_per_user: int, rng: np.random.Generator
) -> Whole:
    """Rows (users, examples_per_user) of the data set with these fine labels; no row is given twice."""
    fine = len(coarse_of_fine)
    chosen = pachinko_labels(np.bincount(labels, minlength=fine), coarse_of_fine, users, examples_per_user, rng)
    rows = np.empty(chosen.shape, np.int64)
    for label in range(fine):
        takers = np.flatnonzero(chosen.ravel() == label)
        rows.ravel()[takers] = rng.permutation(np.flatnonzero(labels == label))[: len(takers)]
    return rows


def _sheets(archives: list[Path], names: list[str]) -> tuple[Pixels, NDArray[np.int64]]:
    """All tiles (n, 32, 32, 3) of archives with a sheet for each class, and their classes (n,)."""
    tiles, labels = [], []
    for archive in archives:
        with zipfile.ZipFile(archive) as sheets:
            for member in sheets.namelist():
                sheet = np.asarray(Image.open(io.BytesIO(sheets.read(member))).convert("RGB"))
                rows = sheet.shape[0] // SIDE
                cut = sheet.reshape(rows, SIDE, TILES, SIDE, 3).swapaxes(1, 2).reshape(-1, SIDE, SIDE, 3)
                tiles.append(cut)
                labels.append(np.full(len(cut), names.index(member.removesuffix(".jpg")), np.int64))
    return np.concatenate(tiles), np.concatenate(labels)


def emnist62(folder: Path, seed: int) -> tuple[dict[str, Iterator[Chunk]], dict[str, Any]]:
    """Users who do not exist: about 200 images each, every class dealt to all of them by a Dirichlet of its own."""

    def dealt(split: str, stream: int) -> Iterator[Chunk]:
        with np.load(folder / "emnist62_byclass.npz") as arrays:
            pixels, labels = arrays[f"{split}_x"], arrays[f"{split}_y"].astype(np.int64)
        users = max(2, round(len(labels) / IMAGES_PER_USER))
        owners = dirichlet_owners(labels, users, np.random.default_rng([seed, stream]))
        order = np.argsort(owners, kind="stable")
        yield from _chunks(owners[order], 255 - pixels, labels, order)

    return {"train": dealt("train", 0), "test": dealt("test", 1)}, {}


def dirichlet_owners(labels: NDArray[np.int64], users: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """The user of each example (n,): the examples of a class, in an order of chance, are cut by Dirichlet shares."""
    owners = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        mine = rng.permutation(np.flatnonzero(labels == label))
        ends = np.rint(np.cumsum(rng.dirichlet(np.full(users, CONCENTRATION))) * len(mine)).astype(np.int64)
        ends[-1] = len(mine)
        owners[mine] = np.searchsorted(ends, np.arange(len(mine)), side="right")
    return owners


def digits(folder: Path, seed: int) -> tuple[dict[str, Iterator[Chunk]], dict[str, Any]]:
    """The digits of each writer; nobody is in both splits."""

    def by_writer(split: str) -> Iterator[Chunk]:
        with np.load(folder / "mnist_by_writer.npz") as arrays:
            pixels, labels, writers = (arrays[f"{split}_{name}"] for name in ("x", "y", "writer"))
        yield from _chunks(writers.astype(np.int64), 255 - pixels, labels, np.arange(len(labels)))

    return {"train": by_writer("train"), "test": by_writer("test")}, {}


def _chunks(users: NDArray[np.int64], pixels: Pixels, labels: NDArray[Any], rows: NDArray[np.int64]) -> Iterator[Chunk]:
    """Row `rows[k]` belongs to `users[k]`; some thousand at a time. Paper is 255 in `pixels` of handwriting."""
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        yield users[start : start + _AT_ONCE], {"pixels": pixels[part], "labels": labels[part].astype(np.uint8)}
