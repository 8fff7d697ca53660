from itertools import combinations, pairwise

import numpy as np
import pytest

from clipline.plotting import ORDERED, ORDERED_DARK, PALETTE, PALETTE_DARK, new_figure, plain_log_labels


def luminance(colour):
    """As the web's rules for contrast have it: https://www.w3.org/TR/WCAG22/#dfn-relative-luminance."""
    parts = [value / 255 for value in bytes.fromhex(colour[1:])]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("scale", "paper"), [(ORDERED, "#ffffff"), (ORDERED_DARK, "#1d232b")])
def test_a_scale_gets_lighter_so_that_no_kind_of_colour_vision_is_needed(scale, paper):
    assert [luminance(colour) for colour in scale] == sorted(luminance(colour) for colour in scale)
    assert min(contrast(a, b) for a, b in pairwise(scale)) > 1.3
    assert min(contrast(colour, paper) for colour in scale) > 2


# Linear red, green and blue as seen without M cones, without L cones: Machado, Oliveira, Fernandes 2009, severity 1.
DEUTERANOPE = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
PROTANOPE = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)


def seen(colour, eye):
    """The colour in CIELAB as this eye has it; distances are those of CIE 1976, where 2.3 can just be noticed."""
    parts = np.array(list(bytes.fromhex(colour[1:]))) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(eye @ linear, 0, 1) / (TO_XYZ @ np.ones(3))
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eye", [np.eye(3), DEUTERANOPE, PROTANOPE], ids=["usual", "deuteranope", "protanope"])
@pytest.mark.parametrize("colours", [PALETTE, PALETTE_DARK, ORDERED, ORDERED_DARK])
def test_no_two_colours_look_alike_to_any_of_these_eyes(colours, eye):
    each = [seen(colour, np.array(eye)) for colour in colours]
    assert min(np.linalg.norm(one - other) for one, other in combinations(each, 2)) > 12
    crimson, green = (seen(colour, np.array(DEUTERANOPE)) for colour in ("#dc143c", "#008000"))
    assert np.linalg.norm(crimson - green) < 12  # which do look alike


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("values", [(0.8175, 0.8185), (0.8175, 0.81752)])
def test_labels_of_an_axis_say_where_they_stand_however_small_the_step(values, scale):
    figure, (axis,) = new_figure(1, 1, width=5, height=3)
    axis.plot(values)
    if scale == "log":
        axis.set_yscale("log")
        plain_log_labels(axis)
    figure.canvas.draw()
    low, high = axis.get_ylim()
    ticks = [*axis.yaxis.get_major_ticks(), *axis.yaxis.get_minor_ticks()]
    shown = [(tick.get_loc(), tick.label1.get_text()) for tick in ticks if low <= tick.get_loc() <= high]
    assert len(shown) > 3
    for place, text in shown:
        assert float(text) == pytest.approx(place, rel=1e-9)
