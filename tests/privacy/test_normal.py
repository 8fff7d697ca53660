import mpmath
import numpy as np
import pytest
from scipy.special import ndtr

from clipline.privacy.normal import mills, tail


def test_tails_agree_with_mpmath_to_fourteen_digits():
    mpmath.mp.dps = 40
    for x in np.concatenate([np.linspace(-8, 8, 161), np.linspace(8, 37.5, 60)]):
        exact = mpmath.erfc(mpmath.mpf(float(x)) / mpmath.sqrt(2)) / 2
        assert abs(tail(np.array([x]))[0] / exact - 1) < 2e-14, x


def test_tails_agree_with_scipy_everywhere():
    x = np.random.default_rng(0).normal(0, 12, 20_000)
    np.testing.assert_allclose(tail(x), ndtr(-x), rtol=1e-12, atol=1e-300)  # SciPy's own far tail is good to 1e-13


def test_infinities_are_certain():
    assert tail(np.array([-np.inf, np.inf, 0.0, 1e6, -1e6])).tolist() == pytest.approx([1.0, 0.0, 0.5, 0.0, 1.0])


@pytest.mark.parametrize("x", [-30.0, -5.0, -0.1, 0.0, 0.3, 2.0, 17.0, 1e3, 1e8])
def test_the_mills_ratio_agrees_with_mpmath(x):
    mpmath.mp.dps = 40
    at = mpmath.mpf(x)
    if x < 100:
        exact = mpmath.erfc(at / mpmath.sqrt(2)) / 2 * mpmath.sqrt(2 * mpmath.pi) * mpmath.exp(at * at / 2)
    else:
        exact = 1 / at - 1 / at**3 + 3 / at**5  # the asymptotic series, to 15 / x^7
    assert mills(x) == pytest.approx(float(exact), rel=2e-14)
