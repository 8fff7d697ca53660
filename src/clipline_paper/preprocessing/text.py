"""Text to numbers, as the three text tasks of the paper want it. Readers of the original files use the same functions.

Word and tag numbers fit into int16, which torch knows on every device (it knows little of uint16).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

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
