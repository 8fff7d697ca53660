"""Which process trains which users: every user once, and nobody has much more to do than the others."""

import numpy as np
import pytest
import torch
from samples import request

from clipline.engine.workers.group import partition_users, requests_of_rank
from clipline.federated.backend import CohortRequest
from clipline.federated.sampling import Cohort
from clipline.privacy.events import PoissonSampling


def test_work_is_shared_longest_first_to_whoever_has_least():
    # 7 to rank 0, 5 to rank 1, 4 to rank 1 (9), 3 to rank 0 (10), 1 to rank 1 (10)
    assert [share.tolist() for share in partition_users(np.array([4, 1, 7, 3, 5]), 2)] == [[2, 3], [0, 1, 4]]


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


def test_users_without_work_are_spread_too():
    assert [len(share) for share in partition_users(np.zeros(6, np.int64), 3)] == [2, 2, 2]


def test_users_of_several_runs_are_shared_out_at_once_each_to_one_process():
    params = torch.zeros(2)
    requests = [
        request(params, users, 3, 0.1, run, PoissonSampling(0.1 + run / 10))
        for run, users in ((0, [4, 6]), (2, []), (5, [1, 4, 7]))
    ]
    # Users take as many steps as their numbers say: run 5's 7 to rank 0, run 0's 6 to rank 1, its 4 to rank 1 (10),
    # run 5's 4 to rank 0 (11), its 1 to rank 1 (11).
    shares = [requests_of_rank(requests, lambda users: users, rank, 2) for rank in range(2)]
    assert [[one.cohort.users.tolist() for one in share] for share in shares] == [
        [[], [], [4, 7]],
        [[4, 6], [], [1]],
    ]
    for share in shares:
        assert [(one.run, one.round_index, one.clip) for one in share] == [(0, 3, 0.1), (2, 3, 0.1), (5, 3, 0.1)]
        for own, whole in zip(share, requests, strict=True):
            assert own.params is params
            assert own.cohort.sampling == whole.cohort.sampling


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
