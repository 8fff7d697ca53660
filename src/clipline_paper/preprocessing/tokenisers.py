"""Chunks of text to chunks of numbers: what `clipline data prepare` is handed for the tasks that read text.

A chunk is some users' rows: ids (rows,) and the fields of TFF's files, each an array (rows,) of `str`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipline.data import Chunk, Convert
from clipline.errors import PopulationError

from .text import BAG, ROW, SENTENCE, TAGS_KEPT, encode_bag, encode_sentence, encode_snippet, encode_tags


def snippets(chunk: Chunk) -> Chunk:
    """Shakespeare: `snippets` become `tokens` (81,), one row or several for each snippet, which has its own rows."""
    ids, fields = chunk
    rows = [encode_snippet(text) for text in _texts(fields, "snippets")]
    return np.repeat(ids, np.array([len(cut) for cut in rows], np.int64)), {
        "tokens": np.concatenate([np.zeros((0, ROW), np.uint8), *rows])
    }


def sentences(words: Sequence[str]) -> Convert:
    """Next-word prediction: `tokens` become `tokens` (21,), numbered by the place in `words`."""
    number_of_word = _numbered(words)

    def tokenise(chunk: Chunk) -> Chunk:
        ids, fields = chunk
        tokens = [encode_sentence(text, number_of_word) for text in _texts(fields, "tokens")]
        return ids, {"tokens": np.array(tokens, np.int16).reshape(len(ids), SENTENCE)}

    return tokenise


def tagged_posts(words: Sequence[str], tags: Sequence[str]) -> Convert:
    """Tag prediction: `tokens` and `title` become `words` and `weights` (128,), `tags` become `tags` (5,)."""
    number_of_word, number_of_tag = _numbered(words), _numbered(tags)

    def tokenise(chunk: Chunk) -> Chunk:
        ids, fields = chunk
        numbers, weights = np.empty((len(ids), BAG), np.int16), np.empty((len(ids), BAG), np.float32)
        labels = np.empty((len(ids), TAGS_KEPT), np.int16)
        texts = (_texts(fields, name) for name in ("tokens", "title", "tags"))
        for row, (text, title, named) in enumerate(zip(*texts, strict=True)):
            numbers[row], weights[row] = encode_bag(text, title, number_of_word)
            labels[row] = encode_tags(named, number_of_tag)
        return ids, {"words": numbers, "weights": weights, "tags": labels}

    return tokenise


def together(*tokenisers: Convert) -> Convert:
    """The fields of several tokenisers side by side; all must give a row for each row."""

    def tokenise(chunk: Chunk) -> Chunk:
        fields: dict[str, NDArray[Any]] = {}
        for each in tokenisers:
            fields |= each(chunk)[1]
        return chunk[0], fields

    return tokenise


def _texts(fields: dict[str, NDArray[Any]], name: str) -> NDArray[Any]:
    """A field, if it holds text as the readers give it."""
    if fields[name].dtype != object:
        raise PopulationError(f"field {name!r} is {fields[name].dtype} but must hold text: wrong file?")
    return fields[name]


def _numbered(names: Sequence[str]) -> dict[str, int]:
    """The place of each name; of a name that stands twice, the first."""
    return {name: place for place, name in reversed(list(enumerate(names)))}
