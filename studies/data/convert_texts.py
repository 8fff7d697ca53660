"""Texts of other collections as the numbers of the text tasks, by user."""

from __future__ import annotations

import json
import lzma
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipline.data.chunks import Chunk
from clipline_paper.preprocessing import BAG, BAG_PAD, TAG_PAD, TAGS, WORDS, sentences, snippets, tagged_posts, together

HELD_OUT = 10  # of Stack Exchange, every so manyth user
_AT_ONCE = 5000  # examples in a chunk, and somewhat more
_TOKEN = re.compile(r"<[a-z]+>|[a-z0-9]+(?:['\-][a-z0-9]+)*|[^\sa-z0-9]")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


def shakespeare(folder: Path, seed: int) -> tuple[dict[str, Iterator[Chunk]], dict[str, Any]]:
    """The speeches of each role; the last fifth of them is for the test."""

    def speeches(split: str) -> Iterator[Chunk]:
        with lzma.open(folder / "shakespeare.jsonl.xz", "rt", encoding="utf-8") as lines:
            for line in lines:
                role = json.loads(line)
                if role[split]:
                    yield snippets(_texts([role["client"]] * len(role[split]), snippets=role[split]))

    return {split: speeches(split) for split in ("train", "test")}, {}


def blogs(folder: Path, seed: int) -> tuple[dict[str, Iterator[Chunk]], dict[str, Any]]:
    """The sentences of each author, who has no name; words are the 10,000 that most training authors use."""
    tokenise = sentences(_most_used((" ".join(author).split(" ") for author in _authors(folder, "train")), WORDS))

    def written(split: str) -> Iterator[Chunk]:
        for number, author in enumerate(_authors(folder, split)):
            yield tokenise(_texts([number] * len(author), tokens=author))

    return {"train": written("train"), "test": written("heldout")}, {}


def _authors(folder: Path, split: str) -> Iterator[list[str]]:
    """The lines of each author; an empty line ends one."""
    author: list[str] = []
    with lzma.open(folder / f"blogs_{split}.txt.xz", "rt", encoding="utf-8") as lines:
        for line in chain(lines, ["\n"]):
            if line.strip():
                author.append(line.rstrip("\n"))
            elif author:
                yield author
                author = []


def stackexchange(folder: Path, seed: int) -> tuple[dict[str, Iterator[Chunk]], dict[str, Any]]:
    """Every sentence of a post is an example with the post's title and tags, as in Stack Overflow's files.

    A user of a site is a user; every tenth of them is for the test. Words and tags are those that most training users
    use.
    """
    posts: dict[str, list[tuple[list[str], str, str]]] = {}  # user -> sentences, title and tags of each post
    with lzma.open(folder / "posts.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in lines:
            post = json.loads(line)
            texts = [text for part in _SENTENCE_END.split(post["text"]) if (text := tokenised(part))]
            user = posts.setdefault(f"{post['site']}/{post['user']}", [])
            user.append((texts, tokenised(post["title"]), "|".join(post["tags"])))
    held_out = sorted(posts)[HELD_OUT - 1 :: HELD_OUT]
    users = {"train": sorted(set(posts) - set(held_out)), "test": held_out}
    words = _most_used((_words(posts[user]) for user in users["train"]), WORDS)
    tags = _most_used((" ".join(post[2] for post in posts[u]).replace("|", " ").split() for u in users["train"]), TAGS)
    tokenise = together(sentences(words), tagged_posts(words, tags))

    def written(split: str) -> Iterator[Chunk]:
        for user in users[split]:
            rows = [(text, title, named) for texts, title, named in posts[user] for text in texts]
            if rows:
                tokens, titles, named = zip(*rows, strict=True)
                yield tokenise(_texts([user] * len(rows), tokens=tokens, title=titles, tags=named))

    return {split: written(split) for split in users}, users  # a post of code alone has no sentence left


def tokenised(text: str) -> str:
    """Lower case, words and marks apart, `<url>` whole."""
    return " ".join(_TOKEN.findall(text.lower()))


def _words(posts: Sequence[tuple[list[str], str, str]]) -> list[str]:
    return " ".join(text for texts, title, _ in posts for text in (*texts, title)).split()


def articles(folder: Path, seed: int) -> tuple[dict[str, Iterator[Chunk]], dict[str, Any]]:
    """The articles in each user's library: bags of words, and all their tags among the 500 commonest.

    Articles marked for the test are nobody's to train on. The words are the 10,000 that are in most users' training
    articles; the others divide too, as unknown words do. Of an article with more than 128, the most frequent are kept.
    """
    with np.load(folder / "citeulike_t.npz") as arrays:
        bow, counts, tags = (
            _rows(arrays[f"{name}_indptr"], arrays[f"{name}_{what}"].astype(np.int64))
            for name, what in (("bow", "indices"), ("bow", "counts"), ("tag", "indices"))
        )
        libraries = _rows(arrays["user_indptr"], arrays["user_items"].astype(np.int64))
        tested = arrays["item_is_test"].astype(bool)
    kept = {split: [items[tested[items] == held] for items in libraries] for split, held in SPLIT_IS_TEST.items()}
    frequent = _most_used(
        (np.concatenate([_NONE, *(bow[i] for i in items)]).tolist() for items in kept["train"]), WORDS
    )
    number = np.full(1 + max(int(words.max(initial=0)) for words in bow), BAG_PAD)
    number[frequent] = np.arange(len(frequent))
    common = [named[named < TAGS] for named in tags]
    width = max(len(named) for named in common)
    bags = [_bag(number[words], times) for words, times in zip(bow, counts, strict=True)]
    labels = [np.pad(named, (0, width - len(named)), constant_values=TAG_PAD).astype(np.int16) for named in common]

    def read(split: str) -> Iterator[Chunk]:
        for user, items in enumerate(kept[split]):
            if len(items):
                yield (
                    np.full(len(items), user),
                    {
                        "words": np.stack([bags[item][0] for item in items]),
                        "weights": np.stack([bags[item][1] for item in items]),
                        "tags": np.stack([labels[item] for item in items]),
                    },
                )

    # Somebody whose articles are all for the test is a user of the population nevertheless.
    return {split: read(split) for split in SPLIT_IS_TEST}, {"train": range(len(libraries))}


SPLIT_IS_TEST = {"train": False, "test": True}
_NONE = np.zeros(0, np.int64)


def _bag(numbers: NDArray[np.int64], times: NDArray[np.int64]) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Known words (128,) and their shares of all words (128,), the most frequent first."""
    order = np.argsort(-times, kind="stable")
    order = order[numbers[order] != BAG_PAD][:BAG]
    words, weights = np.full(BAG, BAG_PAD, np.int16), np.zeros(BAG, np.float32)
    words[: len(order)], weights[: len(order)] = numbers[order], times[order] / max(times.sum(), 1)
    return words, weights


def _rows(indptr: NDArray[Any], values: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Compressed rows as a list of arrays."""
    return np.split(values, indptr[1:-1])


def _most_used(used: Iterable[Iterable[Any]], size: int) -> list[Any]:
    """What most users use, as Stack Overflow's own lists count it: once a user; of equal counts, the first met."""
    counted: Counter[Any] = Counter()
    for mine in used:
        counted.update(list(dict.fromkeys(mine)))
    return [word for word, _ in counted.most_common(size)]


def _texts(users: list[Any], **fields: Sequence[str]) -> Chunk:
    return np.array(users), {name: np.array(texts, object) for name, texts in fields.items()}
