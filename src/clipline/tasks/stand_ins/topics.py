"""Stand-ins for Stack Overflow by user: everybody writes of a few topics, in words of Zipf's law, with tags to match.

A post has one topic of its user's mixture. Its words come from the common vocabulary, from the topic's own words, or
follow from the word before; some are unknown. Sizes are as uneven as the original's, but nobody has more than the 1000
examples that training would take.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...federated.population import Population
from ...streams import Streams
from ..paper_task import STAND_IN_SEED
from ..text import BAG, BAG_PAD, PAD, SENTENCE, TAG_PAD, TAGS, TAGS_KEPT, WORD_BOS, WORD_EOS, WORDS

MEAN_EXAMPLES = 135_818_730 / 342_477  # of the original, 397 a user, before the cut
MOST_EXAMPLES = 1000
UNEVENNESS = 1.4  # standard deviation of the logarithm of a user's number of examples
TOPICS, TOPIC_WORDS, TOPIC_TAGS = 50, 200, 10
MIXTURE = 0.2  # Dirichlet concentration of a user's topics: two or three make up most
UNKNOWN, OF_TOPIC, FOLLOWS = 0.05, 0.3, 0.25  # how a word comes about; otherwise it is common
SENTENCE_WORDS, POST_WORDS = 12, 30  # median lengths
LENGTH_SPREAD = 0.5
OOV = WORDS  # here; words are 0 to 9,999

Whole = NDArray[np.int64]


def sentences(first: int, users: int) -> Population:
    """Users from number `first` on: `tokens` (21,) int16, as `encode_sentence` gives them."""
    return _population([{"tokens": _sentences(first + user)} for user in range(users)])


def tagged_posts(first: int, users: int) -> Population:
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
    real = (np.arange(words.shape[1]) < lengths[:, None]) & (words != OOV)
    pairs, times = np.unique(np.repeat(np.arange(count), real.sum(axis=1)) * WORDS + words[real], return_counts=True)
    posts = pairs // WORDS
    place = np.arange(len(pairs)) - np.searchsorted(posts, posts)  # among the different words of the post
    bags, weights = np.full((count, BAG), BAG_PAD, np.int16), np.zeros((count, BAG), np.float32)
    bags[posts, place] = pairs % WORDS
    weights[posts, place] = times / lengths[posts]
    # The topic's ten tags in an order of chance that favours the first, cut after one to five.
    order = np.argsort(np.arange(TOPIC_TAGS) / 3 + rng.gumbel(size=(count, TOPIC_TAGS)), axis=1)[:, :TAGS_KEPT]
    tags = (topics[:, None] * TOPIC_TAGS + order) % TAGS
    tags[np.arange(TAGS_KEPT) >= rng.integers(1, TAGS_KEPT + 1, count)[:, None]] = TAG_PAD
    return {"words": bags, "weights": weights, "tags": tags.astype(np.int16)}


def _posts(rng: np.random.Generator, median: int, longest: int) -> tuple[Whole, Whole, Whole]:
    """Words (examples, longest) of which `lengths` (examples,) count, and the topic (examples,) of each."""
    common, of_topic, successor = _language()
    drawn = (MEAN_EXAMPLES - 1) * rng.lognormal(0, UNEVENNESS) / np.exp(UNEVENNESS**2 / 2)
    count = min(1 + int(drawn), MOST_EXAMPLES)
    topics = rng.choice(TOPICS, count, p=rng.dirichlet(np.full(TOPICS, MIXTURE)))
    lengths = np.clip((median * rng.lognormal(0, LENGTH_SPREAD, count)).astype(np.int64), 1, longest)
    shape = (count, longest)
    words = np.searchsorted(common, rng.random(shape), side="right")
    how = rng.random(shape)
    favourite = np.minimum(rng.exponential(TOPIC_WORDS / 8, shape).astype(np.int64), TOPIC_WORDS - 1)
    words = np.where(how < OF_TOPIC, of_topic[topics[:, None], favourite], words)
    follows = (how >= OF_TOPIC) & (how < OF_TOPIC + FOLLOWS)
    words[:, 1:] = np.where(follows[:, 1:], successor[words[:, :-1]], words[:, 1:])
    words[how > 1 - UNKNOWN] = OOV
    return words, lengths, topics


@lru_cache(maxsize=1)
def _language() -> tuple[NDArray[np.float64], Whole, Whole]:
    """Running totals of Zipf's law (10000,), each topic's words (50, 200), and the word that follows each (10000,)."""
    rng = _rng("language", 0)
    ends: NDArray[np.float64] = np.cumsum(1 / (np.arange(WORDS) + 2.7))
    topics = np.stack([rng.choice(np.arange(100, WORDS), TOPIC_WORDS, replace=False) for _ in range(TOPICS)])
    successor = np.minimum(rng.exponential(WORDS / 20, WORDS).astype(np.int64), WORDS - 1)
    ends /= ends[-1]
    ends[-1] = 1.0
    return ends, topics, successor


def _rng(purpose: str, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=Streams(STAND_IN_SEED).user_key(f"topics/{purpose}", 0, number)))
