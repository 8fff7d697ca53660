"""Stand-ins for Stack Overflow by user: each user writes on a few topics, in Zipf-distributed words with tags to match.

A post has one topic of its user's mixture. Its words come from the common vocabulary, from the topic's own words, or
follow from the word before; some are unknown. Sizes are as uneven as the original's, but nobody has more than the 1000
examples that training would take.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipline import Population
from clipline.random import Streams

from ..paper_task import STAND_IN_SEED
from ..preprocessing.text import BAG, BAG_PAD, PAD, SENTENCE, TAG_PAD, TAGS, TAGS_KEPT, WORD_BOS, WORD_EOS, WORDS

MEAN_EXAMPLES = 135_818_730 / 342_477  # of the original, 397 a user, before the cut
MOST_EXAMPLES = 1000
UNEVENNESS = 1.4  # standard deviation of the logarithm of a user's number of examples
TOPICS, TOPIC_WORDS, TOPIC_TAGS = 50, 200, 10
MIXTURE = 5.0  # sum of the Dirichlet concentrations of a user's topics: a few make up most
TOPIC_SCALE = 12  # how many of a topic's words are frequent in it
NAMED = 0.8  # how often a post has its tag's name among its words
UNKNOWN, OF_TOPIC, FOLLOWS = 0.03, 0.25, 0.3  # shares of words by origin; the others come from the common vocabulary
SENTENCE_WORDS, POST_WORDS = 12, 15  # median lengths
LENGTH_SPREAD = 0.5
OOV = WORDS  # here; words are 0 to 9,999

Whole = NDArray[np.int64]


def so_nwp_users(first: int, users: int) -> Population:
    """Users from number `first` on: `tokens` (21,) int16, as `encode_sentence` gives them."""
    return _population([{"tokens": _sentences(first + user)} for user in range(users)])


def so_lr_users(first: int, users: int) -> Population:
    """Users from number `first` on: `words` (128,) int16, `weights` (128,) float32, `tags` (5,) int16."""
    return _population([_tagged(first + user) for user in range(users)])


def _population(everybody: list[dict[str, NDArray[np.generic]]]) -> Population:
    sizes = [len(next(iter(fields.values()))) for fields in everybody]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    return Population(offsets, {name: np.concatenate([f[name] for f in everybody]) for name in everybody[0]})


def _sentences(user: int) -> NDArray[np.int16]:
    rng = _rng("sentences", user)
    words, lengths, _ = _posts(rng, SENTENCE_WORDS, longest=SENTENCE + 10)
    words, lengths = words[:, : SENTENCE - 1], lengths[:, None]
    place = np.arange(SENTENCE - 1)
    tokens = np.where(place < lengths, words + 1, np.where(place == lengths, WORD_EOS, PAD))
    return np.concatenate([np.full((len(tokens), 1), WORD_BOS), tokens], axis=1).astype(np.int16)


def _tagged(user: int) -> dict[str, NDArray[np.generic]]:
    rng = _rng("posts", user)
    words, lengths, topics = _posts(rng, POST_WORDS, longest=BAG)
    count = len(words)
    # The topic's ten tags in a random order that favours the first ones, cut after one to five.
    order = np.argsort(np.arange(TOPIC_TAGS) / 3 + rng.gumbel(size=(count, TOPIC_TAGS)), axis=1)[:, :TAGS_KEPT]
    tags = topics[:, None] * TOPIC_TAGS + order
    tags[np.arange(TAGS_KEPT) >= rng.integers(1, TAGS_KEPT + 1, count)[:, None]] = TAG_PAD
    for tag in tags.T:
        named = (tag != TAG_PAD) & (rng.random(count) < NAMED)
        words[named, rng.integers(0, lengths[named])] = _language().name_of_tag[tag[named]]
    bags, weights = _bags(words, lengths)
    return {"words": bags, "weights": weights, "tags": tags.astype(np.int16)}


def _bags(words: Whole, lengths: Whole) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Different known words of each row (rows, 128), and their shares of all words of the row, unknown ones too."""
    rows = len(words)
    known = (np.arange(words.shape[1]) < lengths[:, None]) & (words != OOV)
    pairs, times = np.unique(np.repeat(np.arange(rows), known.sum(axis=1)) * WORDS + words[known], return_counts=True)
    owner = pairs // WORDS
    place = np.arange(len(pairs)) - np.searchsorted(owner, owner)
    bags, weights = np.full((rows, BAG), BAG_PAD, np.int16), np.zeros((rows, BAG), np.float32)
    bags[owner, place] = pairs % WORDS
    weights[owner, place] = times / lengths[owner]
    return bags, weights


def _posts(rng: np.random.Generator, median: int, longest: int) -> tuple[Whole, Whole, Whole]:
    """Words (examples, longest) of which `lengths` (examples,) count, and the topic (examples,) of each."""
    language = _language()
    drawn = (MEAN_EXAMPLES - 1) * rng.lognormal(0, UNEVENNESS) / np.exp(UNEVENNESS**2 / 2)
    count = min(1 + int(drawn), MOST_EXAMPLES)
    topics = rng.choice(TOPICS, count, p=rng.dirichlet(MIXTURE * language.popularity))
    lengths = np.clip((median * rng.lognormal(0, LENGTH_SPREAD, count)).astype(np.int64), 1, longest)
    shape = (count, longest)
    words = np.searchsorted(language.common, rng.random(shape), side="right")
    how = rng.random(shape)
    favourite = np.minimum(rng.exponential(TOPIC_SCALE, shape).astype(np.int64), TOPIC_WORDS - 1)
    words = np.where(how < OF_TOPIC, language.of_topic[topics[:, None], favourite], words)
    words[how > 1 - UNKNOWN] = OOV
    follows = (how >= OF_TOPIC) & (how < OF_TOPIC + FOLLOWS)
    for place in range(1, int(lengths.max())):
        words[:, place] = np.where(follows[:, place], language.successor[words[:, place - 1]], words[:, place])
    return words, lengths, topics


class Language(NamedTuple):
    """What all users share."""

    common: NDArray[np.float64]  # (10000,) running totals of Zipf's law
    popularity: NDArray[np.float64]  # (50,) of the topics, summing to 1
    of_topic: Whole  # (50, 200) words, the frequent ones first
    successor: Whole  # (10001,) the most likely next word after each; the last entry is for the unknown word
    name_of_tag: Whole  # (500,) words


@lru_cache(maxsize=1)
def _language() -> Language:
    rng = _rng("language", 0)
    common: NDArray[np.float64] = np.cumsum(1 / (np.arange(WORDS) + 1.0))
    common /= common[-1]
    common[-1] = 1.0
    popularity = 1 / (np.arange(TOPICS) + 3.0)
    rare = np.arange(100, WORDS)
    return Language(
        common,
        popularity / popularity.sum(),
        np.stack([rng.choice(rare, TOPIC_WORDS, replace=False) for _ in range(TOPICS)]),
        np.minimum(rng.exponential(WORDS / 20, WORDS + 1).astype(np.int64), WORDS - 1),
        rng.choice(rare, TAGS, replace=False),
    )


def _rng(purpose: str, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=Streams(STAND_IN_SEED).user_key(f"topics/{purpose}", 0, number)))
