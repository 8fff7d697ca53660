import math
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from clipline.errors import SettingError
from clipline.random.streams import counter_bits, user_bits
from clipline.tasks import handwriting as writers
from clipline.tasks.handwriting import draw_writers, skeletons, writer_sizes


@pytest.fixture(scope="module")
def digits():
    """400 writers with about 30 digits each: offsets, pixels, labels."""
    return draw_writers(0, 400, seed=7, mean_examples=30.0)


def assert_same(one, other):
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)


def test_the_same_seed_draws_the_same_and_another_seed_draws_others():
    assert_same(draw_writers(0, 30, seed=3), draw_writers(0, 30, seed=3))
    sizes, others = writer_sizes(0, 30, seed=3), writer_sizes(0, 30, seed=4)
    assert np.mean(sizes == others) < 0.5
    (_, one, labels), (_, two, other_labels) = draw_writers(0, 30, seed=3), draw_writers(0, 30, seed=4)
    length = min(len(one), len(two))
    assert np.mean(labels[:length] == other_labels[:length]) < 0.3  # a tenth by chance
    assert np.all(np.any(one[:length] != two[:length], axis=(1, 2)))


@pytest.mark.parametrize("classes", [10, 62])
def test_a_writer_does_not_depend_on_who_else_is_drawn(classes):
    offsets, pixels, labels = draw_writers(100, 60, classes=classes, seed=1)
    for first, count in ((0, 1), (0, 23), (17, 1), (23, 37)):
        part = slice(offsets[first], offsets[first + count])
        expected = offsets[first : first + count + 1] - offsets[first], pixels[part], labels[part]
        assert_same(draw_writers(100 + first, count, classes=classes, seed=1), expected)


@pytest.mark.parametrize("block", [1, 3, 64, 1000])
def test_a_writer_does_not_depend_on_the_block_he_is_drawn_in(monkeypatch, block):
    expected = draw_writers(0, 20, seed=1)
    monkeypatch.setattr(writers, "BLOCK", block)
    assert_same(draw_writers(0, 20, seed=1), expected)


def test_the_matrix_product_of_the_wildest_handwriting_is_exact():
    signs = np.where(user_bits(5, 500 * len(writers._ALL_TRAITS)) >> np.uint64(63), 1, -1)
    extreme = writers._ALL_TRAITS[:, 0] + 3.47 * writers._ALL_TRAITS[:, 1:].sum(axis=1) * signs.reshape(500, -1)
    maps, functions = writers._maps(extreme), writers._PIXEL_FUNCTIONS
    assert (np.abs(maps) @ np.abs(functions)).max() < 2048
    np.testing.assert_array_equal(maps @ functions, maps.astype(np.float64) @ functions.astype(np.float64))


def test_an_image_is_what_the_plain_drawing_of_its_traits_gives():
    offsets, pixels, labels = draw_writers(0, 3, classes=62, seed=2)
    for example in range(0, offsets[-1], 4):
        writer = int(np.searchsorted(offsets, example, side="right")) - 1
        plain = plainly_drawn(2, writer, example - int(offsets[writer]), int(labels[example]))
        difference = np.abs(plain - pixels[example])
        assert difference.mean() < 3  # of 255 levels: the fast way looks distances up on a grid of a fifth of a pixel,
        assert difference.max() < 75  # and ink fades over about one pixel


