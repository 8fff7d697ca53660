"""Users in the place of the paper's data, generated and the same for every seed of the training."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipline import Population
from clipline.random import Streams, counter_bits
from clipline.tasks import writers_population

from .paper_task import STAND_IN_SEED
from .preprocessing import (
    BAG,
    BAG_PAD,
    CHARACTER_BOS,
    CHARACTER_EOS,
    CHARACTERS,
    PAD,
    ROW,
    SENTENCE,
    TAG_PAD,
    TAGS,
    TAGS_KEPT,
    WORD_BOS,
    WORD_EOS,
    WORDS,
    pachinko_labels,
)


def _rng(purpose: str, number: int) -> np.random.Generator:
    """The random numbers of one user, or of all, for one purpose."""
    return np.random.Generator(np.random.Philox(key=Streams(STAND_IN_SEED).user_key(purpose, 0, number)))


WRITER_EXAMPLES = 671_585 / 3_400  # of the original: 197.5 a writer


def emnist_users(first: int, users: int, mean_examples: float = WRITER_EXAMPLES) -> Population:
    """Writers from number `first` on: `pixels` (28, 28) uint8 with paper 255, `labels` uint8 in EMNIST's order."""
    return writers_population(first, users, classes=62, mean_examples=mean_examples)


FINE, COARSE = 100, 20
EXAMPLES = 100  # of every user, as in the original
SIDE = 32
WAVES = 3
IMAGES_AT_ONCE = 250  # images drawn at once
NOISE = 20.0  # half the range of the noise of a pixel

Real = NDArray[np.float32]


