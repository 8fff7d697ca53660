"""Losses on a lattice: the connected dots, and moments against closed forms."""

import math

import mpmath
import numpy as np
import pytest

from clipline.privacy.dominating_pairs import dominating_pair
from clipline.privacy.events import (
    FixedSizeSampling,
    GaussianEvent,
    NoSampling,
    PoissonSampling,
    TruncatedPoissonSampling,
)
from clipline.privacy.pld.discretised import TILTS, DiscretisedLoss, coarse_curve, coarse_log_moments, discretise
from clipline.privacy.pld.one_round import Direction, MixturePair, PositiveLossPart, loss_tails
from clipline.privacy.relations import Relation

ADD, REPLACE, ZERO_OUT = Relation.ADD_OR_REMOVE, Relation.REPLACE_ONE, Relation.ZERO_OUT


def gaussian(mu):
    """Two unit normals at distance mu: the loss is N(mu^2 / 2, mu^2), and E exp(t L) = exp(t (t + 1) mu^2 / 2)."""
    part = (PositiveLossPart(MixturePair.REMOVE, 1.0, mu),)
    return Direction(part, part)


@pytest.mark.parametrize("relation", [ADD, REPLACE, ZERO_OUT])
@pytest.mark.parametrize(
    "sampling", [PoissonSampling(0.1), FixedSizeSampling(7, 50), TruncatedPoissonSampling(0.1, 500, 60), NoSampling()]
)
def test_connected_dots_keep_both_totals_and_lie_above_the_profile(sampling, relation):
    for direction in dominating_pair(GaussianEvent(sampling, 1.2), relation).directions:
        fine = np.linspace(0, 12, 12001)
        coarse = discretise(direction, fine[::50], fine[::50])
        assert coarse.mass.sum() + coarse.infinity_mass == pytest.approx(1, abs=1e-12)
        assert np.all(coarse.mass >= 0)
        # Under Q the total is at most one: what is missing has an infinite or a raised loss.
        assert (coarse.mass * np.exp(-coarse.losses)).sum() <= 1 + 1e-9
        for epsilon in (0.0, 0.013, 0.2, 1.1):
            p_tail, q_tail = (x[0] for x in loss_tails(direction.positive, np.array([epsilon])))
            above = coarse.losses > epsilon
            stick = (coarse.mass[above] * -np.expm1(epsilon - coarse.losses[above])).sum() + coarse.infinity_mass
            assert stick >= p_tail - math.exp(epsilon) * q_tail - 1e-13


def test_halving_the_spacing_quarters_the_error():
    # Connecting the dots of a smooth convex profile errs by the square of the spacing, and upwards.
    direction, epsilon = gaussian(1.0), 0.7301
    p_tail, q_tail = (tail[0] for tail in loss_tails(direction.positive, np.array([epsilon])))
    exact, errors = p_tail - math.exp(epsilon) * q_tail, []
    for step in (0.08, 0.04, 0.02):
        # Halfway between two points of the lattice, where the error is largest.
        lattice = np.concatenate([[0.0], epsilon - step / 2 + step * np.arange(math.ceil(12 / step))])
        loss = discretise(direction, lattice, lattice)
        above = loss.losses > epsilon
        stick = (loss.mass[above] * -np.expm1(epsilon - loss.losses[above])).sum() + loss.infinity_mass
        errors.append(stick - exact)
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.05)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.05)
    assert errors[2] > 0


def test_log_moments_are_sums_over_the_masses_and_never_below_them():
    loss = DiscretisedLoss(np.array([-1.0, 0.0, 0.5, 3.0]), np.array([0.2, 0.5, 0.0, 0.25]), 0.05)
    tilts = np.array([1e-4, 1.0, 40.0, 199.0, 201.0, 9000.0])  # from 200 on exp(3 t) is scaled before it overflows
    with mpmath.workdps(30):
        for tilt, ours in zip(tilts, loss.log_moments(tilts), strict=True):
            pairs = zip(loss.losses, loss.mass, strict=True)
            exact = mpmath.log(mpmath.fsum(m * mpmath.exp(mpmath.mpf(tilt) * x) for x, m in pairs))
            assert exact <= ours <= exact + 1e-14 * (1 + abs(exact))


@pytest.mark.filterwarnings("error")
def test_a_moment_too_small_for_float64_is_bounded_from_above():
    """exp(-10^6) is 0 in float64, and its log would be -inf."""
    (moment,) = DiscretisedLoss(np.array([-1e6]), np.ones(1), 0.0).log_moments(np.ones(1))
    assert -1e6 <= moment <= -700


@pytest.mark.parametrize("mu", [0.003, 0.1, 2.0])
def test_coarse_moments_of_two_normals_lie_above_the_closed_form_and_close(mu):
    moments, infinity_mass = coarse_log_moments(gaussian(mu))
    assert 0 <= infinity_mass < 1e-60
    exact = TILTS * (TILTS + 1) * mu**2 / 2
    useful = (TILTS + 1) * mu < 12  # beyond, the tilted mass lies where the lattice ends
    assert useful.sum() > 40
    assert np.all(moments[useful] >= exact[useful] * (1 - 1e-12))
    assert np.all(moments[useful] <= exact[useful] * 1.03 + 1e-12)
    orders = np.array([1.5, 4.0, 6.0])
    ours = coarse_curve(gaussian(mu), orders)
    np.testing.assert_array_less(orders * mu**2 / 2 * (1 - 1e-12), ours)
    np.testing.assert_allclose(ours, orders * mu**2 / 2, rtol=0.01)
