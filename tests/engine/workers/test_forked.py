"""Forked workers: what they need, and that they end with their run, however it ends, and somebody says why."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from samples import ROOT, Observer, cross_entropy, one_round
from worker_runs import HERE, TOLERANCE, alone, distance, killed, nothing_is_left, training

from clipline import SettingError
from clipline.engine.workers.forked import ForkedBackend
from clipline.engine.workers.transport import PipeTransport, SharedMemory, patience
from clipline.errors import WorkerError
from clipline.privacy.events import PoissonSampling
from clipline.training.callbacks import StopOnInterrupt

pytestmark = [
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork"),
    pytest.mark.filterwarnings("ignore::clipline.engine.workers.forked.ManyWorkersWarning"),
]


def test_a_loss_that_fails_in_a_worker_is_shown_with_its_traceback():
    def fails_elsewhere(model, batch):
        if os.getpid() != HERE:
            raise ZeroDivisionError("boom")
        return cross_entropy(model, batch)

    with pytest.raises(WorkerError, match=r"worker 1 of 3 failed in round 0 \(ZeroDivisionError: boom\)") as error:
        training(fails_elsewhere, workers=3, on_error="raise").run()
    assert "in fails_elsewhere" in str(error.value)
    assert nothing_is_left()
    assert distance(training(workers=3).run(), alone()) <= TOLERANCE


def test_a_worker_that_is_killed_ends_the_run_with_a_reason():
    with pytest.raises(WorkerError, match=r"worker 1 of 3 was ended by signal SIGKILL .* lower workers"):
        training(killed, workers=3).run()
    assert nothing_is_left()


@pytest.mark.parametrize("round_index", [1, 3])
def test_a_worker_that_is_killed_after_a_round_ends_the_next_and_costs_nothing_if_there_is_none(round_index):
    def observe(report, state):
        if report.round_index == round_index:
            child = multiprocessing.active_children()[0]
            child.kill()
            child.join()

    run = training(workers=3)
    if round_index == 3:  # the last
        result = run.run([Observer(observe)])
        assert (result.stopped, distance(result, alone()) <= TOLERANCE) == ("finished", True)
    else:
        with pytest.raises(WorkerError, match="was ended by signal SIGKILL"):
            run.run([Observer(observe)])
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


def test_a_worker_that_is_killed_at_its_beginning_is_noticed(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: os.getpid() == HERE or os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(WorkerError, match=r"could not begin .it was ended by signal SIGKILL"):
        training(workers=3).run()
    assert nothing_is_left()


def test_a_worker_collects_its_own_garbage_and_not_what_it_inherits(tmp_path):
    class Garbage:
        def __init__(self, name):
            self.itself, self.name = self, name

        def __del__(self):
            (tmp_path / f"{self.name} {'here' if os.getpid() == HERE else 'there'}").touch()

    def loss(model, batch):
        if os.getpid() != HERE:
            Garbage("own")
            gc.collect()
        return cross_entropy(model, batch)

    run = training(loss, workers=2, rounds=1)
    gc.disable()
    try:
        Garbage("inherited")
        run.run()
        assert [path.name for path in tmp_path.iterdir()] == ["own there"]
        assert not gc.isenabled()
    finally:
        gc.enable()
    gc.collect()
    assert {path.name for path in tmp_path.iterdir()} == {"own there", "inherited here"}


@pytest.mark.parametrize("moment", ["between two rounds", "in its share", "at its beginning"])
def test_a_stopped_worker_is_named_and_the_run_can_be_resumed(monkeypatch, moment):
    def stop():
        os.kill(os.getpid(), signal.SIGSTOP)

    def loss(model, batch):
        if multiprocessing.current_process().name == "clipline worker 2" and moment == "in its share":
            stop()
        return cross_entropy(model, batch)

    def observe(report, state):
        states.append(state)
        if moment == "between two rounds" and report.round_index == 1:
            (second,) = [one for one in multiprocessing.active_children() if one.name.endswith("2")]
            os.kill(second.pid, signal.SIGSTOP)

    states, limit = [], 0.5
    run = training(loss, workers=3)
    if moment == "at its beginning":
        monkeypatch.setattr(torch, "set_num_threads", lambda _: os.getpid() == HERE or stop())
    monkeypatch.setattr("clipline.engine.workers.transport.SILENCE", limit)
    with pytest.raises(WorkerError, match=r"worker (1|2) of 3 .*was silent for \d+ s"):
        run.run([Observer(observe)])
    monkeypatch.undo()
    assert nothing_is_left()
    if states:
        assert distance(training(workers=3).run(state=states[-1]), alone()) <= TOLERANCE


def test_signals_to_stop_that_reach_the_workers_too_are_for_rank_0_alone():
    def signalled(report, state):
        if report.round_index == 0:
            for child in multiprocessing.active_children():
                for number in (signal.SIGINT, signal.SIGTERM):
                    os.kill(child.pid, number)

    result = training(workers=3).run([Observer(signalled)])
    assert result.stopped == "finished"
    assert distance(result, alone()) <= TOLERANCE


def test_a_worker_that_does_not_read_is_noticed_though_the_pipe_is_full(monkeypatch):
    monkeypatch.setattr("clipline.engine.workers.transport.SILENCE", 0.3)
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    transport = PipeTransport(SharedMemory(torch.zeros(1), 2), [ours], leads=True)
    with pytest.raises(WorkerError, match="worker 1 of 2 was silent"):
        transport.share(torch.zeros(1_000_000))
    theirs.close()


def test_rounds_that_take_long_make_rank_0_wait_longer():
    assert [patience(seconds) for seconds in (0, 1, 3, 4)] == [60, 60, 60, 80]  # twenty rounds, at least a minute


IN_THREADS = """
import sys, threading
sys.path[:0] = {path!r}
from samples import Observer
from worker_runs import training
from clipline.errors import WorkerError
trainings, outcomes = [training(workers=3, rounds=300) for _ in range(3)], []
def run(one):
    def observe(report, state):
        if report.round_index == 1:
            one.backend._children[0].kill()
    try:
        one.run([Observer(observe)])
    except WorkerError as error:
        outcomes.append("SIGKILL" in str(error))
