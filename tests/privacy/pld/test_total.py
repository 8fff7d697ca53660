"""A total loss, read at an epsilon or a delta: by hand, and against the sum written out."""

import math

import numpy as np
import pytest

from clipline.privacy.pld.total import TotalLoss, block_of, untilt


def total_of(masses, start=0.0, step=0.5, **changes):
    """A total that was not tilted, with nothing charged and no rounding."""
    known = {
        "tilt": 1.0,
        "centre": 0.0,
        "lowest": start,
        "log_scale": 0.0,
        "rounding": 0.0,
        "rounding_gain": 0.0,
        "charged": 0.0,
    }
    return TotalLoss(start=start, step=step, masses=np.asarray(masses, dtype=float), **{**known, **changes})


def test_delta_is_the_hockey_stick_sum():
    # Losses 0, 1/2, 1, 3/2 with chances 1/2, 1/4, 1/8, 1/8. At epsilon 1/2: (1 - e^-1/2) / 8 + (1 - e^-1) / 8.
    total = total_of([0.5, 0.25, 0.125, 0.125])
    assert total.delta(0.5) == pytest.approx((2 - math.exp(-0.5) - math.exp(-1)) / 8, rel=1e-15)
    assert total.delta(1.5) == 0
    # Between two points of the lattice it is the same sum.
    assert total.delta(0.75) == pytest.approx((2 - math.exp(-0.25) - math.exp(-0.75)) / 8, rel=1e-14)


def test_what_is_charged_and_what_rounding_may_have_cost_come_on_top():
    plain = total_of([0.5, 0.25, 0.125, 0.125])
    charged = total_of([0.5, 0.25, 0.125, 0.125], charged=1e-3)
    assert charged.delta(0.5) == pytest.approx(plain.delta(0.5) + 1e-3, rel=1e-14)
    # A rounding error at `centre` falls with the tilt: by exp(-2 / 2) from 0 to 1/2 at a tilt of 2.
    rounded = total_of([0.5, 0.25, 0.125, 0.125], rounding=1e-3, tilt=2.0)
    assert rounded.delta(0.5) == pytest.approx(plain.delta(0.5) + 1e-3 * math.exp(-1), rel=1e-14)
    assert rounded.rounding_share(0.01, 0.5) == pytest.approx(0.1 * math.exp(-1), rel=1e-14)


def test_the_scale_multiplies_the_sums():
    plain, scaled = (total_of([0.5, 0.25, 0.125, 0.125], log_scale=scale) for scale in (0.0, math.log(1e-9)))
    assert scaled.delta(0.5) == pytest.approx(1e-9 * plain.delta(0.5), rel=1e-12)
    assert scaled.epsilon(1e-9 * plain.delta(0.5)) == pytest.approx(plain.epsilon(plain.delta(0.5)), rel=1e-9)


@pytest.mark.parametrize("delta", [0.2, 0.05, 1e-3, 1e-9, 1e-14])
@pytest.mark.parametrize("size", [64, 640, 7 * 512])
def test_epsilon_undoes_delta(size, delta):
    # A normal total of mean 2 and deviation 1.5, and beyond the lattice nothing.
    step = 30 / size
    losses = -10 + step * np.arange(size)
    masses = np.exp(-(((losses - 2) / 1.5) ** 2) / 2)
    total = total_of(masses / masses.sum(), start=-10.0, step=step)
    epsilon = total.epsilon(delta)
    assert total.delta(epsilon) <= delta * (1 + 1e-9)
    assert total.delta(epsilon - 1e-6 * abs(epsilon)) > delta * (1 - 1e-12)


@pytest.mark.parametrize("delta", [0.3, 1e-4, 1e-11])
@pytest.mark.parametrize("step", [0.004, 0.5, 3.0])
def test_the_first_point_within_a_delta_is_that_of_a_plain_search(step, delta):
    # 2048 points in blocks of 512. At a step of 3 a block is too long for running sums, and bisection is on its own.
    rng = np.random.default_rng(11)
    masses = np.exp(-0.01 * np.arange(2048)) * rng.uniform(0.5, 1.5, 2048)
    total = total_of(masses / masses.sum(), start=-1.0, step=step)
    sums = [total.delta(-1.0 + step * index) for index in range(2048)]
    first = next(index for index, value in enumerate(sums) if value <= delta)
    upper = -1.0 + step * first
    assert upper - step <= total.epsilon(delta) <= upper


def test_no_epsilon_is_found_where_the_charge_alone_exceeds_delta_or_the_window_ends_too_early():
    assert math.isinf(total_of([0.5, 0.5], charged=1e-3).epsilon(1e-3))
    # Rounding of 1 at every point never falls to the target within the lattice.
    assert math.isinf(total_of([0.5, 0.25, 0.125, 0.125], rounding=1.0, tilt=1e-3).epsilon(1e-3))


def test_a_delta_that_the_first_point_meets_gives_the_first_point():
    assert total_of([0.5, 0.25, 0.125, 0.125], start=0.25).epsilon(0.9) == 0.25


@pytest.mark.parametrize(("size", "block"), [(640, 128), (1024, 512), (7 * 64, 64), (48, 16), (512, 512)])
def test_blocks_divide_the_size_and_are_powers_of_two_up_to_512(size, block):
    assert block_of(size) == block


@pytest.mark.parametrize("tilt", [1e-4, 2.0, 300.0])
def test_untilting_is_a_factor_of_exp_at_every_point(tilt):
    masses, start, step = np.linspace(1, 2, 640), -0.3, 0.003
    expected = masses * np.exp(-tilt * (start + step * np.arange(640)))
    untilt(masses, tilt, start, step)
    np.testing.assert_allclose(masses, expected, rtol=1e-12)


def test_untilting_does_not_overflow():
    masses = np.full(64, 1e-3)
    untilt(masses, 1e4, -5.0, 0.1)  # exp(50000) is cut off at exp(600)
    assert np.all(np.isfinite(masses))
    assert np.all(masses >= 0)
