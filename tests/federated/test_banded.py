"""Banded noise and grouped sampling: what is drawn, what is released, and what is refused."""

import math
import pickle

import numpy as np
import pytest
import torch
from samples import small_population

from clipline.data.population import Population
from clipline.errors import PrivateError, SettingError
from clipline.federated.clipping import ClippedSum
from clipline.federated.draws import NoiseNow
from clipline.federated.mechanism import BandedMechanism, GaussianMechanism, keeping_slack
from clipline.federated.sampling import GroupedPoissonSampler
from clipline.privacy.banded_noise import band_coefficients, inverse_coefficients, lasting_share
from clipline.privacy.events import GroupedPoissonSampling, PoissonSampling
from clipline.random.streams import Streams

ROUNDS, BANDS, M = 12, 4, 10
SAMPLING = GroupedPoissonSampling(0.2, BANDS)


def mechanism(bands=BANDS, count_stddev=2.0, z=0.7):
    return BandedMechanism(M, z, count_stddev, bands=bands, rounds=ROUNDS)


def zeros(dim, bound=1.0, sampling=SAMPLING):
    return ClippedSum(torch.zeros(dim + 1, dtype=torch.float64), bound, sampling)


def run(made, dim, bounds, streams, sampling=SAMPLING):
    """Every round's release of sums of zeros, and the states of the noise between them."""
    state, releases, states = made.begin(0), [], []
    for t, bound in enumerate(bounds):
        noise = NoiseNow(streams.noise(t), dim + 1)
        release, state = made.step(zeros(dim, bound, sampling), noise, state, t)
        releases.append(release)
        states.append(state)
    return releases, states


def test_the_matrix_turns_the_noise_of_all_rounds_into_what_was_drawn():
    """C x = xi, for updates and count alike, whatever the clip of each round was."""
    made, streams, dim = mechanism(), Streams(5), 7
    bounds = np.exp(np.random.default_rng(0).normal(size=ROUNDS))
    releases, _ = run(made, dim, bounds, streams)
    slack = 1 + keeping_slack(0.7, dim + 1)
    noise = np.array(
        [
            [*(M * one.mean.numpy() / (made.delta_stddev(bound) * slack)), M * (one.fraction_within - 0.5) / 2 / slack]
            for one, bound in zip(releases, bounds, strict=True)
        ]
    )
    coefficients = band_coefficients(ROUNDS, BANDS)
    for t in range(ROUNDS):
        white = sum(c * noise[t - lag] for lag, c in enumerate(coefficients) if lag <= t)
        np.testing.assert_allclose(white, streams.noise(t).standard_normal(dim + 1), rtol=0, atol=1e-5)  # the grid
    assert [one.event.index for one in releases] == list(range(ROUNDS))


def test_sums_of_releases_have_the_stated_noise_and_rounds_the_noise_they_tell():
    made, dim, draws = mechanism(z=0.3), 4000, 10
    rows = []
    for seed in range(draws):
        releases, _ = run(made, dim, [1.0] * ROUNDS, Streams(seed))
        rows.append(torch.stack([one.mean for one in releases]))
    noise = torch.stack(rows)  # (draws, rounds, dim)
    drawn = made.delta_stddev(1.0) / M
    models = noise.cumsum(1).square().mean((0, 2)).mean().sqrt()
    alone = drawn * math.sqrt((ROUNDS + 1) / 2)  # of independent noise: the mean of 1 ... ROUNDS
    close = 5 / math.sqrt(2 * draws * dim)  # 5 standard errors of a deviation; rounds are not independent
    assert models == pytest.approx(alone * lasting_share(ROUNDS, BANDS), rel=close)
    spread = np.sqrt(np.cumsum(inverse_coefficients(ROUNDS, BANDS) ** 2))
    for t, told in enumerate(one.noise for one in releases):
        assert noise[:, t].square().mean().sqrt() == pytest.approx(told.stddev, rel=close)
        assert told.stddev == pytest.approx(drawn * spread[t], rel=1e-5)
        assert (told.clip, told.lasting) == (1.0, pytest.approx(drawn * lasting_share(ROUNDS, BANDS), rel=1e-5))


def test_one_band_is_independent_noise_to_the_last_bit():
    plain, sampling = GaussianMechanism(M, 0.7, 2.0), GroupedPoissonSampling(0.05, 1)
    releases, states = run(mechanism(bands=1), 9, [0.3, 4.0, 1.0], Streams(2), sampling)
    for t, (release, bound) in enumerate(zip(releases, [0.3, 4.0, 1.0], strict=True)):
        alone = plain.release(zeros(9, bound), Streams(2).noise(t))
        assert torch.equal(release.mean, alone.mean)
        assert release.fraction_within == alone.fraction_within
        assert release.noise == alone.noise
    assert states[-1].unprivate_earlier == ()


def test_what_is_kept_is_the_noise_of_so_many_rounds_in_four_bytes_a_number():
    _, states = run(mechanism(), 9, [1.0] * 6, Streams(0))
    assert [len(state.unprivate_earlier) for state in states] == [1, 2, 3, 3, 3, 3]
    assert {(kept.shape, kept.dtype) for kept in states[-1].unprivate_earlier} == {((10,), torch.int32)}
    newest, _, oldest = states[3].unprivate_earlier
    assert states[4].unprivate_earlier[1] is newest
    assert all(kept is not oldest for kept in states[4].unprivate_earlier)


def test_earlier_noise_is_private():
    _, states = run(mechanism(), 3, [1.0], Streams(0))
    assert repr(states[0]) == "NoiseState(private)"
    with pytest.raises(PrivateError, match="cannot be pickled: store it by a RunDirectory"):
        pickle.dumps(states[0])


