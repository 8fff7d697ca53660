"""What the original programs do before training: text to numbers, images to users (Pachinko allocation)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipline.data import Chunk, Convert
from clipline.errors import PopulationError

PAD = 0  # of both language models

# The 86 characters of the original, in its order: character i is number i + 1.
CHARACTERS = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
CHARACTER_OOV, CHARACTER_BOS, CHARACTER_EOS = 87, 88, 89
CHARACTER_IDS = 90
ROW = 81  # 80 to read and 80 to predict, one apart

WORDS = 10_000
WORD_OOV, WORD_BOS, WORD_EOS = 10_001, 10_002, 10_003
WORD_IDS = 10_004
SENTENCE = 21  # 20 to read and 20 to predict, one apart

BAG = 128  # distinct words kept of one example
BAG_PAD = WORDS  # the number at places of a bag that hold no word; its weight is 0
TAGS = 500
TAGS_KEPT = 5  # Stack Overflow allows no more
TAG_PAD = -1

_NUMBER_OF_BYTE = np.full(256, CHARACTER_OOV, np.uint8)
_NUMBER_OF_BYTE[np.frombuffer(CHARACTERS.encode("ascii"), np.uint8)] = np.arange(1, len(CHARACTERS) + 1)


def encode_snippet(text: str | bytes) -> NDArray[np.uint8]:
    """A snippet as rows (n, 81): beginning, one number a byte, end, padded with 0 to a multiple of 81.

    Bytes that are no character of the vocabulary become 87. An empty snippet is one row of beginning, end and padding.
    """
    raw = np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)
    rows = -(-(len(raw) + 2) // ROW)
    out = np.full(rows * ROW, PAD, np.uint8)
    out[0] = CHARACTER_BOS
    out[1 : len(raw) + 1] = _NUMBER_OF_BYTE[raw]
    out[len(raw) + 1] = CHARACTER_EOS
    return out.reshape(rows, ROW)


def encode_sentence(text: str, number_of_word: Mapping[str, int]) -> NDArray[np.int16]:
    """A sentence as (21,): beginning, the first 20 words, the end if fewer than 20 words, padded with 0.

    `number_of_word` gives 0 to 9,999; word i becomes i + 1, an unknown word 10,001.
    """
    numbers = [number_of_word.get(word, WORDS) + 1 for word in text.split(" ")[: SENTENCE - 1]]
    if len(numbers) < SENTENCE - 1:
        numbers.append(WORD_EOS)
    out = np.full(SENTENCE, PAD, np.int16)
    out[: len(numbers) + 1] = [WORD_BOS, *numbers]
    return out


def encode_bag(
    tokens: str, title: str, number_of_word: Mapping[str, int]
) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """The words of text and title as a bag: numbers (128,) and weights (128,), padded with 10,000 and 0.

    A weight is the word's share of all words, unknown ones included, so that the weights sum to 1 - share of unknown.
    Beyond 128 different words, those that come first are kept. Without a word all weights are 0.
    """
    words = f"{tokens} {title}".split()
    counted = Counter(number_of_word[word] for word in words if word in number_of_word)
    kept = list(counted.items())[:BAG]
    numbers, weights = np.full(BAG, BAG_PAD, np.int16), np.zeros(BAG, np.float32)
    numbers[: len(kept)] = [number for number, _ in kept]
    weights[: len(kept)] = [times / len(words) for _, times in kept]
    return numbers, weights


def encode_tags(tags: str, number_of_tag: Mapping[str, int]) -> NDArray[np.int16]:
    """Tags "python|numpy" as numbers (5,), padded with -1; unknown tags are dropped, so that there may be none."""
    known = list(dict.fromkeys(number_of_tag[tag] for tag in tags.split("|") if tag in number_of_tag))[:TAGS_KEPT]
    out = np.full(TAGS_KEPT, TAG_PAD, np.int16)
    out[: len(known)] = known
    return out


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


COARSE_CONCENTRATION = 0.1
FINE_CONCENTRATION = 10.0

Whole = NDArray[np.int64]


def pachinko_labels(
    counts: Whole, coarse_of_fine: Whole, users: int, examples_per_user: int, rng: np.random.Generator
) -> Whole:
    """Fine labels (users, examples_per_user), with no label taken more than `counts[label]` times.

    A user whose labels have all run out, or whose other weights vanish in float64, draws evenly from what is left.
    """
    left = np.array(counts, np.int64)
    if users * examples_per_user > left.sum():
        raise PopulationError(
            f"{users} users of {examples_per_user} examples need {users * examples_per_user} but there are "
            f"{left.sum()}: give fewer users, or fewer examples to each"
        )
    groups = [np.flatnonzero(coarse_of_fine == coarse) for coarse in range(int(coarse_of_fine.max()) + 1)]
    left_of_coarse = np.array([left[group].sum() for group in groups])
    out = np.empty((users, examples_per_user), np.int64)
    for user in range(users):
        mixture = rng.dirichlet(np.full(len(groups), COARSE_CONCENTRATION))
        fine_mixtures = [rng.dirichlet(np.full(len(group), FINE_CONCENTRATION)) for group in groups]
        coarse_totals = _cumulative(mixture, left_of_coarse)
        fine_totals = [_cumulative(fine, left[group]) for fine, group in zip(fine_mixtures, groups, strict=True)]
        draws = rng.random((examples_per_user, 2))
        for example in range(examples_per_user):
            coarse = int(np.searchsorted(coarse_totals, draws[example, 0], side="right"))
            place = int(np.searchsorted(fine_totals[coarse], draws[example, 1], side="right"))
            label = groups[coarse][place]
            out[user, example] = label
            left[label] -= 1
            left_of_coarse[coarse] -= 1
            if left[label] == 0:
                fine_totals[coarse] = _cumulative(fine_mixtures[coarse], left[groups[coarse]])
            if left_of_coarse[coarse] == 0:
                coarse_totals = _cumulative(mixture, left_of_coarse)
    return out


def _cumulative(mixture: NDArray[np.float64], left: Whole) -> NDArray[np.float64]:
    """Cumulative weights of the labels that are left, scaled so that every draw in [0, 1) falls on one of them."""
    weights = np.where(left > 0, mixture, 0.0)
    if not weights.sum() > 0:
        weights = (left > 0).astype(np.float64)
    totals: NDArray[np.float64] = np.cumsum(weights)
    if totals[-1] > 0:
        totals /= totals[-1]
        totals[np.flatnonzero(weights)[-1] :] = 1.0  # rounding must not leave a gap before 1
    return totals