def plainly_drawn(seed, writer, example, label):
    """One image, pixel by pixel: invert turn * slant * scale, and search the nearest of many skeleton points."""
    writer, example, label = np.array([writer]), np.array([example]), np.array([label])
    key = counter_bits(writers._writer_keys(seed, "image", writer), example)
    traits = writers._traits(seed, writer, label, key)[0]
    named = dict(zip(writers.TRAITS, traits, strict=False))
    bends = traits[len(writers.TRAITS) :].reshape(2, len(writers.WAVES), 2) * math.exp(named["haste"])
    turn, scale, aspect = named["turn"], named["scale"], named["aspect"]
    turned = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    slanted = np.array([[1, named["slant"]], [0, 1]])
    scaled = np.diag([math.exp(scale + aspect), math.exp(scale - aspect)]) * writers.UNIT
    back = np.linalg.inv(turned @ slanted @ scaled)
    points = np.concatenate(
        [a + np.linspace(0, 1, 40)[:, None] * (b - a) for s in skeletons()[label[0]] for a, b in pairwise(s)]
    )
    grain = user_bits(int(key[0]), 98).astype("<u8").view(np.uint8).reshape(28, 28) / 255
    image = np.empty((28, 28))
    for row in range(28):
        for column in range(28):
            page = np.array([column - 13.5, 13.5 - row])
            place = np.array([0.5, 0.55]) + back @ (page - [named["right"], named["up"]])
            for (across, along), bend_x, bend_y in zip(writers.WAVES, *bends, strict=True):
                phase = 2 * math.pi * (across * page[0] + along * page[1]) / writers.UNIT
                wave = np.array([math.sin(phase), math.cos(phase)]) / (2 * math.hypot(across, along))
                place += [bend_x @ wave, -bend_y @ wave]
            distance = np.linalg.norm(points - place, axis=1).min() * writers.UNIT * math.exp(scale)
            share = (math.exp(named["thickness"]) - distance) / math.exp(named["softness"]) + 0.5
            ink = min(named["darkness"], 1) * min(max(share, 0), 1)
            image[row, column] = 255 - 255 * ink * (1 - max(named["grain"], 0) * grain[row, column])
    return image


def test_sizes_have_the_mean_asked_for_and_are_as_uneven_as_a_log_normal():
    sizes = writer_sizes(0, 20_000, seed=0)
    # Log-normal with 0.7: standard deviation 11 * sqrt(exp(0.49) - 1) = 8.7, so four standard errors are 0.25,
    # which chance exceeds once in 16,000 seeds.
    assert abs(sizes.mean() - 12) < 0.25
    assert 7.5 < sizes.std() < 9.5
    assert 1 <= sizes.min() <= 3
    assert 60 < sizes.max() <= 99


def test_a_writers_character_resembles_his_own_more_than_another_writers(digits):
    offsets, pixels, labels = digits
    pairs = []  # of two examples of one character by one writer
    for start, end in pairwise(offsets):
        for label in range(10):
            mine = start + np.flatnonzero(labels[start:end] == label)[:2]
            pairs += [(label, *mine)] if len(mine) == 2 else []
    pairs = np.array(sorted(pairs))
    same_label = pairs[1:, 0] == pairs[:-1, 0]
    grey = pixels.astype(np.float64)
    own = np.linalg.norm(grey[pairs[:-1, 1]] - grey[pairs[:-1, 2]], axis=(1, 2))[same_label]
    others = np.linalg.norm(grey[pairs[:-1, 1]] - grey[pairs[1:, 2]], axis=(1, 2))[same_label]
    assert len(own) > 2000
    assert np.mean(own < others) > 0.8  # a half if there were no style


def test_class_means_recognise_most_digits_of_unseen_writers(digits):
    _, pixels, labels = digits
    means = np.stack([pixels[labels == label].mean(axis=0).ravel() for label in range(10)])
    _, unseen, truth = draw_writers(1_000_000, 100, seed=7)
    images = unseen.reshape(len(unseen), -1).astype(np.float64)
    nearest = ((means**2).sum(axis=1) - 2 * images @ means.T).argmin(axis=1)
    assert np.mean(nearest == truth) > 0.5  # 0.1 by chance


def test_drawing_takes_less_than_20_megabytes_beside_the_drawings():
    draw_writers(0, 1, classes=62, seed=0)  # imports, and tables that are made once
    tracemalloc.start()
    drawn = draw_writers(0, 1000, classes=62, seed=0)  # 9 MB; as float64 coordinates 150 MB
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6 + sum(array.nbytes for array in drawn)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"classes": 1}, "classes=1 must be a whole number at least 2 and at most 62: 10 are the digits"),
        ({"count": 0}, "count=0 must be a whole number at least 1 .*: writers are numbered from 0"),
        ({"first": -1}, "first=-1 must be a whole number at least 0 .*: writers are numbered from 0"),
        ({"mean_examples": 0.5}, "mean_examples=0.5 must be a finite number at least 1 .*: 12 is the default"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_name_value_limit_and_way_out(wrong, message):
    with pytest.raises(SettingError, match=message):
        draw_writers(**({"first": 0, "count": 2, "seed": 0} | wrong))
