"""Several processes give what one gives. Workers are forked."""

import multiprocessing
import os

import numpy as np
import pytest
import torch
from samples import LOCAL, Observer, cross_entropy, opened, request
from worker_runs import TOLERANCE, alone, distance, nothing_is_left, training, users_of

from clipline.engine.stacked.trainer import Stacked
from clipline.engine.workers.forked import ForkedBackend
from clipline.engine.workers.group import partition_users, requests_of_rank
from clipline.engine.workers.single import SingleProcess
from clipline.federated.backend import CohortRequest
from clipline.federated.sampling import Cohort
from clipline.privacy.events import PoissonSampling

pytestmark = [
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork"),
    pytest.mark.filterwarnings("ignore::clipline.engine.workers.forked.ManyWorkersWarning"),
]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_any_number_of_workers_gives_the_same_run(sampling, workers):
    run = training(sampling=sampling, workers=workers)
    sizes = np.diff(run.population.offsets)
    assert any((sizes[users] == 0).any() for users in users_of(run))  # users without examples take part
    one, many = alone(sampling=sampling), run.run()
    assert distance(many, one) <= TOLERANCE
    assert [(r.clip, r.fraction_within, r.guarantee) for r in many.reports] == [
        (r.clip, r.fraction_within, r.guarantee) for r in one.reports
    ]
    assert distance(one, training(sampling=sampling, seed=2).run()) > 1e-3  # the measure does tell runs apart
    assert nothing_is_left()


def test_every_worker_trains_its_own_users_and_no_others(tmp_path):
    def loss(model, batch):
        with (tmp_path / str(os.getpid())).open("a") as file:
            file.write("step\n")
        return cross_entropy(model, batch)

    run = training(loss, workers=3, rounds=1, engine="one-by-one")
    for path in tmp_path.iterdir():  # the trial's
        path.unlink()
    run.run()
    (users,) = users_of(run)
    steps = LOCAL.steps_of(run.population, users)
    expected = sorted(steps[share].sum() for share in partition_users(steps, 3))
    assert sorted(len(path.read_text().splitlines()) for path in tmp_path.iterdir()) == expected
    assert len(expected) == 3


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_a_cohort_may_be_smaller_than_the_workers_or_empty(sampling):
    settings = {"sampling": sampling, "cohort_size": 1, "rounds": 8, "noise_multiplier": 0.05}
    run = training(**settings, workers=3)
    sizes = {len(users) for users in users_of(run)}
    assert sizes == {1} if sampling == "fixed" else {0, 1} <= sizes
    assert distance(run.run(), alone(**settings)) <= TOLERANCE


def test_in_float32_one_round_differs_by_one_rounding_of_a_parameter_at_most():
    one = training(dtype=torch.float32, rounds=1).run().state.params
    many = training(dtype=torch.float32, rounds=1, workers=3).run().state.params
    assert torch.allclose(many, one, rtol=2**-23, atol=0)


def test_a_run_goes_on_with_another_number_of_workers():
    states = []
    training(workers=3).run([Observer(lambda _, state: states.append(state))])
    assert distance(training().run(state=states[1]), alone()) <= TOLERANCE
    assert distance(training(workers=2, engine="stacked").run(state=states[1]), alone()) <= TOLERANCE


@pytest.mark.parametrize("workers", [2, 3])
def test_several_requests_at_once_give_what_one_process_gives(workers):
    run = training()
    samplings = [PoissonSampling(0.1), PoissonSampling(0.2)]
    problem = run.problem.side_by_side([run.problem, training(seed=2).problem])
    trainer = Stacked(run.one_by_one, 40, problem=problem)
    params = run.init().params
    asked = [
        request(params, np.arange(20), 3, 0.1, 0, samplings[0]),
        request(params + 0.01, np.arange(10, 40), 5, 0.2, 1, samplings[1]),
    ]
    expected = [opened(total) for total in SingleProcess(trainer).sums(asked)]
    backend = ForkedBackend(trainer, problem, samplings, workers)
    with backend.running():
        for order in ((0, 1), (1,), (0,), (1, 0)):  # a run may have ended before the others
            totals = backend.sums([asked[number] for number in order])
            assert [(total.bound, total.sampling) for total in totals] == [
                (asked[number].clip, samplings[number]) for number in order
            ]
            for number, total in zip(order, totals, strict=True):
                torch.testing.assert_close(opened(total), expected[number], rtol=1e-12, atol=1e-14)
    assert nothing_is_left()


# Which process trains which users -------------------------------------------------------------------------------------


def test_work_is_shared_longest_first_to_whoever_has_least():
    # 7 to rank 0, 5 to rank 1, 4 to rank 1 (9), 3 to rank 0 (10), 1 to rank 1 (10)
    assert [share.tolist() for share in partition_users(np.array([4, 1, 7, 3, 5]), 2)] == [[2, 3], [0, 1, 4]]
    assert [len(share) for share in partition_users(np.zeros(6, np.int64), 3)] == [2, 2, 2]  # without work


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 200])
def test_every_user_has_one_process_and_none_has_more_than_the_average_and_one_user(size, count):
    steps = np.random.default_rng(count).integers(0, 40, count)
    shares = partition_users(steps, size)
    assert len(shares) == size
    assert np.array_equal(np.sort(np.concatenate(shares)), np.arange(count))
    assert all((np.diff(share) > 0).all() for share in shares)
    loads = [steps[share].sum() for share in shares]
    assert max(loads) <= steps.sum() / size + steps.max(initial=0)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shares_of_all_processes_together_are_the_requests(size):
    rng = np.random.default_rng(size)
    requests = [request(torch.zeros(2), rng.permutation(40)[:count], run=run) for run, count in enumerate((9, 0, 40))]
    shares = [requests_of_rank(requests, lambda users: users % 5, rank, size) for rank in range(size)]
    for number, whole in enumerate(requests):
        users = np.concatenate([share[number].cohort.users for share in shares])
        assert sorted(users.tolist()) == sorted(whole.cohort.users.tolist())


def test_a_share_does_not_read_the_clip():
    def read():
        raise AssertionError("on a GPU this waits for the round before")

    late = CohortRequest(torch.zeros(2), Cohort(np.arange(4), PoissonSampling(0.5)), 0, read)
    (own,) = requests_of_rank([late], lambda users: users, 0, 2)
    with pytest.raises(AssertionError, match="waits"):
        _ = own.clip
