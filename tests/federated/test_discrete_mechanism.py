"""Exact noise on sums of whole numbers, and noise that clients have added."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from clipline import SettingError
from clipline.errors import RunError
from clipline.federated.clipping import ClippedSum, ModularSum, centred
from clipline.federated.discrete_mechanism import DiscreteMechanism
from clipline.federated.draws import NoiseNow, WholeNoise
from clipline.federated.mechanism import GaussianMechanism
from clipline.privacy.events import PoissonSampling
from clipline.random.streams import Streams

SAMPLING = PoissonSampling(0.25)


@dataclass(frozen=True)
class Plain:
    """Whole numbers without a rotation: 100 of them are one clip or one user."""

    dim: int = 3
    bound: float = 120.0
    stddev: float = 60.0
    unit: float = 0.01
    bits: int = 16

    def decode_sum(self, total, clip, round_index):
        numbers = torch.from_numpy(centred(total, self.bits)).double() * self.unit
        return torch.cat([numbers[:-1] * clip, numbers[-1:]])


def mechanism_of(code, **options):
    return DiscreteMechanism(4, 0.4, 5.0, code=code, **options)


def total_of(*vectors, clip=2.0, bits=16):
    sums = ModularSum(3, bits)
    for vector in vectors:
        assert sums.add(np.asarray(vector).astype(np.uint16))
    return sums.finished(clip, SAMPLING)


def released(mechanism, total, seed=0):
    return mechanism.step(total, WholeNoise(Streams(seed).noise(0)), None, 0)[0]


def test_noise_that_is_in_the_sum_already_is_not_added_again():
    release = released(mechanism_of(Plain(), shares=2), total_of([100, -50, 50], [100, -50, -30]))
    assert release.mean.tolist() == [1.0, -0.5]  # 200 units are 2 clips of 2, over 4 users
    assert release.fraction_within == pytest.approx(0.5 + 0.2 / 4)


def test_the_noise_has_the_deviation_and_is_made_of_whole_units():
    mechanism, values = mechanism_of(Plain()), []
    for seed in range(2000):
        release = released(mechanism, total_of([100, 0, 0]), seed)
        values.append([*release.mean.tolist(), release.fraction_within])
    values = np.array(values)
    units = values[:, :2] / (2.0 * 0.01 / 4)
    np.testing.assert_allclose(units, np.round(units), atol=1e-9)
    # 5 standard errors of a deviation, which fail by chance once in a million
    assert units.std() == pytest.approx(math.hypot(60.0, 50.0), rel=5 / math.sqrt(8000))  # 50: one column is 100 off
    assert values[:, 2].std() == pytest.approx(0.6 / 4, rel=5 / math.sqrt(4000))
    assert values[:, 2].mean() == pytest.approx(0.5, abs=5 * 0.15 / math.sqrt(2000))


def test_a_round_is_charged_at_its_multiplier_and_says_that_the_noise_is_discrete():
    mechanism = mechanism_of(Plain())
    event = released(mechanism, total_of([0, 0, 0])).event
    assert event == mechanism.event(SAMPLING)
    assert event.noise_multiplier == 0.4
    assert 0 < event.log_ratio < 1e-30
    # 60 / 120 is 0.5, less the 4 of the rounding: by hand sqrt(3596) / 120 = 0.49972
    DiscreteMechanism(4, 0.4997, 5.0, code=Plain())
    with pytest.raises(SettingError, match=r"noise_multiplier=0\.49975"):
        DiscreteMechanism(4, 0.49975, 5.0, code=Plain())


def test_shares_of_clients_are_charged_for_the_least_number_and_not_too_small():
    assert mechanism_of(Plain(), shares=570).event(SAMPLING).log_ratio > mechanism_of(Plain()).event(SAMPLING).log_ratio
    with pytest.raises(SettingError, match="stddev of a share"):
        mechanism_of(Plain(), shares=600)


def test_without_a_count_no_fraction_is_released():
    mechanism = DiscreteMechanism(4, 0.4, None, code=Plain(), shares=2)
    assert released(mechanism, total_of([0, 0, 50])).fraction_within is None


def test_noise_of_a_round_hides_one_release():
    noise, mechanism = WholeNoise(Streams(0).noise(0)), mechanism_of(Plain())
    mechanism.step(total_of([0, 0, 0]), noise, None, 0)
    with pytest.raises(RunError, match="asked for twice"):
        mechanism.step(total_of([0, 0, 0]), noise, None, 0)


def test_sums_noise_and_mechanisms_that_do_not_fit_are_refused():
    floats = ClippedSum(torch.zeros(3, dtype=torch.float64), 1.0, SAMPLING)
    noise = WholeNoise(Streams(0).noise(0))
    with pytest.raises(SettingError, match="a sum of 3 whole numbers"):
        mechanism_of(Plain()).step(floats, noise, None, 0)
    with pytest.raises(SettingError, match="a sum of 4 whole numbers"):
        mechanism_of(Plain(dim=4)).step(total_of([0, 0, 0]), noise, None, 0)
    with pytest.raises(SettingError, match="release it by a DiscreteMechanism"):
        GaussianMechanism(4, 0.4, 5.0).release(total_of([0, 0, 0]), Streams(0).noise(0))
    with pytest.raises(SettingError, match="WholeNoise"):
        mechanism_of(Plain()).step(total_of([0, 0, 0]), NoiseNow(Streams(0).noise(0), 3), None, 0)
    with pytest.raises(RunError, match="take its own mechanism"):
        noise.numbers()
    with pytest.raises(SettingError, match="call step"):
        mechanism_of(Plain()).release(total_of([0, 0, 0]), Streams(0).noise(0))
