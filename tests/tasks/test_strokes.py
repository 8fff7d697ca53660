import string
from itertools import pairwise

import numpy as np
import pytest

from clipline.errors import SettingError
from clipline.tasks.handwriting import CHARACTERS, MARGIN, distance_fields, skeletons


def sampled(character):
    """Points along the strokes of a character, at most 0.005 apart: (points, 2)."""
    points = []
    for stroke in skeletons()[CHARACTERS.index(character)]:
        for start, end in pairwise(stroke):
            share = np.linspace(0, 1, 2 + int(np.hypot(*(end - start)) / 0.005))[:, None]
            points.append(start + share * (end - start))
    return np.concatenate(points)


def cell_centres(size):
    return -MARGIN + (np.arange(size) + 0.5) * (1 + 2 * MARGIN) / size


def test_characters_stand_in_the_order_of_emnist_by_class():
    assert string.digits + string.ascii_uppercase + string.ascii_lowercase == CHARACTERS


@pytest.mark.parametrize("character", CHARACTERS)
def test_each_skeleton_lies_in_the_unit_square_and_fills_a_good_part_of_it(character):
    points = sampled(character)
    assert points.min() >= 0
    assert points.max() <= 1
    assert np.ptp(points[:, 1]) > 0.4


@pytest.mark.parametrize("character", "0I8Bgq")
def test_the_field_is_the_distance_to_the_nearest_of_many_points_of_the_strokes(character):
    field = distance_fields(62, 24)[CHARACTERS.index(character)]
    x, y = np.meshgrid(cell_centres(24), cell_centres(24)[::-1])
    cells = np.stack([x.ravel(), y.ravel()], axis=1)
    nearest = np.linalg.norm(cells[:, None] - sampled(character)[None], axis=2).min(axis=1)
    np.testing.assert_allclose(field.ravel(), nearest, atol=0.0026)  # the points stand at most 0.005 apart


def test_row_zero_of_a_field_is_the_top_of_the_page():
    bar_above, bar_below = distance_fields(62)[[CHARACTERS.index("T"), CHARACTERS.index("L")]]
    assert bar_above[:80].mean() < bar_above[80:].mean()
    assert bar_below[:80].mean() > bar_below[80:].mean()


def test_what_the_cache_hands_out_cannot_be_altered():
    with pytest.raises(ValueError, match="read-only"):
        distance_fields(10)[0, 0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        skeletons()[0][0][0, 0] = 1


def test_a_field_that_cannot_be_made_is_refused():
    with pytest.raises(SettingError, match="classes=63 must be a whole number at least 1 and at most 62"):
        distance_fields(63)
    with pytest.raises(SettingError, match="size=4 must be a whole number at least 8"):
        distance_fields(10, 4)
