"""Rare, large losses: against bounds from both sides by direct convolution, which rounds each number by itself."""

import itertools
import math

import mpmath
import numpy as np
import pytest

from clipline.privacy.accountant import account, delta_at
from clipline.privacy.calibration import noise_multiplier_for
from clipline.privacy.dominating_pairs import dominating_pair
from clipline.privacy.events import GaussianEvent, PoissonSampling, TruncatedPoissonSampling
from clipline.privacy.ledger import Ledger
from clipline.privacy.pld import rare_losses
from clipline.privacy.pld.total import on_lattice
from clipline.privacy.relations import Relation

ADD, REPLACE, ZERO = Relation.ADD_OR_REMOVE, Relation.REPLACE_ONE, Relation.ZERO_OUT

# (rate, noise multiplier, rounds, delta), then for add-or-remove a lower and an upper bound on epsilon, and a lower one
# for replace-one. From independent code: outputs merged (lower) or dots connected (upper), then convolved directly,
# without a transform. The accountant without `rare_losses` gave up to 700 times the upper bound.
RARE = [
    ((1e-7, 0.6, 100_000, 1e-12), 0.010505, 0.01099, 0.010508),
    ((1e-7, 0.7, 10_000, 1e-10), 3.1053e-4, 3.33e-4, 3.1709e-4),
    ((1e-7, 0.7, 1000, 1e-12), 5.6117e-4, 5.64e-4, 5.6145e-4),
    ((1e-6, 0.6, 1000, 1e-10), 0.014684, 0.0147, 0.014691),
    ((1e-6, 1, 10_000, 1e-12), 7.866e-4, 8.956e-4, 1.1883e-3),
    ((1e-7, 0.4, 1000, 1e-12), 0.98291, 0.9833, 0.97983),
    ((7.299428986231955e-9, 0.5374231884076971, 2, 2.011244101628596e-15), 3.637e-4, 3.656e-4, 3.623e-4),
    ((5.463429851934462e-6, 0.7, 20312, 1.0163198261572239e-11), 0.08907, 0.0899, 0.08922),
]


def run(sampling, z, rounds):
    return Ledger().add(GaussianEvent(sampling, z), rounds)


@pytest.mark.parametrize(("case", "lower", "upper", "lower_exchanged"), RARE)
def test_epsilon_lies_between_bounds_by_direct_convolution(case, lower, upper, lower_exchanged):
    rate, z, rounds, delta = case
    ledger = run(PoissonSampling(rate), z, rounds)
    assert 0.9999 * lower <= account(ledger, delta=delta, relation=ADD).epsilon <= upper
    assert account(ledger, delta=delta, relation=REPLACE).epsilon >= lower_exchanged


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("case", [case for case, *_ in RARE[1:6]])
def test_delta_undoes_epsilon(case, relation):
    rate, z, rounds, delta = case
    ledger = run(PoissonSampling(rate), z, rounds)
    epsilon = account(ledger, delta=delta, relation=relation).epsilon
    assert delta_at(ledger, epsilon=epsilon, relation=relation) == pytest.approx(delta, rel=0.01)


@pytest.mark.parametrize(
    ("sampling", "rounds", "delta", "relation"),
    [
        (PoissonSampling(1e-7), 1000, 1e-12, ADD),
        (PoissonSampling(1e-6), 1000, 1e-10, REPLACE),
        (PoissonSampling(1e-8), 2, 1e-14, ZERO),
        (TruncatedPoissonSampling(1e-5, 10**6, 40), 500, 1e-11, ADD),
    ],
)
def test_epsilon_falls_with_noise_also_where_losses_are_rare(sampling, rounds, delta, relation):
    noise = (0.3, 0.35, 0.4, 0.45, 0.5, 0.52, 0.54, 0.56, 0.58, 0.6, 0.65, 0.7)
    epsilons = [account(run(sampling, z, rounds), delta=delta, relation=relation).epsilon for z in noise]
    assert all(less <= more for more, less in itertools.pairwise(epsilons))


@pytest.mark.parametrize(
    ("sampling", "rounds", "epsilon", "delta", "relation"),
    [
        (PoissonSampling(1.970584585789136e-7), 592638, 0.3972839162305403, 1.35161656642184e-12, REPLACE),
        (PoissonSampling(1.117642070827456e-8), 1138, 0.34108174462584734, 1.421429401414121e-11, ZERO),
        (PoissonSampling(1e-6), 1000, 0.1, 1e-10, ADD),
    ],
)
def test_calibration_meets_a_target_of_rare_losses(sampling, rounds, epsilon, delta, relation):
    z = noise_multiplier_for(sampling=sampling, rounds=rounds, epsilon=epsilon, delta=delta, relation=relation)
    reached = account(run(sampling, z, rounds), delta=delta, relation=relation).epsilon
    assert (1 - 2.1e-5) * epsilon <= reached <= epsilon


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize(
    ("rate", "z", "rounds", "epsilon", "delta"), [(1e-6, 0.5, 5, 0.3, 1e-13), (1e-3, 0.7, 8, 2, 1e-12)]
)
def test_masses_are_those_of_a_direct_convolution(rate, z, rounds, epsilon, delta, relation):
    direction = dominating_pair(GaussianEvent(PoissonSampling(rate), z), relation).directions[0]
    total = rare_losses.compose_rare_losses(((direction, rounds),), epsilon, delta, coarseness=1e4)
    spare = 10.0 ** math.floor(math.log10(1e-7 * delta / rounds))
    one, zero = on_lattice(direction, total.step, spare)
    masses = one.mass
    for _ in range(rounds - 1):
        masses = np.convolve(masses, one.mass)
    losses = total.step * (np.arange(len(masses)) - rounds * zero)
    for at in (0.8 * epsilon, epsilon, 1.5 * epsilon):
        direct = float(masses @ -np.expm1(-np.maximum(losses - at, 0.0)))
        assert direct <= total.delta(at) <= direct * (1 + 1e-5) + 1e-5 * delta


def test_logarithms_and_exponentials_keep_the_digits_of_small_numbers():
    with mpmath.workdps(40):
        for size, angle in itertools.product((1e-18, 1e-9, 1e-3, 0.24), (0.0, 0.4, 1.5707, 2.0, 3.1)):
            w = size * complex(math.cos(angle), math.sin(angle))
            for ours, exact in (
                (rare_losses._log1p(np.array([w]))[0], mpmath.log(1 + mpmath.mpc(w))),
                (np.expm1(np.array([w]))[0], mpmath.expm1(mpmath.mpc(w))),  # NumPy's own, which this relies on
            ):
                assert abs(mpmath.mpc(complex(ours)) - exact) < 1e-15 * size


def test_a_direction_that_cannot_reach_epsilon_leaves_delta_to_the_other_one():
    # Who joins loses at most -log(1 - q) a round, 1173 in all; who leaves decides.
    ledger = run(PoissonSampling(4e-8), 94.2, 638).add(GaussianEvent(PoissonSampling(0.045), 0.3), 25459)
    epsilon = account(ledger, delta=1e-13, relation=ADD).epsilon
    assert epsilon > 25459 * -math.log1p(-0.045) + 638 * 4.1e-8
    assert delta_at(ledger, epsilon=epsilon, relation=ADD) == pytest.approx(1e-13, rel=1e-4)
