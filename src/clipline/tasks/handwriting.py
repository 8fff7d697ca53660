"""Handwriting, the embedded task: recognise characters by generated writers. A stand-in for federated EMNIST.

Everything is a function of seed, writer and example number alone, so a writer's images do not depend on how many
others there are, nor on the blocks they are made in. As in EMNIST, paper is 255 and full ink is 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache, partial
from importlib import resources
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.population import Population
from ..errors import check_number, check_whole
from ..federated.local_sgd import Batch
from ..random.streams import Streams, counter_bits
from .metrics import held_out
from .task import LoadedTask, Task, initialised
from .train_settings import TrainSettings

# The skeletons of 62 handwritten characters, as strokes in the unit square, and the distance of the plane to each.
#
# The square is ruled like a page: x grows to the right, y upwards; capitals and digits stand on the baseline (0.2)
# and reach the top (1), small letters reach the middle line (0.66) or rise towards the top, tails hang down to 0.
# strokes.json has them: a character is a list of strokes, a stroke a list of what the pen passes without being lifted,
# points [x, y] and arcs [x, y, wide, high, start, end]. An arc is part of an ellipse around (x, y), in degrees counted
# from east against the clock.

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # the order of EMNIST by class
LOW = "acemnorsuvwxz"  # letters between base and middle, which people write larger when they stand alone:
ENLARGED = np.array([1.4, 1.55])  # by so much across and upwards, which makes c, o, s, v, w, x, z nearly capitals
ON_BASE = np.array([0.5, 0.2])  # the point from which they grow
MARGIN = 0.25  # the fields reach this far beyond each side of the unit square

Stroke = NDArray[np.float64]  # (points, 2): x, y


def _stroke(parts: list[list[float]], enlarged: bool) -> Stroke:
    points = []
    for x, y, *arc in parts:
        if arc:
            wide, high, start, end = arc
            turns = np.radians(np.linspace(start, end, 2 + round(abs(end - start) / 20)))
            points.append(np.stack([x + wide * np.cos(turns), y + high * np.sin(turns)], axis=1))
        else:
            points.append(np.array([[x, y]]))
    stroke = np.concatenate(points)
    if enlarged:
        stroke = (stroke - ON_BASE) * ENLARGED + ON_BASE
    stroke.setflags(write=False)
    return stroke


@lru_cache(maxsize=1)
def skeletons() -> tuple[tuple[Stroke, ...], ...]:
    """The strokes of each of the 62 characters, in the order of `CHARACTERS`. The arrays are not writable."""
    drawn = json.loads(resources.files(__package__).joinpath("strokes.json").read_text(encoding="utf-8"))
    return tuple(tuple(_stroke(parts, one in LOW) for parts in drawn[one]) for one in CHARACTERS)


@lru_cache(maxsize=4)
def distance_fields(classes: int, size: int = 160) -> NDArray[np.float32]:
    """How far each cell is from the skeleton of each of the first `classes` characters, in sides of the unit square.

    (classes, size, size) float32, not writable: row 0 is the top, and the cells, measured at their centres, divide the
    square from -MARGIN to 1 + MARGIN evenly.
    """
    check_whole("classes", classes, at_least=1, at_most=len(CHARACTERS), way_out="there are 62 characters to draw")
    check_whole("size", size, at_least=8, at_most=1024, way_out="160 is fine enough for 28x28 images")
    centres = (np.arange(size) + 0.5) * (1 + 2 * MARGIN) / size - MARGIN
    x, y = centres[None, :], centres[::-1, None]
    fields = np.stack([_distance(strokes, x, y) for strokes in skeletons()[:classes]]).astype(np.float32)
    fields.setflags(write=False)
    return fields


def _distance(strokes: tuple[Stroke, ...], x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """The distance from (x, y), broadcast together, to the nearest point of the strokes."""
    squared: NDArray[np.float64] = np.full(np.broadcast_shapes(x.shape, y.shape), np.inf)
    for stroke in strokes:
        for (x0, y0), (dx, dy) in zip(stroke[:-1], np.diff(stroke, axis=0), strict=True):
            squared_length = dx * dx + dy * dy
            if squared_length == 0:  # two parts of a path that meet: their point belongs to the neighbouring segments
                continue
            along = np.clip(((x - x0) * dx + (y - y0) * dy) / squared_length, 0, 1)
            np.minimum(squared, (x - x0 - along * dx) ** 2 + (y - y0 - along * dy) ** 2, out=squared)
    return np.sqrt(squared, out=squared)


SIDE = 28  # pixels
UNIT = 22.0  # pixels to the unit square of the skeletons, for a writer of middle scale
CENTRE = (0.5, 0.55)  # the point of the unit square that falls on the centre of the image
FIELD = 160  # cells to a side of the distance fields; a cell is about a fifth of a pixel
BLOCK = 256  # images drawn at once: their arrays of 0.8 MB stay in the processor's cache

UNEVENNESS = 0.7  # standard deviation of the logarithm of the writers' sizes
PREFERENCE = 0.5  # standard deviation of the logarithm of a writer's weight of a character


class Trait(NamedTuple):
    """A measure of handwriting: its mean, and its standard deviation among writers, one's characters, their images."""

    mean: float
    writer: float
    character: float
    image: float


