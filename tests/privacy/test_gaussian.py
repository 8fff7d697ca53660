"""Rounds without sampling against the formula of Balle and Wang in high precision."""

import math

import mpmath
import pytest

from clipline.errors import SettingError
from clipline.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu


def exact_delta(mu, epsilon):
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@pytest.mark.parametrize("mu", [1e-7, 1e-4, 0.03, 1.0, 20.0, 5000.0])
@pytest.mark.parametrize("delta", [1e-15, 1e-5, 0.1])
def test_epsilon_is_exact_and_rounded_up(mu, delta):
    epsilon = gaussian_epsilon(mu, delta)
    if epsilon == 0:
        assert exact_delta(mu, 0) <= delta
        return
    assert exact_delta(mu, epsilon) <= delta * (1 + 1e-7)
    assert exact_delta(mu, epsilon * (1 - 1e-6)) >= delta * (1 - 1e-9)
    assert gaussian_delta(mu, epsilon) == pytest.approx(delta, rel=1e-5)


def test_known_epsilons_are_met():
    assert gaussian_epsilon(1.0, 1e-5) == pytest.approx(4.377178095681, rel=1e-11)
    assert gaussian_epsilon(math.sqrt(1000) / 20, 1e-5) == pytest.approx(7.511275900745, rel=1e-11)


def test_no_distance_is_no_loss_and_a_great_one_is_everything():
    assert gaussian_epsilon(0.0, 1e-5) == gaussian_delta(0.0, 0.0) == 0
    assert gaussian_delta(100.0, 1.0) == 1


def test_mu_is_the_distance_that_gives_the_same_point():
    for mu in (0.01, 1.0, 7.0):
        assert gaussian_mu(gaussian_epsilon(mu, 1e-6), 1e-6) == pytest.approx(mu, rel=1e-9)
    assert math.isinf(gaussian_mu(math.inf, 1e-6))
    with pytest.raises(SettingError, match="epsilon=-1"):
        gaussian_mu(-1, 1e-6)
