"""The skeletons of 62 handwritten characters, as strokes in the unit square, and the distance of the plane to each.

The square is ruled like a page: x grows to the right, y grows upwards; capitals and digits stand on the baseline and
reach the top, small letters reach the middle line or rise towards the top, tails hang down to 0.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..errors import check_whole

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # the order of EMNIST by class
TOP, MIDDLE, BASE = 1.0, 0.66, 0.2
LOW = "acemnorsuvwxz"  # letters between base and middle, which people write larger when they stand alone:
ENLARGED = np.array([1.4, 1.55])  # by so much across and upwards, which makes c, o, s, v, w, x, z nearly capitals
MARGIN = 0.25  # the fields reach this far beyond each side of the unit square

Stroke = NDArray[np.float64]  # (points, 2): x, y
_Point = tuple[float, float]


def _line(*points: _Point) -> Stroke:
    return np.array(points, dtype=np.float64)


def _arc(x: float, y: float, wide: float, high: float, start: float, end: float) -> Stroke:
    """Part of an ellipse around (x, y), from `start` to `end` degrees, counted from east against the clock."""
    turns = np.radians(np.linspace(start, end, 2 + round(abs(end - start) / 20)))
    return np.stack([x + wide * np.cos(turns), y + high * np.sin(turns)], axis=1)


def _oval(x: float, y: float, wide: float, high: float) -> Stroke:
    return _arc(x, y, wide, high, 90, 450)


def _path(*parts: Stroke | _Point) -> Stroke:
    """One stroke through all parts: the pen stays down between them."""
    return np.concatenate([np.atleast_2d(part) for part in parts])


def _digits() -> dict[str, list[Stroke]]:
    return {
        "0": [_oval(0.5, 0.6, 0.24, 0.4)],
        "1": [_line((0.34, 0.82), (0.53, TOP), (0.53, BASE))],
        "2": [_path(_arc(0.5, 0.76, 0.24, 0.24, 165, -35), (0.24, BASE), (0.78, BASE))],
        "3": [_path(_arc(0.47, 0.81, 0.23, 0.19, 150, -80), _arc(0.47, 0.41, 0.28, 0.21, 80, -150))],
        "4": [_line((0.36, TOP), (0.24, 0.48), (0.8, 0.48)), _line((0.66, 0.86), (0.62, BASE))],
        "5": [_path((0.74, TOP), (0.34, TOP), (0.3, 0.65), _arc(0.47, 0.46, 0.27, 0.26, 110, -150))],
        "6": [_path(_arc(0.7, 0.46, 0.45, 0.54, 98, 175), _arc(0.5, 0.42, 0.24, 0.22, 180, 540))],
        "7": [_line((0.24, TOP), (0.77, TOP), (0.42, BASE))],
        "8": [_oval(0.5, 0.81, 0.2, 0.19), _oval(0.5, 0.41, 0.25, 0.21)],
        "9": [_path(_arc(0.48, 0.77, 0.22, 0.23, 0, 360), (0.66, BASE))],
    }


def _capitals() -> dict[str, list[Stroke]]:
    return {
        "A": [_line((0.2, BASE), (0.5, TOP), (0.8, BASE)), _line((0.31, 0.47), (0.69, 0.47))],
        "B": [
            _line((0.27, BASE), (0.27, TOP)),
            _path((0.27, TOP), _arc(0.48, 0.81, 0.22, 0.19, 90, -90), (0.27, 0.62)),
            _path((0.48, 0.62), _arc(0.5, 0.41, 0.26, 0.21, 90, -90), (0.27, BASE)),
        ],
        "C": [_arc(0.55, 0.6, 0.33, 0.4, 48, 312)],
        "D": [_line((0.25, BASE), (0.25, TOP)), _path((0.25, TOP), _arc(0.4, 0.6, 0.4, 0.4, 90, -90), (0.25, BASE))],
        "E": [_line((0.74, TOP), (0.28, TOP), (0.28, BASE), (0.76, BASE)), _line((0.28, 0.61), (0.66, 0.61))],
        "F": [_line((0.76, TOP), (0.3, TOP), (0.3, BASE)), _line((0.3, 0.61), (0.67, 0.61))],
        "G": [_path(_arc(0.52, 0.6, 0.33, 0.4, 50, 325), (0.8, 0.56), (0.54, 0.56))],
        "H": [_line((0.24, BASE), (0.24, TOP)), _line((0.76, BASE), (0.76, TOP)), _line((0.24, 0.6), (0.76, 0.6))],
        "I": [_line((0.5, BASE), (0.5, TOP)), _line((0.43, TOP), (0.57, TOP)), _line((0.43, BASE), (0.57, BASE))],
        "J": [_path((0.62, TOP), _arc(0.42, 0.42, 0.2, 0.22, 0, -165)), _line((0.42, TOP), (0.82, TOP))],
        "K": [_line((0.28, BASE), (0.28, TOP)), _line((0.74, TOP), (0.28, 0.55), (0.77, BASE))],
        "L": [_line((0.3, TOP), (0.3, BASE), (0.75, BASE))],
        "M": [_line((0.17, BASE), (0.22, TOP), (0.5, 0.42), (0.78, TOP), (0.83, BASE))],
        "N": [_line((0.24, BASE), (0.24, TOP), (0.76, BASE), (0.76, TOP))],
        "O": [_oval(0.5, 0.6, 0.32, 0.4)],
        "P": [_line((0.3, BASE), (0.3, TOP)), _path((0.3, TOP), _arc(0.5, 0.79, 0.24, 0.21, 90, -90), (0.3, 0.58))],
        "Q": [_oval(0.5, 0.6, 0.35, 0.4), _line((0.57, 0.42), (0.86, 0.12))],
        "R": [
            _line((0.28, BASE), (0.28, TOP)),
            _path((0.28, TOP), _arc(0.49, 0.8, 0.24, 0.2, 90, -90), (0.28, 0.6)),
            _line((0.46, 0.6), (0.78, BASE)),
        ],
        "S": [_path(_arc(0.51, 0.81, 0.25, 0.19, 35, 260), _arc(0.49, 0.41, 0.27, 0.21, 80, -150))],
        "T": [_line((0.18, TOP), (0.82, TOP)), _line((0.5, TOP), (0.5, BASE))],
        "U": [_path((0.24, TOP), _arc(0.5, 0.47, 0.26, 0.27, 180, 360), (0.76, TOP))],
        "V": [_line((0.2, TOP), (0.5, BASE), (0.8, TOP))],
        "W": [_line((0.12, TOP), (0.31, BASE), (0.5, 0.84), (0.69, BASE), (0.88, TOP))],
        "X": [_line((0.22, TOP), (0.78, BASE)), _line((0.78, TOP), (0.22, BASE))],
        "Y": [_line((0.22, TOP), (0.5, 0.6), (0.5, BASE)), _line((0.78, TOP), (0.5, 0.6))],
        "Z": [_line((0.24, TOP), (0.76, TOP), (0.23, BASE), (0.79, BASE))],
    }


def _small_letters() -> dict[str, list[Stroke]]:
    dot = _line((0.52, 0.83), (0.52, 0.87))
    return {
        "a": [_oval(0.47, 0.43, 0.22, 0.23), _line((0.69, MIDDLE), (0.69, 0.27), (0.77, BASE))],
        "b": [_line((0.3, TOP), (0.3, BASE)), _oval(0.51, 0.42, 0.21, 0.22)],
        "c": [_arc(0.53, 0.43, 0.23, 0.23, 45, 315)],
        "d": [_line((0.69, TOP), (0.69, BASE)), _oval(0.48, 0.42, 0.21, 0.22)],
        "e": [_path((0.29, 0.44), (0.72, 0.46), _arc(0.5, 0.43, 0.22, 0.23, 10, 315))],
        "f": [_path(_arc(0.6, 0.84, 0.16, 0.16, 30, 180), (0.44, BASE)), _line((0.25, 0.62), (0.66, 0.62))],
        "g": [_oval(0.48, 0.45, 0.21, 0.21), _path((0.69, MIDDLE), _arc(0.46, 0.17, 0.23, 0.17, 0, -150))],
        "h": [_line((0.3, TOP), (0.3, BASE)), _path((0.3, 0.4), _arc(0.5, 0.46, 0.2, 0.2, 170, 0), (0.7, BASE))],
        "i": [_line((0.52, MIDDLE), (0.52, BASE)), dot],
        "j": [_path((0.52, MIDDLE), _arc(0.36, 0.15, 0.16, 0.15, 0, -150)), dot],
        "k": [_line((0.32, TOP), (0.32, BASE)), _line((0.66, 0.68), (0.32, 0.42), (0.7, BASE))],
        "l": [_path((0.48, TOP), _arc(0.56, 0.28, 0.08, 0.08, 180, 270))],
        "m": [
            _line((0.16, MIDDLE), (0.16, BASE)),
            _path((0.16, 0.42), _arc(0.33, 0.49, 0.17, 0.17, 165, 0), (0.5, BASE)),
            _path((0.5, 0.42), _arc(0.67, 0.49, 0.17, 0.17, 165, 0), (0.84, BASE)),
        ],
        "n": [_line((0.3, MIDDLE), (0.3, BASE)), _path((0.3, 0.4), _arc(0.5, 0.46, 0.2, 0.2, 170, 0), (0.7, BASE))],
        "o": [_oval(0.5, 0.43, 0.23, 0.23)],
        "p": [_line((0.3, MIDDLE), (0.3, 0.0)), _oval(0.51, 0.44, 0.21, 0.22)],
        "q": [_oval(0.48, 0.44, 0.21, 0.22), _line((0.69, MIDDLE), (0.69, 0.0), (0.82, 0.12))],
        "r": [_line((0.37, MIDDLE), (0.37, BASE)), _path((0.37, 0.42), _arc(0.57, 0.43, 0.19, 0.23, 165, 45))],
        "s": [_path(_arc(0.51, 0.55, 0.18, 0.11, 35, 260), _arc(0.49, 0.32, 0.2, 0.12, 80, -150))],
        "t": [_path((0.46, 0.92), _arc(0.59, 0.33, 0.13, 0.13, 180, 310)), _line((0.27, MIDDLE), (0.69, MIDDLE))],
        "u": [_path((0.28, MIDDLE), _arc(0.49, 0.42, 0.21, 0.22, 180, 360)), _line((0.7, MIDDLE), (0.7, BASE))],
        "v": [_line((0.28, MIDDLE), (0.5, BASE), (0.72, MIDDLE))],
        "w": [_line((0.18, MIDDLE), (0.33, BASE), (0.5, 0.58), (0.67, BASE), (0.82, MIDDLE))],
        "x": [_line((0.3, MIDDLE), (0.7, BASE)), _line((0.7, MIDDLE), (0.3, BASE))],
        "y": [_line((0.28, MIDDLE), (0.51, 0.24)), _line((0.74, MIDDLE), (0.36, 0.0))],
        "z": [_line((0.29, MIDDLE), (0.7, MIDDLE), (0.28, BASE), (0.73, BASE))],
    }


@lru_cache(maxsize=1)
def skeletons() -> tuple[tuple[Stroke, ...], ...]:
    """The strokes of each of the 62 characters, in the order of `CHARACTERS`. The arrays are not writable."""
    small = _small_letters()
    for character in LOW:
        small[character] = [(stroke - (0.5, BASE)) * ENLARGED + (0.5, BASE) for stroke in small[character]]
    drawn = _digits() | _capitals() | small
    for strokes in drawn.values():
        for stroke in strokes:
            stroke.setflags(write=False)
    return tuple(tuple(drawn[character]) for character in CHARACTERS)


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
