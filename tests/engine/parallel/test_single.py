import numpy as np
import torch
from samples import cross_entropies, population_of, rows_of
from torch import nn

from clipline import LocalSGD
from clipline.engine.one_by_one import OneByOne
from clipline.engine.parallel.group import SingleProcess
from clipline.engine.stacked.trainer import Stacked
from clipline.federated.clipping import clip_rows, join_bit
from clipline.federated.sampling import Cohort
from clipline.privacy.events import PoissonSampling
from clipline.streams import Streams


def test_the_sum_of_a_cohort_is_that_of_its_clipped_updates_and_bits_whatever_the_engine():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
    plain = OneByOne(model, cross_entropies, population_of([9, 0, 4, 1, 6, 30]), LocalSGD(0.5, 4), Streams(0))
    users, params = np.array([0, 1, 3, 4, 5]), plain.flat.initial + 0.1
    rows = rows_of(plain, users, 2, params)
    clip = float(rows.norm(dim=1).median())
    clipped, within = clip_rows(rows, clip)
    assert within.sum() == 3
    for clients in (plain, Stacked(plain, 5), Stacked(plain, 5, block_size=2)):
        total = SingleProcess(clients).clipped_sum(params, Cohort(users, PoissonSampling(0.5)), 2, clip)
        torch.testing.assert_close(total.total, join_bit(clipped, within).sum(dim=0), rtol=1e-12, atol=1e-13)
        assert (total.bound, total.sampling) == (clip, PoissonSampling(0.5))
    nobody = SingleProcess(plain).clipped_sum(params, Cohort(users[:0], PoissonSampling(0.5)), 2, clip)
    assert not nobody.total.any()