TRAITS = {
    "slant": Trait(0.1, 0.15, 0.05, 0.05),  # shift to the right for one upwards
    "turn": Trait(0.0, 0.06, 0.04, 0.05),  # radians against the clock
    "scale": Trait(-0.1, 0.07, 0.09, 0.05),  # logarithm; 0 is UNIT pixels
    "aspect": Trait(0.0, 0.07, 0.05, 0.04),  # logarithm; positive is wide and low
    "right": Trait(0.0, 0.4, 0.4, 0.5),  # pixels
    "up": Trait(0.0, 0.4, 0.7, 0.5),  # pixels
    "haste": Trait(0.0, 0.22, 0.0, 0.1),  # logarithm; multiplies the bend
    "thickness": Trait(0.1, 0.22, 0.0, 0.06),  # logarithm of half the width of the pen in pixels
    "softness": Trait(0.0, 0.2, 0.0, 0.05),  # logarithm of the pixels over which ink fades
    "darkness": Trait(0.88, 0.05, 0.0, 0.015),  # share of full ink, cut at 1
    "grain": Trait(0.2, 0.1, 0.0, 0.02),  # largest share of a pixel's ink that is missing, cut at 0
}
WAVES = ((0.5, 0.0), (0.0, 0.5), (0.5, 0.5), (0.5, -0.5), (1.0, 0.0), (0.0, 1.0))  # cycles per UNIT, right and up
BEND = Trait(0.0, 0.025, 0.026, 0.017)  # of sine and cosine of a wave of half a cycle, in sides of the unit square
# Two normal amplitudes, of sine and cosine, are one wave of random height and random phase. Shorter waves are lower in
# proportion, or the plane would fold and the ink run together.

_COLUMNS = list(TRAITS)
_ALL_TRAITS = np.array([*TRAITS.values(), *[BEND] * (4 * len(WAVES))])  # (traits, 4)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Words = NDArray[np.uint64]
Whole = NDArray[np.int64]
Real = NDArray[np.float64]
Pixels = NDArray[np.uint8]


