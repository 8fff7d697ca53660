"""Epsilons that no accountant may go below, from explicit data and an explicit test, by nothing but binomial sums.

The victim adds +s to a sum in noise N(0, 1) when sampled, in P; in Q nobody does. An adversary adds up all releases and
compares the total with a threshold c. For any c, (epsilon, delta) can hold only if P(c) <= e^epsilon Q(c) + delta.
"""

import math
from functools import cache

import numpy as np
from scipy.special import gammaln, log_ndtr, xlog1py, xlogy


@cache
def presence_lower_bound(rate, shift, rounds, delta):
    mean, spread = rounds * rate, math.sqrt(rounds * rate * (1 - rate))
    counts = np.arange(max(0, math.floor(mean - 12 * spread)), min(rounds, math.ceil(mean + 12 * spread + 60)) + 1)
    counts = counts[:: max(1, len(counts) // 500)] if rate < 1 else counts  # fewer of them: P only gets smaller
    log_chance = gammaln(rounds + 1) - gammaln(counts + 1) - gammaln(rounds - counts + 1)
    log_chance = log_chance + xlogy(counts, rate) + xlog1py(rounds - counts, -rate)
    width = math.sqrt(rounds)
    places = np.linspace(-9 * width, counts[-1] * shift + 9 * width, 1500)
    places = np.unique(np.concatenate([places, np.linspace(-9 * width, 39 * width, 1000)]))
    log_p = np.full(len(places), -np.inf)
    for count, chance in zip(counts[log_chance > -60], log_chance[log_chance > -60], strict=True):
        log_p = np.logaddexp(log_p, chance + log_ndtr((count * shift - places) / width))
    log_q = log_ndtr(-places / width)
    excess = np.exp(log_p) * (1 - 1e-12) - delta
    possible = excess > 0
    return max(0.0, float((np.log(excess[possible]) - log_q[possible]).max())) if possible.any() else 0.0
