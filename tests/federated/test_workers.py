"""Several processes give what one gives, and none is left behind. Workers are forked; the group is gloo."""

import multiprocessing
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from samples import LOCAL, cross_entropy, small_population

from clipline import Population, SettingError, Training
from clipline.errors import WorkerError
from clipline.federated.local_workers import LocalWorkers, ManyWorkersWarning, usable_cores
from clipline.federated.workers import share_out
from clipline.privacy.events import PoissonSampling

pytestmark = [
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork"),
    pytest.mark.filterwarnings("ignore::clipline.federated.local_workers.ManyWorkersWarning"),
]
HERE = os.getpid()
TOLERANCE = 1e-12  # of the parameters' norm, in float64


def model_with_dropout(dtype=torch.float64):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)]
    return torch.nn.Sequential(*layers).to(dtype)


def training(loss=cross_entropy, dtype=torch.float64, **changes):
    """Users of 0 to 30 examples, so some have none and some four times the steps of others."""
    settings = {"rounds": 4, "cohort_size": 20, "local": LOCAL, "seed": 1, "noise_multiplier": 0.5, **changes}
    return Training(model_with_dropout(dtype), loss, small_population(), **settings)


@cache
def alone(**changes):
    return training(**changes).run()


def distance(result, other):
    return float((result.state.params - other.state.params).norm() / other.state.params.norm())


def users_of(run):
    """The users of every round."""
    algorithm = run.algorithm
    return [algorithm.sampler.draw(algorithm.streams.sampling(t)).users for t in range(run.rounds)]


def nothing_is_left():
    return not multiprocessing.active_children() and not dist.is_initialized()


def test_work_is_shared_longest_first_to_whoever_has_least():
    users, steps = np.array([3, 5, 8, 9, 12]), np.array([4, 1, 7, 3, 5])
    # 7 to rank 0, 5 to rank 1, 4 to rank 1 (9), 3 to rank 0 (10), 1 to rank 1 (10)
    assert [share.tolist() for share in share_out(users, steps, 2)] == [[8, 9], [3, 5, 12]]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 200])
def test_every_user_has_one_worker_and_none_has_more_than_the_average_and_one_user(size, count):
    rng = np.random.default_rng(count)
    users, steps = np.sort(rng.choice(10_000, count, replace=False)), rng.integers(0, 40, count)
    shares = share_out(users, steps, size)
    assert len(shares) == size
    assert np.array_equal(np.sort(np.concatenate(shares)), users)
    assert all((np.diff(share) > 0).all() for share in shares)
    loads = [steps[np.isin(users, share)].sum() for share in shares]
    assert max(loads) <= steps.sum() / size + steps.max(initial=0)


def test_users_without_work_are_spread_too():
    assert [len(share) for share in share_out(np.arange(6), np.zeros(6, np.int64), 3)] == [2, 2, 2]


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

    run = training(loss, workers=3, rounds=1)
    run.run()
    (users,) = users_of(run)
    steps = LOCAL.steps_of(run.population, users)
    expected = sorted(steps[np.isin(users, share)].sum() for share in share_out(users, steps, 3))
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


def test_a_loss_that_fails_in_a_worker_is_shown_with_its_traceback():
    def fails_elsewhere(model, batch):
        if os.getpid() != HERE:
            raise ZeroDivisionError("boom")
        return cross_entropy(model, batch)

    with pytest.raises(WorkerError, match=r"worker 1 of 3 failed in round 0 \(ZeroDivisionError: boom\)") as error:
        training(fails_elsewhere, workers=3).run()
    assert "in fails_elsewhere" in str(error.value)
    assert nothing_is_left()
    assert distance(training(workers=3).run(), alone()) <= TOLERANCE


def test_a_loss_that_fails_here_raises_its_own_error():
    def fails_here(model, batch):
        if os.getpid() == HERE:
            raise ZeroDivisionError("boom")
        return cross_entropy(model, batch)

    with pytest.raises(ZeroDivisionError, match="boom"):
        training(fails_here, workers=2).run()
    assert nothing_is_left()


@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_that_is_killed_ends_the_run_with_a_reason(workers):
    def killed(model, batch):
        if multiprocessing.current_process().name == "clipline worker 1":
            os.kill(os.getpid(), signal.SIGKILL)
        return cross_entropy(model, batch)

    with pytest.raises(WorkerError, match=f"worker 1 of {workers} was ended by signal SIGKILL .* lower workers"):
        training(killed, workers=workers).run()
    assert nothing_is_left()