def draw_writers(
    first: int, count: int, *, classes: int = 10, seed: int, mean_examples: float = 12.0
) -> tuple[Whole, Pixels, Pixels]:
    """The handwriting of writers `first` to `first + count - 1`: offsets, pixels, labels.

    offsets (count + 1,) int64: writer `first + i` owns examples offsets[i] to offsets[i + 1]; pixels (examples, 28, 28)
    uint8, paper 255; labels (examples,) uint8, the place in `CHARACTERS`. Drawing takes less than 20 MB beside these.
    """
    check_whole("classes", classes, at_least=2, at_most=len(CHARACTERS), way_out="10 are the digits, 62 with letters")
    sizes = writer_sizes(first, count, seed=seed, mean_examples=mean_examples)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    total = int(offsets[-1])
    pixels, labels = np.empty((total, SIDE, SIDE), np.uint8), np.empty(total, np.uint8)
    for start in range(0, total, BLOCK):
        examples = np.arange(start, min(start + BLOCK, total))
        owners = np.searchsorted(offsets, examples, side="right") - 1
        block = slice(start, start + len(examples))
        labels[block] = _labels(seed, first + owners, examples - offsets[owners], classes)
        pixels[block] = _images(seed, first + owners, examples - offsets[owners], labels[block], classes)
    return offsets, pixels, labels


def writer_sizes(first: int, count: int, *, seed: int, mean_examples: float = 12.0) -> Whole:
    """How many examples each of the writers has: (count,) int64, at least 1 and `mean_examples` on average.

    One plus a rounded log-normal number that is never above 9 times its mean: from 1 to 99 with a mean of 12.
    """
    way_out = "writers are numbered from 0, and a range of one or more is drawn"
    check_whole("first", first, at_least=0, at_most=2**40, way_out=way_out)
    check_whole("count", count, at_least=1, at_most=2**32, way_out=way_out)
    check_number("mean_examples", mean_examples, at_least=1, at_most=10_000, way_out="12 is the default")
    keys = _writer_keys(seed, "size", np.arange(first, first + count))
    half = UNEVENNESS * np.sqrt(3) / 2
    mean_of_exp = (np.sinh(half) / half) ** 4  # of exp(UNEVENNESS * _normal), which is a sum of four uniform numbers
    extra = (mean_examples - 1) * np.exp(UNEVENNESS * _normal(counter_bits(keys, 0))) / mean_of_exp
    sizes: Whole = 1 + np.floor(extra + _uniform(counter_bits(keys, 1))).astype(np.int64)  # rounds without bias
    return sizes


def _writer_keys(seed: int, purpose: str, writers: Whole) -> Words:
    """One key a writer: a hash of seed, purpose and writer."""
    return counter_bits(np.array([Streams(seed).user_key(f"writers/{purpose}", 0, 0)], np.uint64), writers)


def _uniform(words: Words) -> Real:
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _normal(words: Words) -> Real:
    """Mean 0, variance 1, nearly normal: the sum of a word's four quarters. Never beyond 3.47: no outliers."""
    quarters: Words = np.zeros_like(words)
    for shift in (0, 16, 32, 48):
        quarters += (words >> np.uint64(shift)) & np.uint64(0xFFFF)
    return (quarters.astype(np.float64) - 2 * 0xFFFF) * (3**0.5 / 2**16)


def _labels(seed: int, writers: Whole, examples: Whole, classes: int) -> Whole:
    """The label of each example, drawn from its writer's own mixture of characters."""
    people, place = np.unique(writers, return_inverse=True)
    weights = np.exp(
        PREFERENCE * _normal(counter_bits(_writer_keys(seed, "mixture", people)[:, None], np.arange(classes)))
    )
    ends = np.cumsum(weights, axis=1)
    draws = _uniform(counter_bits(_writer_keys(seed, "label", writers), examples)) * ends[place, -1]
    passed: Whole = np.sum(draws[:, None] >= ends[place, :-1], axis=1, dtype=np.int64)
    return passed