def cifar100_users(first: int, users: int) -> Population:
    """Users from number `first` on, 100 images each: `pixels` (32, 32, 3) uint8, `labels` uint8."""
    rng = _rng("pictures/allocation", first)
    coarse_of_fine = np.arange(FINE) // (FINE // COARSE)
    counts = np.full(FINE, -(-users * EXAMPLES // FINE))
    labels = pachinko_labels(counts, coarse_of_fine, users, EXAMPLES, rng).ravel()
    owners = first + np.repeat(np.arange(users), EXAMPLES)
    places = np.tile(np.arange(EXAMPLES), users)
    pixels = np.empty((len(labels), SIDE, SIDE, 3), np.uint8)
    for start in range(0, len(labels), IMAGES_AT_ONCE):
        block = slice(start, start + IMAGES_AT_ONCE)
        pixels[block] = _draw(owners[block], places[block], labels[block])
    offsets = np.arange(users + 1, dtype=np.int64) * EXAMPLES
    return Population(offsets, {"pixels": pixels, "labels": labels.astype(np.uint8)})


def _draw(owners: NDArray[np.int64], places: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.uint8]:
    """(n,) users, places and labels -> (n, 32, 32, 3)."""
    images = counter_bits(_keys("image", owners), places)
    own = _numbers(images, 4 * WAVES)
    waves = _numbers(_keys("waves", labels), 4 * WAVES)
    colours = 60 * _numbers(_keys("colours", labels // (FINE // COARSE)), 3 * WAVES).reshape(-1, WAVES, 3)
    tint = 25 * _numbers(_keys("tint", owners), 3)
    contrast = 1 + 0.3 * _numbers(_keys("contrast", owners), 1)
    turns = np.arange(SIDE, dtype=np.float32) * (2 * np.pi / SIDE)
    rows = (4 * waves[:, 0:WAVES] + 0.3 * own[:, 0:WAVES])[..., None] * turns  # up to 4 cycles, nearly the label's own
    columns = (4 * waves[:, WAVES : 2 * WAVES] + 0.3 * own[:, WAVES : 2 * WAVES])[..., None] * turns
    phases = np.pi * (waves[:, 2 * WAVES : 3 * WAVES] + 0.4 * own[:, 2 * WAVES : 3 * WAVES])
    height = np.sin(rows[:, :, :, None] + columns[:, :, None, :] + phases[..., None, None])  # (n, waves, 32, 32)
    height *= (1 + 0.4 * own[:, 3 * WAVES :])[..., None, None]
    light: Real = np.einsum("nwrc,nwk->nrck", height, colours * contrast[..., None], optimize=True)
    noise = counter_bits(images[:, None] ^ np.uint64(1), np.arange(SIDE * SIDE * 3 // 8)).view(np.uint8)
    light += noise.reshape(light.shape) * np.float32(2 * NOISE / 255)
    light += (128 - NOISE + tint)[:, None, None, :]
    return np.clip(light, 0, 255).astype(np.uint8)


def _keys(purpose: str, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One key for each number: a hash of purpose and number."""
    base = Streams(STAND_IN_SEED).user_key(f"pictures/{purpose}", 0, 0)
    return counter_bits(np.array([base], np.uint64), numbers)


def _numbers(keys: NDArray[np.uint64], count: int) -> Real:
    """(n,) keys -> (n, count) uniform in [-1, 1)."""
    words = counter_bits(keys[:, None], np.arange(count))
    return ((words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - 1).astype(np.float32)


MEAN_SNIPPETS = 16_068 / 715  # of the original: 22.5 a role
ROLE_UNEVENNESS = 1.0  # standard deviation of the logarithm of a role's number of snippets
MEDIAN_LENGTH, SNIPPET_SPREAD, LONGEST = 110, 0.9, 800  # characters of a snippet
COMMON_SPREAD, ROLE_SPREAD = 1.6, 0.5  # of the common chain's log weights, and of a role's deviations from them
FREQUENT_FIRST = " etaonhisrdlumywc,gf\nbp.vkIATSWHOMBN'EDLRFCPGUYK;?!-jxqzVJQX:[]Z"
ROLES_AT_ONCE = 64  # roles drawn at once: their chains take 4 MB

Whole = NDArray[np.int64]


def shakespeare_users(first: int, users: int) -> Population:
    """Roles from number `first` on: `tokens` (81,) uint8, rows of snippets as `encode_snippet` cuts them."""
    blocks = [_roles(first + start, min(ROLES_AT_ONCE, users - start)) for start in range(0, users, ROLES_AT_ONCE)]
    sizes = np.concatenate([sizes for sizes, _ in blocks])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return Population(offsets, {"tokens": np.concatenate([tokens for _, tokens in blocks])})


def _roles(first: int, users: int) -> tuple[Whole, NDArray[np.uint8]]:
    """Rows of each role (users,), and the rows (sum, 81)."""
    rngs = [_rng("roles/snippets", first + user) for user in range(users)]
    mean_of_exp = np.exp(ROLE_UNEVENNESS**2 / 2)
    snippets = [1 + int((MEAN_SNIPPETS - 1) * rng.lognormal(0, ROLE_UNEVENNESS) / mean_of_exp) for rng in rngs]
    lengths = np.concatenate(
        [
            1 + (MEDIAN_LENGTH * rng.lognormal(0, SNIPPET_SPREAD, n)).astype(np.int64)
            for rng, n in zip(rngs, snippets, strict=True)
        ]
    )
    lengths = np.minimum(lengths, LONGEST)
    owners = np.repeat(np.arange(users), snippets)
    keys = np.concatenate([rng.integers(0, 2**64, n, np.uint64) for rng, n in zip(rngs, snippets, strict=True)])
    rows = -(-(lengths + 2) // ROW)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows)]) * ROW
    tokens = np.full(starts[-1], PAD, np.uint8)
    tokens[starts[:-1]] = CHARACTER_BOS
    tokens[starts[:-1] + lengths + 1] = CHARACTER_EOS
    ends = np.stack([_chain(first + user) for user in range(users)])  # (users, 86, 86)
    state = np.full(len(lengths), CHARACTERS.index("\n"))
    for place in range(int(lengths.max())):
        alive = np.flatnonzero(lengths > place)
        draws = (counter_bits(keys[alive], place) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        state[alive] = (draws[:, None] >= ends[owners[alive], state[alive], :-1]).sum(axis=1)
        tokens[starts[alive] + 1 + place] = state[alive] + 1
    return np.bincount(owners, rows, minlength=users).astype(np.int64), tokens.reshape(-1, ROW)


def _chain(role: int) -> NDArray[np.float32]:
    """One role's cumulative probabilities of the next character, (86, 86): a row for each character before it."""
    weights = np.exp(_common() + ROLE_SPREAD * _rng("roles/chain", role).standard_normal((len(CHARACTERS),) * 2))
    ends: NDArray[np.float64] = np.cumsum(weights, axis=1)
    return (ends / ends[:, -1:]).astype(np.float32)


def _common() -> NDArray[np.float64]:
    """Log weights that all roles share: how frequent a character is, and how well it follows another."""
    ranks = np.array([FREQUENT_FIRST.find(character) for character in CHARACTERS])
    popularity = np.where(ranks < 0, -9.0, -np.log(ranks + 2.0))
    return popularity + COMMON_SPREAD * _rng("roles/habit", 0).standard_normal((len(CHARACTERS),) * 2)


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
    rng = _rng("topics/sentences", user)
    words, lengths, _ = _posts(rng, SENTENCE_WORDS, longest=SENTENCE + 10)
    words, lengths = words[:, : SENTENCE - 1], lengths[:, None]
    place = np.arange(SENTENCE - 1)
    tokens = np.where(place < lengths, words + 1, np.where(place == lengths, WORD_EOS, PAD))
    return np.concatenate([np.full((len(tokens), 1), WORD_BOS), tokens], axis=1).astype(np.int16)


def _tagged(user: int) -> dict[str, NDArray[np.generic]]:
    rng = _rng("topics/posts", user)
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
    rng = _rng("topics/language", 0)
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