def test_a_worker_that_cannot_begin_says_why(monkeypatch):
    backward = torch.autograd.backward

    def refuses(*arguments):
        if os.getpid() != HERE:
            raise RuntimeError("no autograd after a fork")
        return backward(*arguments)

    monkeypatch.setattr(torch.autograd, "backward", refuses)
    monkeypatch.setattr("traceback.print_exc", lambda: None)
    with pytest.raises(WorkerError, match=r"could not begin \(RuntimeError: no autograd after a fork\): use workers=1"):
        training(workers=3).run()
    assert nothing_is_left()


@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_that_is_killed_at_its_beginning_is_noticed(monkeypatch, workers):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: os.getpid() == HERE or os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(WorkerError, match=r"could not begin .it was ended by signal SIGKILL"):
        training(workers=workers).run()
    assert nothing_is_left()


def killing_a_worker_after(round_index):
    def observe(report, state):
        if report.round_index == round_index:
            child = multiprocessing.active_children()[0]
            child.kill()
            child.join()

    return observe


def test_a_worker_that_is_killed_between_two_rounds_ends_the_next():
    with pytest.raises(WorkerError, match="was ended by signal SIGKILL"):
        training(workers=3).run(observe=killing_a_worker_after(1))
    assert nothing_is_left()


def test_a_worker_that_is_killed_after_the_last_round_costs_nothing():
    result = training(workers=3).run(observe=killing_a_worker_after(3))
    assert (result.stopped, distance(result, alone()) <= TOLERANCE) == ("finished", True)
    assert nothing_is_left()


def test_an_error_beside_the_training_ends_the_workers():
    def observe(report, state):
        raise KeyError("disk full")

    with pytest.raises(KeyError, match="disk full"):
        training(workers=3).run(observe=observe)
    assert nothing_is_left()


def test_ctrl_c_goes_to_everybody_and_stops_after_the_round():
    def observe(report, state):
        if report.round_index == 1:
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGINT)
            os.kill(HERE, signal.SIGINT)

    result = training(workers=3).run(observe=observe)
    assert (result.stopped, result.guarantee.rounds) == ("interrupted", 2)
    assert distance(training(workers=2).run(state=result.state), alone()) <= TOLERANCE


def test_ctrl_c_does_not_hurt_a_worker_in_the_midst_of_its_share(tmp_path):
    def loss(model, batch):
        if os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGINT)
        return cross_entropy(model, batch)

    assert distance(training(loss, workers=2).run(), alone()) <= TOLERANCE


ORPHANS = """
import multiprocessing, os, signal, sys, time
sys.path[:0] = {path!r}
from test_workers import training
def loss(model, batch):
    if multiprocessing.parent_process() is not None:
        time.sleep(90)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
training(loss, workers=3).run()
"""


def test_workers_do_not_outlive_the_process_that_forked_them():
    here = Path(__file__).parent
    script = ORPHANS.format(path=[str(here), str(here.parent)])
    command = [sys.executable, "-W", "ignore", "-c", script]
    # The workers hold the other end of the pipes too: this returns when all have ended, and else fails.
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert len(run.stdout.split()) == 2  # there were two


def test_a_worker_has_one_thread_and_the_caller_gets_its_own_back():
    seen = []
    torch.set_num_threads(2)
    training(
        workers=2, rounds=1, evaluate=lambda _: {"threads": float(seen.append(torch.get_num_threads()) or 0)}
    ).run()
    assert seen[0] == 1
    assert torch.get_num_threads() == 2


def test_outside_a_run_a_round_is_trained_here():
    run = training(workers=2)
    state, _ = run.algorithm.round(run.algorithm.first())
    one, _ = training().algorithm.round(run.algorithm.first())
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
    clients = SimpleNamespace(flat=SimpleNamespace(vector=SimpleNamespace(device=torch.device("cuda", 0))))
    with pytest.raises(SettingError, match=r"workers=2 must be 1 on device cuda:0.* one process a GPU with torchrun"):
        LocalWorkers(clients, lambda users: users, PoissonSampling(0.5), 2)


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


def test_a_population_in_which_nobody_has_examples_moves_nothing():
    empty = Population.from_arrays(
        np.zeros(0, np.int64), known_users=np.arange(9), x=np.zeros((0, 6)), y=np.zeros(0, np.int64)
    )
    settings = {"rounds": 1, "cohort_size": 5, "local": LOCAL, "seed": 1, "noise_multiplier": 0.0}
    run = Training(model_with_dropout(), cross_entropy, empty, workers=2, **settings)
    assert torch.equal(run.run().state.params, run.algorithm.first().params)