def _images(seed: int, writers: Whole, examples: Whole, labels: NDArray[np.integer], classes: int) -> Pixels:
    """Draw each example: (n,) writers, examples of the writer and labels to (n, 28, 28) uint8."""
    images = counter_bits(_writer_keys(seed, "image", writers), examples)
    traits = _traits(seed, writers, labels, images)
    named = dict(zip(_COLUMNS, traits.T, strict=False))
    distance = _distances(_maps(traits), labels, classes)
    full = 255 * np.minimum(named["darkness"], 1)
    slope = full / np.exp(named["softness"])  # ink per pixel of distance
    distance *= _column(-slope * UNIT * np.exp(named["scale"]))
    distance += _column(slope * np.exp(named["thickness"]) + full / 2)
    ink = np.clip(distance, 0, _column(full), out=distance)
    grain = counter_bits(images[:, None], np.arange(SIDE * SIDE // 8)).astype("<u8", copy=False).view(np.uint8)
    kept = grain * _column(-np.maximum(named["grain"], 0) / 255)
    kept += np.float32(1)
    ink *= kept
    return (np.float32(255.5) - ink).astype(np.uint8).reshape(-1, SIDE, SIDE)


def _traits(seed: int, writers: Whole, labels: NDArray[np.integer], images: Words) -> Real:
    """(n, traits): the mean plus deviations of the writer, of the writer's version of the character, of the image."""
    of_writer = _writer_keys(seed, "hand", writers)
    of_character = counter_bits(_writer_keys(seed, "character", writers), labels.astype(np.int64))
    of_image = images ^ _GOLDEN  # the words under `images` itself are used for the grain
    index = np.arange(len(_ALL_TRAITS))
    traits = np.tile(_ALL_TRAITS[:, 0], (len(writers), 1))
    for keys, spread in zip((of_writer, of_character, of_image), _ALL_TRAITS.T[1:], strict=True):
        traits += spread * _normal(counter_bits(keys[:, None], index))
    return traits


def _maps(traits: Real) -> NDArray[np.float32]:
    """From pixels back to cells of the distance field: (2, n, functions), the columns first, then the rows.

    The inverse of scaling, slanting, turning, shifting; and the bend. The functions are those of `_pixel_functions`.
    """
    slant, turn, scale, aspect, right, up, haste = traits[:, :7].T
    cos, sin = np.cos(turn), np.sin(turn)
    across = np.stack([cos + slant * sin, sin - slant * cos]) * np.exp(-scale - aspect) / UNIT  # per pixel right, up
    upward = np.stack([-sin, cos]) * np.exp(-scale + aspect) / UNIT
    bend = (traits[:, len(TRAITS) :] * np.exp(haste)[:, None]).reshape(len(traits), 2, -1)
    cells = FIELD / (1 + 2 * MARGIN)
    x = [CENTRE[0] + MARGIN - across[0] * right - across[1] * up, across[0] / 2, across[1] / 2, *bend[:, 0].T]
    y = [1 - CENTRE[1] + MARGIN + upward[0] * right + upward[1] * up, -upward[0] / 2, -upward[1] / 2, *bend[:, 1].T]
    return (np.round(np.stack([np.stack(x, -1), np.stack(y, -1)]) * (cells * 256)) / 256).astype(np.float32)


def _pixel_functions() -> NDArray[np.float32]:
    """(functions, 784): one, twice the pixels right and up of the centre, sine and cosine of each wave.

    These are multiples of 1/32 and the maps are multiples of 1/256, so sums below 2048, which no handwriting reaches,
    are exact in float32 in any order: the matrix product is the same on every machine and in blocks of every length.
    """
    twice = np.arange(1 - SIDE, SIDE, 2)
    right, up = np.tile(twice, SIDE), np.repeat(-twice, SIDE)
    waves = [
        wave(np.pi * (across * right + along * up) / UNIT) / (2 * np.hypot(across, along))
        for across, along in WAVES
        for wave in (np.sin, np.cos)
    ]
    return (np.round(np.stack([np.ones(SIDE * SIDE), right, up, *waves]) * 32) / 32).astype(np.float32)


_PIXEL_FUNCTIONS = _pixel_functions()


def _distances(maps: NDArray[np.float32], labels: NDArray[np.integer], classes: int) -> NDArray[np.float32]:
    """How far each pixel is from the skeleton: (n, 784) float32, in sides of the unit square. Far off it is cut."""
    columns, rows = maps[0] @ _PIXEL_FUNCTIONS, maps[1] @ _PIXEL_FUNCTIONS
    np.clip(columns, 0, FIELD - 1, out=columns)
    np.clip(rows, 0, FIELD - 1, out=rows)
    np.floor(rows, out=rows)
    rows += _column(labels.astype(np.float64) * FIELD)
    rows *= np.float32(FIELD)
    rows += columns  # below 2^21: a column may be rounded by an eighth of a cell
    distances: NDArray[np.float32] = np.take(distance_fields(classes, FIELD), rows.astype(np.intp), mode="clip")
    return distances


def _column(values: Real) -> NDArray[np.float32]:
    return values.astype(np.float32)[:, None]


TEST_WRITERS = 1000
_TEST_FIRST = 1 << 36  # test writers are numbered far above any training writer, so that nobody is both
_POPULATION_SEED = 2021  # the population is the same whatever the seed of the training


class HandwritingNet(nn.Module):
    """Two strided convolutions and a linear layer, small enough for a phone and for noise in every weight."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5, stride=2)
        self.conv2 = nn.Conv2d(8, 16, 5, stride=2)
        self.out = nn.Linear(16 * 4 * 4, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """(batch, 28, 28) uint8, paper 255 -> (batch, classes) logits. Ink becomes 1 and paper 0."""
        ink = 1 - pixels.to(self.out.weight.dtype).unsqueeze(1) / 255
        hidden = F.relu(self.conv2(F.relu(self.conv1(ink))))
        logits: Tensor = self.out(hidden.flatten(1))
        return logits


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """(batch,): cross-entropy, of which the mean is taken."""
    return F.cross_entropy(model(batch["pixels"]), batch["labels"].long(), reduction="none")


def load(settings: TrainSettings) -> LoadedTask:
    """Draw the training writers, and test writers whom no training ever sees."""
    classes = settings.classes or 10  # the digits
    population = writers_population(0, settings.drawn_users(), classes)
    test = writers_population(_TEST_FIRST, TEST_WRITERS, classes)
    make = partial(initialised, partial(HandwritingNet, classes))
    rows = held_out(test, str(settings.evaluate_on))
    pixels = torch.from_numpy(test.fields["pixels"][rows])
    labels = torch.from_numpy(test.fields["labels"][rows])

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        device = next(model.parameters()).device
        guesses = torch.cat([model(block.to(device)).argmax(dim=1) for block in torch.split(pixels, 1000)])
        return {"accuracy": float((guesses.cpu() == labels).double().mean())}

    return LoadedTask(population, make, loss, evaluate, baseline=float(labels.bincount().max()) / len(labels))


def writers_population(first: int, users: int, classes: int, mean_examples: float = 12.0) -> Population:
    """`users` writers from number `first` on, with fields `pixels` (28, 28) uint8, paper 255, and `labels` uint8.

    Classes are numbered as in EMNIST: 10 digits, 26 capitals, 26 small letters.
    """
    offsets, pixels, labels = draw_writers(
        first, users, classes=classes, seed=_POPULATION_SEED, mean_examples=mean_examples
    )
    return Population(offsets, {"pixels": pixels, "labels": labels})


TASK = Task(
    name="handwriting",
    title="handwriting of {users} drawn writers",
    metric_name="accuracy",
    settings=TrainSettings(
        task="handwriting",
        rounds=150,
        cohort_size=300,
        client_lr=0.5,
        batch_size=20,
        server="sgd",  # the paper's: its clip and rates are shown here
        server_lr=1.0,
        fixed_clip=0.7,
        population_size=40_000,
        classes=10,
        epsilon=4.0,
        clip_start=0.0035,  # a hundred times below the median update norm of the first round
        evaluate_on="original",  # all test writers: nothing is chosen by them here
    ),
    load=load,
)
