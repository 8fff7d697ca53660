"""Several processes give what one gives. Workers are forked; the group is gloo."""

import multiprocessing
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from clipline.engine.parallel.jobs import Errand, share_of, share_out
from samples import LOCAL, cross_entropy
from worker_runs import TOLERANCE, alone, distance, model_with_dropout, nothing_is_left, training, users_of

from clipline import Population, SettingError, Training
from clipline.engine.parallel.forked import ForkedBackend, ManyWorkersWarning, usable_cores

pytestmark = [
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork"),
    pytest.mark.filterwarnings("ignore::clipline.engine.parallel.forked.ManyWorkersWarning"),
]


def test_work_is_shared_longest_first_to_whoever_has_least():
    # 7 to rank 0, 5 to rank 1, 4 to rank 1 (9), 3 to rank 0 (10), 1 to rank 1 (10)
    assert [share.tolist() for share in share_out(np.array([4, 1, 7, 3, 5]), 2)] == [[2, 3], [0, 1, 4]]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 200])
def test_every_user_has_one_worker_and_none_has_more_than_the_average_and_one_user(size, count):
    steps = np.random.default_rng(count).integers(0, 40, count)
    shares = share_out(steps, size)
    assert len(shares) == size
    assert np.array_equal(np.sort(np.concatenate(shares)), np.arange(count))
    assert all((np.diff(share) > 0).all() for share in shares)
    loads = [steps[share].sum() for share in shares]
    assert max(loads) <= steps.sum() / size + steps.max(initial=0)


def test_users_without_work_are_spread_too():
    assert [len(share) for share in share_out(np.zeros(6, np.int64), 3)] == [2, 2, 2]


def test_users_of_several_runs_are_shared_out_at_once_each_to_one_worker():
    begin = torch.zeros(2)
    errands = [
        Errand(run, begin, np.array(users, np.int64), 3, 0.1) for run, users in ((0, [4, 6]), (2, []), (5, [1, 4, 7]))
    ]
    # Users take as many steps as their numbers say: run 5's 7 to rank 0, run 0's 6 to rank 1, its 4 to rank 1 (10),
    # run 5's 4 to rank 0 (11), its 1 to rank 1 (11).
    shares = [share_of(errands, lambda users: users, rank, 2) for rank in range(2)]
    assert [[one.users.tolist() for one in share] for share in shares] == [[[], [], [4, 7]], [[4, 6], [], [1]]]
    for share in shares:
        assert [(one.run, one.round_index, one.clip) for one in share] == [(0, 3, 0.1), (2, 3, 0.1), (5, 3, 0.1)]


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
    expected = sorted(steps[share].sum() for share in share_out(steps, 3))
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


def test_a_stack_of_users_may_be_shared_out_too():
    assert distance(training(engine="stacked", workers=2).run(), alone()) <= TOLERANCE


def test_a_run_goes_on_with_another_number_of_workers():
    states = []
    training(workers=3).run(observe=lambda _, state: states.append(state))
    assert distance(training().run(state=states[1]), alone()) <= TOLERANCE
    assert distance(training(workers=2).run(state=states[1]), alone()) <= TOLERANCE


def test_outside_a_run_a_round_is_trained_here():
    run = training(workers=2)
    state, _ = run.algorithm.round(run.algorithm.init())
    one, _ = training().algorithm.round(run.algorithm.init())
    assert torch.equal(state.params, one.params)


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "many", 10**6])
def test_a_number_of_workers_that_makes_no_sense_is_refused(workers):
    with pytest.raises(SettingError, match="workers="):
        training(workers=workers)


def test_torchrun_is_refused_where_it_started_nothing():
    with pytest.raises(SettingError, match=r"workers='torchrun' must be a number .*: start with torchrun"):
        training(workers="torchrun")
    with pytest.raises(SettingError, match=r"call run\(\)"):
        training().serve()


def test_more_workers_than_cores_are_warned_of():
    with pytest.warns(ManyWorkersWarning, match=f"is above the {usable_cores()} cores"):
        training(workers=usable_cores() + 1)


def test_a_gpu_is_not_for_forked_workers():
    hands = SimpleNamespace(flat=SimpleNamespace(vector=SimpleNamespace(device=torch.device("cuda", 0))))
    with pytest.raises(SettingError, match=r"workers=2 must be 1 on device cuda:0.* one process a GPU with torchrun"):
        ForkedBackend(hands, lambda users: users, 2)


def test_without_fork_workers_are_refused(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(SettingError, match="workers=2 must be 1 where processes cannot be forked"):
        training(workers=2)


def test_a_group_of_the_callers_own_is_left_alone(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(SettingError, match="has a group already"):
            training(workers=2).run()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_how_errors_are_printed_is_left_to_the_caller():
    before = sys.excepthook
    training(workers=2, rounds=1).run()
    assert sys.excepthook is before


def test_a_population_in_which_nobody_has_examples_moves_nothing():
    empty = Population.from_arrays(
        np.zeros(0, np.int64), known_users=np.arange(9), x=np.zeros((0, 6)), y=np.zeros(0, np.int64)
    )
    settings = {"rounds": 1, "cohort_size": 5, "local": LOCAL, "seed": 1, "noise_multiplier": 0.0}
    run = Training(model_with_dropout(), cross_entropy, empty, workers=2, **settings)
    assert torch.equal(run.run().state.params, run.algorithm.init().params)
