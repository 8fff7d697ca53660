"""Closed forms of one round, where digits are easily lost."""

import math

import mpmath
import numpy as np
import pytest

from clipline.privacy.halves import _log_odds_below


@pytest.mark.parametrize("rate", [1e-12, 1e-9, 1e-6, 0.001, 0.3, 0.9, 1 - 1e-6])
def test_the_log_odds_of_joining_keep_their_digits_up_to_the_greatest_loss(rate):
    shares = (1e-6, 0.1, 0.4, 0.6, 0.9, 0.99)
    losses = np.array([-math.log1p(-rate) * share for share in shares])
    with mpmath.workdps(50):
        exact = [float(mpmath.log(1 + mpmath.expm1(-mpmath.mpf(float(loss))) / mpmath.mpf(rate))) for loss in losses]
    assert _log_odds_below(losses, rate) == pytest.approx(exact, rel=1e-14, abs=1e-13)
    assert _log_odds_below(np.array([-2 * math.log1p(-rate)]), rate)[0] == -math.inf
