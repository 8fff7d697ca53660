"""Trainings whose users upload as in a federation: the same promise, nearly the same model."""

import pytest
import torch
from samples import LOCAL, cross_entropies, linear_model, population_of, request, small_population, summed

import clipline as cl
from clipline import SettingError
from clipline.federated.discrete_mechanism import DiscreteMechanism
from clipline.federated.mechanism import GaussianMechanism
from clipline.federation.simulated import clipped_vectors
from clipline.training.model_card import describe

POPULATION = population_of([6, 3, 9, 1, 0, 14, 7, 5, 30, 2, 4, 4, 8, 3, 5])


def training_of(upload=None, noise_multiplier=0.05, sampling="poisson", count_stddev=0.5, people=POPULATION, **options):
    torch.manual_seed(0)
    privacy = cl.Privacy(noise_multiplier=noise_multiplier, sampling=sampling, count_stddev=count_stddev)
    return cl.Training(
        linear_model(), cross_entropies, people, rounds=8, cohort_size=6, local=LOCAL, privacy=privacy, upload=upload,
        **{"seed": 3, **options},
    )  # fmt: skip


UPLOADS = [cl.SecureSum(bits=20), cl.SecureSum(bits=20, least_survivors=4), cl.Quantised(12), cl.RandomMask(1.0)]


@pytest.mark.parametrize("upload", UPLOADS, ids=str)
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_a_training_with_fine_uploads_ends_where_one_without_ends(upload, sampling):
    plain, encoded = training_of(sampling=sampling).run(), training_of(upload, sampling=sampling).run()
    far = float((encoded.state.params - plain.state.params).norm())
    moved = float((plain.state.params - training_of().init().params).norm())
    assert far < 0.15 * moved  # noise of 0.05 clips, over 6 users
    assert encoded.state.clip.clip == pytest.approx(plain.state.clip.clip, rel=0.2)
    assert encoded.guarantee == plain.guarantee


@pytest.mark.parametrize("upload", UPLOADS, ids=str)
def test_a_seed_repeats_a_run(upload):
    first, again = (training_of(upload).run().state.params for _ in range(2))
    assert torch.equal(first, again)


def test_a_secure_sum_is_charged_as_discrete_noise_of_the_same_multiplier():
    training = training_of(cl.SecureSum(bits=18))
    result = training.run()
    assert isinstance(training.algorithm.mechanism, DiscreteMechanism)
    (event,) = result.state.ledger.events
    assert event == training.algorithm.event
    assert (event.noise_multiplier, event.log_ratio > 0) == (0.05, True)


def test_uploads_that_the_server_decodes_have_the_usual_mechanism():
    for upload in (cl.Quantised(8), cl.RandomMask(0.5)):
        assert type(training_of(upload).algorithm.mechanism) is GaussianMechanism


@pytest.mark.parametrize("upload", [cl.Quantised(16), cl.RandomMask(1.0)])
def test_the_sum_of_fine_uploads_is_the_plain_one(upload):
    users = [0, 2, 5, 8, 4]
    plain, encoded = training_of(), training_of(upload)
    params = plain.init().params
    for clip in (0.05, 1.0):
        exact, decoded = (summed(one, params, users, clip=clip) for one in (plain, encoded))
        torch.testing.assert_close(decoded, exact, rtol=0, atol=1e-4 * clip)
        assert float(decoded[-1]) == float(exact[-1])


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_vectors_of_a_block_are_those_of_its_users(monkeypatch, at_once):
    monkeypatch.setattr("clipline.federation.simulated._AT_ONCE", at_once * 21)
    training, users = training_of(), [0, 2, 5, 8, 4]
    params, rows = training.init().params, []
    asked = request(params, users, clip=0.3)
    for updates, _ in training.trainer.train([asked]):
        rows += list(clipped_vectors(updates, 0.3, training.dim))
    assert len(rows) == 5
    torch.testing.assert_close(torch.stack(rows).sum(0), summed(training, params, users, clip=0.3))
    alone = [summed(training, params, [user], clip=0.3) for user in users]
    for each, row in zip(sorted(alone, key=lambda v: v.tolist()), sorted(rows, key=lambda v: v.tolist()), strict=True):
        torch.testing.assert_close(row, each, rtol=0, atol=1e-12)


def test_a_cohort_smaller_than_the_least_number_of_survivors_still_has_the_noise():
    training = training_of(cl.SecureSum(bits=20, least_survivors=40), noise_multiplier=5.0, count_stddev=10.0)
    state, released = training.run().state, training.algorithm.mechanism.code
    assert state.round_index == 8
    assert released.stddev / released.scale > 4.5  # clips, and shares of 40 clients make it whatever the cohort


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(SettingError, match=r"at least \d+ here"):
        training_of(cl.SecureSum(bits=14), noise_multiplier=2e-4)
    with pytest.raises(SettingError, match="IndependentNoise where upload is given"):
        training_of(cl.Quantised(8), noise=cl.BandedNoise(2), people=small_population(400))
    with pytest.raises(SettingError, match="SecureSum, Quantised or RandomMask"):
        training_of("secure")
    with pytest.raises(SettingError, match="run this training alone"):
        cl.run_together([training_of(cl.Quantised(8)), training_of(cl.Quantised(8), seed=4)])
    for wrong in (lambda: cl.Quantised(0), lambda: cl.Quantised(17), lambda: cl.RandomMask(0.0),
                  lambda: cl.SecureSum(13), lambda: cl.SecureSum(least_survivors=0)):  # fmt: skip
        with pytest.raises(SettingError):
            wrong()
    with pytest.raises(SettingError, match="did you mean 'bits'"):
        cl.SecureSum(bit=18)


def test_the_upload_is_on_record():
    assert describe(training_of(cl.SecureSum(bits=18)))["upload"] == {"type": "SecureSum", "bits": 18}
    assert describe(training_of())["upload"] is None
