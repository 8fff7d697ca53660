"""The skeletons of 62 handwritten characters, as strokes in the unit square, and the distance of the plane to each.

The square is ruled like a page: x grows to the right, y grows upwards; capitals and digits stand on the baseline (0.2)
and reach the top (1), small letters reach the middle line (0.66) or rise towards the top, tails hang down to 0.
strokes.json has them: a character is a list of strokes, a stroke a list of what the pen passes without being lifted,
points [x, y] and arcs [x, y, wide, high, start, end]. An arc is part of an ellipse around (x, y), in degrees counted
from east against the clock.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from ..errors import check_whole

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