@pytest.mark.parametrize(
    "sampling", [PoissonSampling(0.05), PoissonSampling(1.0), GroupedPoissonSampling(0.15, 3), None]
)
def test_sampling_by_which_a_user_comes_in_rounds_that_share_noise_is_refused(sampling):
    """The trap: noise with bands and plain Poisson sampling of every round is not covered by as many Poisson rounds."""
    made = mechanism()
    with pytest.raises(SettingError, match="must be from 4 groups in turn, as the noise has 4 bands"):
        made.step(zeros(3, 1.0, sampling), NoiseNow(Streams(0).noise(0), 4), made.begin(0), 0)


def test_a_release_without_the_noise_before_it_is_refused():
    made, other = mechanism(), mechanism()
    with pytest.raises(SettingError, match="made by `step`"):
        made.release(zeros(3), Streams(0).noise(0))
    for state in (None, made.begin(1), other.begin(0)):
        with pytest.raises(SettingError, match="that of round 0 of this training"):
            made.step(zeros(3), NoiseNow(Streams(0).noise(0), 4), state, 0)


def test_a_state_is_used_for_one_round_only():
    """Two releases with the same earlier noise and fresh draws: their difference would have less noise than either."""
    made, state = mechanism(), mechanism().begin(0)
    state.made_by = made
    _, after = made.step(zeros(3), NoiseNow(Streams(0).noise(0), 4), state, 0)
    with pytest.raises(SettingError, match="state='spent' must be used for one round only"):
        made.step(zeros(3), NoiseNow(Streams(1).noise(0), 4), state, 0)
    made.step(zeros(3), NoiseNow(Streams(0).noise(1), 4), after, 1)


def test_keeping_noise_in_steps_moves_a_user_by_no_more_than_the_slack():
    """Two neighbours with the same releases: what an adversary computes for each differs by little more than 1 / z."""
    rng, dim, z, step = np.random.default_rng(0), 5000, 0.8, 2.0**-24
    coefficients = np.array(band_coefficients(ROUNDS, BANDS))
    user = rng.standard_normal(dim)
    user /= np.linalg.norm(user) * z
    noise = rng.standard_normal((BANDS, dim))  # of the user's round and the three after it: the same with and without
    rounding = np.round((noise[0] - user) / step) * step - np.round(noise[0] / step) * step + user
    moved = [coefficients[0] * user, *(c * (user - rounding) for c in coefficients[1:])]
    assert np.linalg.norm(moved) <= 1 / z * (1 + keeping_slack(z, dim))
    assert keeping_slack(1.0, 10**6) < 1e-4


def groups(population, n=1000, m=20, bands=BANDS):
    return GroupedPoissonSampler.of(population.identities(np.arange(len(population))), n, m, bands)


@pytest.mark.parametrize("seed", [1, 2**200])  # the latter draws as runs without a seed do
def test_a_user_comes_in_rounds_that_are_apart_and_at_the_rate_that_is_accounted(seed):
    sampler, draws = groups(small_population(1000)), 4000
    came = np.zeros((draws, 1000), bool)
    for t in range(draws):
        came[t, sampler.draw(Streams(seed).sampling(t), t).users] = True
    rounds = [np.flatnonzero(column) for column in came.T]
    assert all((np.diff(at) % BANDS == 0).all() and (np.diff(at) >= BANDS).all() for at in rounds)
    assert [set(at % BANDS) <= {group} for at, group in zip(rounds, sampler.groups.tolist(), strict=True)] == [
        True
    ] * 1000
    assert sampler.sampling == GroupedPoissonSampling(0.08, BANDS)
    rates = came.reshape(-1, BANDS, 1000)[:, sampler.groups, np.arange(1000)].mean(0)  # in rounds of the own group
    spread = math.sqrt(0.08 * 0.92 / 1000)
    assert rates.mean() == pytest.approx(0.08, abs=5 * spread / math.sqrt(1000))
    assert np.abs(rates - 0.08).max() < 6 * spread  # 1000 users: fails once in 500,000
    sizes = np.bincount(sampler.groups)
    assert np.abs(sizes - 250).max() < 5 * math.sqrt(1000 * 0.25 * 0.75)


def named(names):
    return Population.from_arrays(names, x=np.zeros((len(names), 1)))


@pytest.mark.parametrize("kind", [str, int])
def test_other_users_who_come_go_or_are_renamed_do_not_move_anybody(kind):
    ids = [kind(1000 + 7 * number) for number in range(300)]
    before = dict(zip(ids, groups(named(ids)).groups.tolist(), strict=True))
    changed = [kind(5), *ids[:100], kind(999_999), *ids[103:]]  # some added, some gone, one under another name
    population = named(changed)
    after = dict(zip(population.user_ids.tolist(), groups(population).groups.tolist(), strict=True))
    assert {user: after[user] for user in after if user in before} == {
        user: before[user] for user in after if user in before
    }
    assert len(set(before.values())) == BANDS


def test_everybody_of_the_group_comes_where_groups_are_as_large_as_cohorts():
    sampler = groups(small_population(1000), m=250)
    assert sampler.sampling.rate == 1.0
    assert sampler.draw(np.random.default_rng(0), 2).users.tolist() == np.flatnonzero(sampler.groups == 2).tolist()


@pytest.mark.parametrize(("m", "bands"), [(251, 4), (1, 100)])
def test_groups_that_are_too_small_are_refused_by_public_numbers(m, bands):
    with pytest.raises(SettingError, match=f"bands={bands} must be at most"):
        groups(small_population(1000), m=m, bands=bands)
