"""Initial weights: the distributions that their names say."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import stats

from clipline.layers import he_normal_


def test_he_normal_is_cut_at_two_standard_deviations_and_keeps_its_variance() -> None:
    torch.manual_seed(0)
    fan_in = 50
    weight = he_normal_(torch.empty(4000, fan_in))
    uncut = math.sqrt(2 / fan_in) / stats.truncnorm(-2, 2).std()
    assert weight.abs().max().item() <= 2 * uncut * (1 + 1e-6)
    assert stats.kstest(weight.flatten().numpy() / uncut, stats.truncnorm(-2, 2).cdf).pvalue > 1e-3
    assert abs(weight.var().item() * fan_in / 2 - 1) < 0.01


def test_he_normal_draws_the_same_numbers_in_every_version_of_torch() -> None:
    torch.manual_seed(7)
    uniform = torch.empty(3, 8).uniform_(-math.erf(math.sqrt(2)), math.erf(math.sqrt(2))).double().numpy()
    torch.manual_seed(7)
    drawn = he_normal_(torch.empty(3, 8)).double().numpy()
    spread = math.sqrt(2 / 8) / stats.truncnorm(-2, 2).std()
    np.testing.assert_allclose(drawn, spread * stats.norm.ppf((1 + uniform) / 2), rtol=1e-4)