threads = [threading.Thread(target=run, args=(one,)) for one in trainings]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(outcomes)
"""


def test_a_worker_that_dies_is_noticed_while_other_threads_fork_theirs():
    # In a process of its own: trainings in threads share torch's switches and generators.
    command = [sys.executable, "-W", "ignore", "-c", IN_THREADS.format(path=[str(ROOT / "tests")])]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert run.stdout.strip() == "[True, True, True]", run.stderr


def test_ctrl_c_goes_to_everybody_and_stops_after_the_round():
    def observe(report, state):
        if report.round_index == 1:
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGINT)
            os.kill(HERE, signal.SIGINT)

    result = training(workers=3).run([StopOnInterrupt(), Observer(observe)])
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
import torch
sys.path[:0] = {path!r}
from worker_runs import cross_entropy, training
def loss(model, batch):
    # Made-up labels are 0 and 1; those of users are tried without gradients before anybody trains.
    if not (batch["y"] == 2).any() or not torch.is_grad_enabled():
        return cross_entropy(model, batch)
    if multiprocessing.parent_process() is not None:
        time.sleep(90)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
training(loss, workers=3, engine="one-by-one").run()
"""


def test_workers_do_not_outlive_the_process_that_forked_them():
    script = ORPHANS.format(path=[str(ROOT / "tests")])
    command = [sys.executable, "-W", "ignore", "-c", script]
    # The workers hold the other end of the pipes too: this returns when all have ended, and else fails.
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert len(run.stdout.split()) == 2  # there were two


def test_a_worker_has_one_thread_and_the_caller_gets_its_own_back():
    seen = []
    torch.set_num_threads(2)
    training(workers=2, rounds=1).run([Observer(lambda *_: seen.append(torch.get_num_threads()))])
    assert seen[0] == 1
    assert torch.get_num_threads() == 2


def test_a_gpu_is_not_for_forked_workers():
    problem = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(SettingError, match=r"workers=2 must be 1 on device cuda:0.* one process a GPU with torchrun"):
        ForkedBackend(None, problem, [PoissonSampling(0.5)], 2)


def test_without_fork_workers_are_refused(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(SettingError, match="workers=2 must be 1 where processes cannot be forked"):
        training(workers=2)


def test_a_group_of_the_callers_own_is_left_alone(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert distance(training(workers=2).run(), alone()) <= TOLERANCE
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_outside_a_run_a_round_is_trained_here():
    run = training(workers=2)
    state, _ = one_round(run)
    one, _ = one_round(training())
    assert torch.equal(state.params, one.params)
