"""What a release may not do: use noise a second time, or carry a number that has no noise."""

import numpy as np
import pytest
import torch

from clipline import SettingError
from clipline.errors import RunError
from clipline.federated.clipping import ClippedSum
from clipline.federated.draws import NoiseNow
from clipline.federated.mechanism import GaussianMechanism
from clipline.privacy.events import PoissonSampling
from clipline.random.streams import Streams


def test_noise_hides_one_release_and_must_be_as_long_as_the_sum():
    total = ClippedSum(torch.zeros(6, dtype=torch.float64), 1.0, PoissonSampling(0.5))
    mechanism, noise = GaussianMechanism(9, 1.0), NoiseNow(Streams(0).noise(0), 6)
    mechanism.release(total, noise)
    with pytest.raises(RunError, match="asked for twice"):
        mechanism.release(total, noise)
    with pytest.raises(SettingError, match="noise=2 must be 6 numbers"):
        mechanism.release(total, NoiseNow(Streams(0).noise(1), 2))


def test_no_count_lies_behind_a_release_without_one():
    total = ClippedSum(torch.arange(1.0, 5.0, dtype=torch.float64), 1.0, PoissonSampling(0.1))
    release = GaussianMechanism(10, 1.0, None).release(total, np.random.default_rng(0))
    memory = torch.frombuffer(bytearray(release.mean.untyped_storage()), dtype=torch.float64)
    assert len(memory) == 4  # that of the count is there, as what is saved with a tensor is all of its memory
    assert memory[-1] == 0.0
