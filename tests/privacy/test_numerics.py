"""The normal law against mpmath, and rounds without sampling against the formula of Balle and Wang in 60 digits."""

import math

import mpmath
import numpy as np
import pytest

from clipline.errors import SettingError
from clipline.privacy.numerics import gaussian_delta, gaussian_epsilon, gaussian_mu, mills_ratio, normal_tail


def test_tails_agree_with_mpmath_to_fourteen_digits():
    with mpmath.workdps(40):
        for x in np.concatenate([np.linspace(-8, 8, 161), np.linspace(8, 37.5, 60)]):
            exact = mpmath.erfc(mpmath.mpf(float(x)) / mpmath.sqrt(2)) / 2
            assert abs(normal_tail(np.array([x]))[0] / exact - 1) < 2e-14, x


def test_infinities_are_certain():
    assert normal_tail(np.array([-np.inf, np.inf, 0.0, 1e6, -1e6])).tolist() == pytest.approx([1.0, 0.0, 0.5, 0.0, 1.0])


@pytest.mark.parametrize("x", [-30.0, -5.0, -0.1, 0.0, 0.3, 2.0, 17.0, 1e3, 1e8])
def test_the_mills_ratio_agrees_with_mpmath(x):
    with mpmath.workdps(40):
        at = mpmath.mpf(x)
        if x < 100:
            exact = mpmath.erfc(at / mpmath.sqrt(2)) / 2 * mpmath.sqrt(2 * mpmath.pi) * mpmath.exp(at * at / 2)
        else:
            exact = 1 / at - 1 / at**3 + 3 / at**5  # the asymptotic series, to 15 / x^7
    assert mills_ratio(x) == pytest.approx(float(exact), rel=2e-14)


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


def test_no_distance_is_no_loss_and_a_great_one_is_everything():
    assert gaussian_epsilon(0.0, 1e-5) == gaussian_delta(0.0, 0.0) == 0
    assert gaussian_delta(100.0, 1.0) == 1


def test_mu_is_the_distance_that_gives_the_same_point():
    for mu in (0.01, 1.0, 7.0):
        assert gaussian_mu(gaussian_epsilon(mu, 1e-6), 1e-6) == pytest.approx(mu, rel=1e-9)
    assert math.isinf(gaussian_mu(math.inf, 1e-6))
    with pytest.raises(SettingError, match="epsilon=-1"):
        gaussian_mu(-1, 1e-6)
