"""What every backend promises: the same sums for the same requests, by whatever trainer and in how many processes."""

import multiprocessing
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from samples import cross_entropies, one_by_one, opened, population_of, request

from clipline import LocalSGD
from clipline.engine.stacked.trainer import Stacked
from clipline.engine.workers.forked import ForkedBackend
from clipline.engine.workers.single import SingleProcess
from clipline.federated.backend import CohortRequest
from clipline.federated.clipping import ClippedSum, clip_rows, join_bit
from clipline.federated.sampling import Cohort
from clipline.privacy.events import FixedSizeSampling, PoissonSampling
from clipline.random.streams import Streams

POPULATION = population_of([6, 3, 9, 1, 0, 14, 7, 5, 30, 2])
SAMPLINGS = [PoissonSampling(0.5), FixedSizeSampling(4, 10), PoissonSampling(0.1)]
forks = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")


def problem_of(runs=3):
    """A plain trainer of several runs, each with a seed and a learning rate of its own."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(5, 3))
    made = [
        one_by_one(model.double(), cross_entropies, POPULATION, LocalSGD(0.1 + 0.2 * run, 4), Streams(run))
        for run in range(runs)
    ]
    made[0].problem = made[0].problem.side_by_side([one.problem for one in made])
    return made[0]


def alone(trainer):
    return SingleProcess(trainer)


def stacked(trainer):
    return SingleProcess(Stacked(trainer, 10))


def two_processes(trainer):
    return ForkedBackend(trainer, trainer.problem, SAMPLINGS, 2)


def three_processes_stacked(trainer):
    return ForkedBackend(Stacked(trainer, 10), trainer.problem, SAMPLINGS, 3)


BACKENDS = [
    alone,
    stacked,
    pytest.param(two_processes, marks=forks),
    pytest.param(three_processes_stacked, marks=forks),
]
USERS = [[0, 2, 5, 8], [1, 2, 3, 4], []]


def requests(params, runs=3, round_index=4):
    return [
        request(params + 0.1 * run, USERS[run], round_index, 0.3 + 0.3 * run, run, SAMPLINGS[run])
        for run in range(runs)
    ]


def expected(trainer, one):
    """The plain version: every user's update, clipped rows, joined bits, added up."""
    users = np.asarray(one.cohort.users)
    updates = trainer.block(one.params, users, one.round_index, one.run)
    return join_bit(*clip_rows(updates.dense(len(one.params)), one.clip)).sum(0)


@contextmanager
def running(make, runs=3):
    trainer = problem_of(runs)
    backend = make(trainer)
    with backend.running():
        yield trainer, backend


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("runs", [1, 3])
def test_every_backend_gives_the_sums_of_the_plain_version(make, runs):
    with running(make) as (trainer, backend):
        asked = requests(trainer.problem.model.initial, runs)
        totals = backend.sums(asked)
        assert all(isinstance(total, ClippedSum) for total in totals)
        for one, total in zip(asked, totals, strict=True):
            assert (total.bound, total.sampling) == (one.clip, one.cohort.sampling)
            inside = opened(total)
            assert inside.dtype == torch.float64
            torch.testing.assert_close(inside, expected(trainer, one), rtol=1e-11, atol=1e-13)
            assert inside[-1] == expected(trainer, one)[-1]


@pytest.mark.parametrize("make", BACKENDS)
def test_a_request_has_the_sum_that_it_has_alone_whoever_else_asks(make):
    with running(make) as (trainer, backend):
        asked = requests(trainer.problem.model.initial)
        together = [opened(total) for total in backend.sums(asked)]
        for order in ([0], [1], [2], [2, 0], [1, 2]):
            for place, total in zip(order, backend.sums([asked[place] for place in order]), strict=True):
                torch.testing.assert_close(opened(total), together[place], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("make", BACKENDS)
def test_rounds_follow_each_other_and_one_asked_again_is_the_same_to_the_last_bit(make):
    with running(make) as (trainer, backend):
        initial = trainer.problem.model.initial
        first = [opened(total) for total in backend.sums(requests(initial, round_index=0))]
        second = [opened(total) for total in backend.sums(requests(initial, round_index=1))]
        again = [opened(total) for total in backend.sums(requests(initial, round_index=0))]
        assert all(map(torch.equal, first, again))
        assert not torch.equal(first[0], second[0])  # other batches, other dropout


@pytest.mark.parametrize("make", BACKENDS)
def test_a_backend_reads_and_leaves_alone_what_it_is_given(make):
    with running(make) as (trainer, backend):
        asked = requests(trainer.problem.model.initial)
        before = [one.params.clone() for one in asked], [one.cohort.users.copy() for one in asked]
        backend.sums(asked)
        assert all(map(torch.equal, before[0], [one.params for one in asked]))
        assert all(map(np.array_equal, before[1], [one.cohort.users for one in asked]))


@pytest.mark.parametrize("make", [alone, stacked])
def test_in_one_process_the_clip_is_read_only_when_the_first_block_has_been_begun(make, monkeypatch):
    """On a GPU reading it waits for the round before: by then this round's first users are to train."""
    with running(make, 1) as (trainer, backend):
        log, train = [], type(backend.trainer).train

        def noted(self, asked):
            for block in train(self, asked):
                log.append("block")
                yield block

        monkeypatch.setattr(type(backend.trainer), "train", noted)

        def read():
            log.append("clip")
            return 0.3

        cohort = Cohort(np.array(USERS[0]), SAMPLINGS[0])
        (total,) = backend.sums([CohortRequest(trainer.problem.model.initial, cohort, 0, read)])
        assert log[:2] == ["block", "clip"]
        assert log.count("clip") == 1
        assert total.bound == 0.3


@forks
def test_outside_a_run_a_backend_of_several_processes_trains_here():
    trainer = problem_of()
    asked = requests(trainer.problem.model.initial)
    for one, total in zip(asked, two_processes(trainer).sums(asked), strict=True):
        torch.testing.assert_close(opened(total), expected(trainer, one), rtol=1e-11, atol=1e-13)
