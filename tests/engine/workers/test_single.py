"""The backend of one process: the sum of a cohort is that of its clipped updates and bits, whatever trains it."""

import numpy as np
import pytest
import torch
from samples import cross_entropies, one_by_one, opened, population_of, request, rows_of
from torch import nn

from clipline import LocalSGD
from clipline.engine.core.problem import LocalRun
from clipline.engine.stacked.trainer import Stacked
from clipline.engine.workers.single import SingleProcess
from clipline.federated.backend import CohortRequest
from clipline.federated.clipping import clip_rows, join_bit
from clipline.federated.sampling import Cohort
from clipline.privacy.events import PoissonSampling
from clipline.random.streams import Streams

USERS = np.array([0, 1, 3, 4, 5])


def plain():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
    return one_by_one(model, cross_entropies, population_of([9, 0, 4, 1, 6, 30]), LocalSGD(0.5, 4), Streams(0))


def trainers(trainer):
    return trainer, Stacked(trainer, 5), Stacked(trainer, 5, block_size=2)


def test_the_sum_of_a_cohort_is_that_of_its_clipped_updates_and_bits_whatever_the_engine():
    trainer = plain()
    params = trainer.problem.model.initial + 0.1
    rows = rows_of(trainer, USERS, 2, params)
    clip = 1.001 * float(rows.norm(dim=1).median())  # nobody at the border
    clipped, within = clip_rows(rows, clip)
    assert within.sum() == 3
    for one in trainers(trainer):
        (total,) = SingleProcess(one).sums([request(params, USERS, 2, clip)])
        torch.testing.assert_close(opened(total), join_bit(clipped, within).sum(dim=0), rtol=1e-12, atol=1e-13)
        assert (total.bound, total.sampling) == (clip, PoissonSampling(0.5))
    (nobody,) = SingleProcess(trainer).sums([request(params, USERS[:0], 2, clip)])
    assert not opened(nobody).any()


def several(trainer, rates=(0.5, 0.05, 0.9)):
    """Requests of three runs with seed, learning rate, round, cohort, parameters, clip and sampling of their own."""
    trainer.problem.runs = [LocalRun(Streams(seed), lr) for seed, lr in enumerate(rates)]
    generator = torch.Generator().manual_seed(1)
    asked = []
    for run, (users, t, clip) in enumerate((([3, 5, 0, 1], 2, 0.1), ([], 0, 0.2), ([5, 4, 3], 7, 10.0))):
        initial = trainer.problem.model.initial
        params = initial + 0.1 * torch.randn(len(initial), generator=generator, dtype=initial.dtype)
        asked.append(request(params, users, t, clip, run, PoissonSampling(0.1 * (run + 1))))
    return asked


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_sums_of_several_requests_are_those_of_one_request_at_a_time(which):
    trainer = plain()
    asked = several(trainer)
    backend = SingleProcess(trainers(trainer)[which])
    together = backend.sums(asked)
    for total, one in zip(together, asked, strict=True):
        (alone,) = backend.sums([one])
        torch.testing.assert_close(opened(total), opened(alone), rtol=1e-12, atol=1e-13)
        assert (total.bound, total.sampling) == (one.clip, one.cohort.sampling) == (alone.bound, alone.sampling)
    assert not opened(together[1]).any()
    assert float(opened(together[0])[:-1].norm()) > 0


def test_the_clip_is_read_once_and_only_after_the_first_block_has_been_begun():
    """On a GPU reading it waits for the round before: by then this round's first block must be under way."""
    trainer, events = Stacked(plain(), 5, block_size=2), []

    class Watched:
        def train(self, requests):
            for number, block in enumerate(trainer.train(requests)):
                events.append(f"block {number}")
                yield block

    def read():
        events.append("clip")
        return 0.3

    asked = CohortRequest(trainer.problem.model.initial, Cohort(USERS, PoissonSampling(0.5)), 0, read)
    (late,) = SingleProcess(Watched()).sums([asked])
    assert events == ["block 0", "clip", "block 1", "block 2"]
    (plainly,) = SingleProcess(trainer).sums([request(trainer.problem.model.initial, USERS, 0, 0.3)])
    assert late.bound == 0.3
    assert torch.equal(opened(late), opened(plainly))


def test_a_cohort_of_nobody_has_the_bound_of_its_round_too():
    trainer, read = plain(), []
    asked = CohortRequest(
        trainer.problem.model.initial, Cohort(USERS[:0], PoissonSampling(0.5)), 0, lambda: read.append(1) or 0.3
    )
    (total,) = SingleProcess(trainer).sums([asked])
    assert (total.bound, read) == (0.3, [1])
