"""Real data in the place of the original files: `python studies/data/convert.py NAME --from FOLDER --to DIR`.

Makes the stores `DIR/train` and `DIR/test` that `clipline train TASK --data DIR` reads. Their manifests say
"substitute", and so does every result: the examples are real, but not those of the paper. README.md has the list.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import convert_images
import convert_texts

from clipline.data.chunks import Chunk
from clipline.data.manifest import Manifest
from clipline.data.store import atomic_folder, write_store
from clipline.errors import CliplineError, PopulationError

# split -> chunks, and split -> users who have no example there
Splits = tuple[Mapping[str, Iterable[Chunk]], Mapping[str, Iterable[int | str]]]


@dataclass(frozen=True)
class Substitute:
    """Other data for some tasks: what they are, the files they are read from, and how."""

    source: str
    tasks: tuple[str, ...]
    shared_users: bool  # whether users of train are users of test too
    files: tuple[str, ...]
    read: Callable[[Path, int], Splits]  # folder, seed


SUBSTITUTES = {
    "cifar100": Substitute(
        "CIFAR-100 images (JPEG of quality 95), dealt anew by Pachinko allocation",
        ("cifar100",),
        False,
        ("cifar100_train_a.zip", "cifar100_train_b.zip", "cifar100_test.zip", "labels.json"),
        convert_images.cifar100,
    ),
    "emnist62": Substitute(
        "EMNIST byclass without writers, each class dealt to invented users by Dirichlet 1",
        ("emnist_cr", "emnist_ae"),
        False,
        ("emnist62_byclass.npz",),
        convert_images.emnist62,
    ),
    "digits": Substitute(
        "MNIST digits by their real writers",
        ("emnist_cr", "emnist_ae"),
        False,
        ("mnist_by_writer.npz",),
        convert_images.digits,
    ),
    "shakespeare": Substitute(
        "Shakespeare by role, the Gutenberg edition parsed anew",
        ("shakespeare",),
        True,
        ("shakespeare.jsonl.xz",),
        convert_texts.shakespeare,
    ),
    "blogs": Substitute(
        "Blog Authorship Corpus by author",
        ("so_nwp",),
        False,
        ("blogs_train.txt.xz", "blogs_heldout.txt.xz"),
        convert_texts.blogs,
    ),
    "articles": Substitute(
        "CiteULike-t articles with tags by user, tested on articles that nobody trains on",
        ("so_lr",),
        True,
        ("citeulike_t.npz",),
        convert_texts.articles,
    ),
    "stackexchange": Substitute(
        "Stack Exchange posts by site and user, sentence by sentence, every tenth user held out",
        ("so_nwp", "so_lr"),
        False,
        ("posts.jsonl.xz",),
        convert_texts.stackexchange,
    ),
}


def convert(name: str, folder: Path, target: Path, seed: int = 0) -> dict[str, Manifest]:
    """Write `target/train` and `target/test`, both or neither; gives their manifests."""
    known = SUBSTITUTES[name]
    for file in known.files:
        if not (folder / file).is_file():
            raise PopulationError(f"{str(folder / file)!r} is missing: give the folder with {', '.join(known.files)}")
    with atomic_folder(target) as (both, scratch):
        splits, without_rows = known.read(folder, seed)
        return {
            split: write_store(
                both / split,
                chunks,
                source=f"{name}: {known.source}",
                tasks=known.tasks,
                origin="substitute",
                shared_users=known.shared_users,
                known_users=without_rows.get(split, ()),
                scratch=scratch,
            )
            for split, chunks in splits.items()
        }


def main() -> None:
    """Entry point of the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=SUBSTITUTES)
    parser.add_argument("--from", dest="folder", type=Path, required=True, help="the folder with the files")
    parser.add_argument("--to", dest="target", type=Path, required=True, help="the folder to write, new or empty")
    parser.add_argument("--seed", type=int, default=0, help="of the allocation, where users are invented")
    given = parser.parse_args()
    try:
        made = convert(given.name, given.folder, given.target, given.seed)
    except CliplineError as error:
        print(f"convert: {error}", file=sys.stderr)
        sys.exit(2)
    for split, manifest in made.items():
        size = sum(path.stat().st_size for path in (given.target / split).iterdir())
        print(f"{given.target / split}: {manifest.users:,} users, {manifest.examples:,} examples, {size / 1e6:,.1f} MB")
    for task in SUBSTITUTES[given.name].tasks:
        print(f"train on it: clipline train {task} --data {given.target}")


if __name__ == "__main__":
    main()
