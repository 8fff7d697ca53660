"""One loop drives a single run and several side by side; callbacks are called in order and always closed."""

import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import (
    LOCAL,
    Observer,
    StopAfter,
    cross_entropies,
    flat_training,
    linear_model,
    small_population,
    small_training,
)

from clipline import Callback, Evaluate, Population, RunDirectory, run_together
from clipline.engine.workers.single import SingleProcess
from clipline.errors import ModuleError, RunError, SettingError
from clipline.training.callbacks import StopOnInterrupt

POPULATION, MODEL = small_population(), linear_model()
needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
WORKERS = [1, pytest.param(2, marks=needs_fork)]


def training(population=POPULATION, loss=cross_entropies, **changes):
    settings = {"rounds": 4, "cohort_size": 20, "local": LOCAL, "seed": 1, "noise_multiplier": 0.5, **changes}
    return flat_training(MODEL, loss, population, **settings)


class Logged(Callback):
    """Notes all that it is told, and may fail."""

    def __init__(self, log, name="", fail=None):
        self.log, self.name, self.fail = log, name, fail

    def _noted(self, what, number=None):
        moment = what if number is None else f"{what} {number}"
        self.log.append(f"{self.name} {moment}".strip())
        if moment == self.fail:
            raise OSError(f"{self.name} fails at {moment}")

    def on_start(self, training, state):
        self._noted("start")

    def on_round(self, report, state):
        assert state.round_index == report.round_index + 1
        self._noted("round", report.round_index)

    def on_end(self, result):
        self._noted("end")

    def close(self):
        self._noted("close")


# One loop -------------------------------------------------------------------------------------------------------------


def test_a_round_of_every_run_is_summed_in_one_call(monkeypatch):
    asked, sums = [], SingleProcess.sums

    def noted(self, requests):
        asked.append([(one.run, one.round_index) for one in requests])
        return sums(self, requests)

    monkeypatch.setattr(SingleProcess, "sums", noted)
    run_together([training(seed=1, rounds=2), training(seed=2, rounds=3)])
    assert asked == [[(0, 0), (1, 0)], [(0, 1), (1, 1)], [(1, 2)]]


# Callbacks ------------------------------------------------------------------------------------------------------------


def test_callbacks_are_called_in_their_order_and_closed_in_the_other():
    log = []
    training(rounds=2).run([Logged(log, "a"), Logged(log, "b")])
    assert ", ".join(log) == (
        "a start, b start, a round 0, b round 0, a round 1, b round 1, a end, b end, b close, a close"
    )


def test_what_writes_the_ledger_comes_first_wherever_it_stands():
    log = []
    ledger = Logged(log, "ledger")
    ledger.charged = training().init().ledger
    training(rounds=1).run([Logged(log, "a"), ledger])
    assert log[:4] == ["ledger start", "a start", "ledger round 0", "a round 0"]


def test_callbacks_of_runs_side_by_side_are_each_runs_own():
    logs = [], []
    runs = [training(seed=1, rounds=1), training(seed=2, rounds=3)]
    run_together(runs, [[Logged(log)] for log in logs])
    assert logs[0] == ["start", "round 0", "end", "close"]
    assert logs[1] == ["start", "round 0", "round 1", "round 2", "end", "close"]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        ("start", "a start, b start, a close"),  # what has not started has nothing to close
        ("round 0", "a start, b start, c start, a round 0, b round 0, c close, b close, a close"),
        ("end", "a start, b start, c start, a round 0, b round 0, c round 0, a end, b end, c close, b close, a close"),
    ],
)
def test_an_error_of_a_callback_reaches_the_caller_and_closes_all_that_have_started(moment, expected, workers):
    log = []
    callbacks = [Logged(log, "a"), Logged(log, "b", fail=moment), Logged(log, "c")]
    with pytest.raises(OSError, match=f"b fails at {moment}"):
        training(rounds=1, workers=workers).run(callbacks)
    assert ", ".join(log) == expected
    assert not multiprocessing.active_children()


def test_an_error_while_closing_still_closes_the_others():
    log = []
    with pytest.raises(OSError, match="b fails at close"):
        training(rounds=1).run([Logged(log, "a"), Logged(log, "b", fail="close"), Logged(log, "c")])
    assert log[-3:] == ["c close", "b close", "a close"]


def test_an_error_in_the_training_closes_all_callbacks():
    log, broken = [], []

    def loss(model, batch):
        if broken:
            raise ZeroDivisionError("boom")
        return cross_entropies(model, batch)

    class Breaking(Callback):
        def on_start(self, training, state):
            broken.append(1)

    run = training(loss=loss, on_error="raise", engine="one-by-one")
    words = r"of a user in round \d fails \(ZeroDivisionError: boom\); the batch has the fields x, y"
    with pytest.raises(ModuleError, match=words):
        run.run([Logged(log), Breaking()])
    assert log == ["start", "close"]


@pytest.mark.parametrize("engine", ["one-by-one", "stacked"])
def test_a_label_out_of_range_is_told_where_errors_are_shown_in_every_engine(engine):
    users = Population.from_arrays(np.arange(30), x=np.ones((30, 6)), y=np.full(30, 3))  # the model has classes 0 to 2
    run = training(population=users, rounds=1, on_error="raise", engine=engine)
    words = r"in round 0 fails \(\w+Error: .*3 is out of bounds.* fields x, y"
    with pytest.raises(ModuleError, match=words) as error:
        run.run()
    assert isinstance(error.value.__cause__, IndexError | RuntimeError)
    # That such a run ended well would tell that nobody has such a label.
    assert str(run.planned).endswith("; errors of users are shown (on_error='raise'), which it does not cover")


def test_an_error_on_start_of_one_of_several_runs_closes_those_that_have_started():
    logs = [], []
    runs = [training(seed=1), training(seed=2)]
    with pytest.raises(OSError, match="fails at start"):
        run_together(runs, [[Logged(logs[0])], [Logged(logs[1], fail="start")]])
    assert logs == (["start", "close"], ["start"])


def test_an_error_beside_one_of_several_runs_lets_the_others_finish():
    logs = [], [], []
    runs = [training(seed=seed) for seed in (1, 2, 3)]
    with pytest.raises(OSError, match="fails at round 1"):
        run_together(runs, [[Logged(logs[0])], [Logged(logs[1], fail="round 1")], [Logged(logs[2])]])
    whole = ["start", *(f"round {t}" for t in range(4)), "end", "close"]
    assert logs == (whole, ["start", "round 0", "round 1", "close"], whole)


# Stopping -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", WORKERS)
def test_a_callback_may_ask_to_stop_and_the_result_stands(workers):
    log = []
    result = training(rounds=50, workers=workers).run([Logged(log), StopAfter(2)])
    assert (result.stopped, result.guarantee.rounds, len(result.reports)) == ("interrupted", 2, 2)
    assert log == ["start", "round 0", "round 1", "end", "close"]
    assert torch.equal(result.state.params, training(rounds=2, workers=workers).run().state.params)


def test_a_request_to_stop_before_the_first_round_trains_nothing():
    result = training().run([StopAfter(0)])
    assert (result.stopped, result.reports, result.guarantee.epsilon) == ("interrupted", (), 0.0)


def test_one_run_may_stop_while_others_go_on():
    results = run_together([training(seed=1, rounds=6), training(seed=2, rounds=6)], [[StopAfter(2)], [Logged([])]])
    assert [(one.stopped, len(one.reports)) for one in results] == [("interrupted", 2), ("finished", 6)]


def test_the_budget_ends_one_run_of_several_and_its_callbacks_are_told():
    limit = training(rounds=2).planned.epsilon
    log = []
    result, other = run_together([training(max_epsilon=limit), training(seed=2)], [[Logged(log)], []])
    assert (other.stopped, len(other.reports)) == ("finished", 4)
    assert (result.stopped, len(result.reports)) == ("budget", 2)
    assert result.guarantee.epsilon <= limit
    assert log == ["start", "round 0", "round 1", "end", "close"]


# The process ----------------------------------------------------------------------------------------------------------


def circumstances():
    """What a library call must leave as it found it."""
    gc.collect()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": multiprocessing.active_children(),
        "signals": {number: signal.getsignal(number) for number in sorted(signal.valid_signals())},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()),
        "generators": (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())),  # noqa: NPY002
        "warnings": (list(warnings.filters), warnings.showwarning),
        "environment": dict(os.environ),
        "collector": (gc.isenabled(), gc.get_freeze_count(), gc.get_threshold()),
        "folder": Path.cwd(),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "path": list(sys.path),
        "group": torch.distributed.is_initialized(),
    }


OURS = "clipline-noise", "clipline-accounting", "clipline-evaluation"


def settled():
    """Wait for threads that were told to end and do not do so at once."""
    until = time.monotonic() + 10
    while time.monotonic() < until and any(thread.name.startswith(OURS) for thread in threading.enumerate()):
        time.sleep(0.01)


def assert_left_alone(call):
    call()  # what is imported or computed once for all
    settled()
    before = circumstances()
    call()
    settled()
    after = circumstances()
    for name, found in before.items():
        assert after[name] == found, name


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("workers", WORKERS)
def test_a_run_leaves_the_process_as_it_found_it_and_prints_nothing(workers, threads, capfd):
    torch.set_num_threads(threads)
    assert_left_alone(lambda: training(workers=workers).run([Logged([]), Evaluate(lambda model: {"one": 1.0})]))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("workers", WORKERS)
def test_runs_side_by_side_leave_the_process_as_they_found_it(workers, capfd):
    assert_left_alone(lambda: run_together([training(seed=seed, workers=workers) for seed in (1, 2)]))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("workers", WORKERS)
def test_a_run_that_fails_leaves_the_process_as_it_found_it(workers):
    def failing():
        with pytest.raises(OSError, match="fails at round 1"):
            training(workers=workers).run([Logged([], fail="round 1"), Evaluate(lambda model: {"one": 1.0}, every=1)])

    assert_left_alone(failing)


@pytest.mark.parametrize("begin", [lambda one, path: one.run(), lambda one, path: one.resume(path)])
def test_a_second_run_of_one_training_within_the_first_is_refused(begin, tmp_path):
    made, keys, refused = training(seed=None), [], []

    def second(report, state):
        keys.append(made.key.unprivate_bytes)
        with pytest.raises(RunError, match="at work in a run, which a second one would take the key from: make anoth"):
            begin(made, tmp_path)
        refused.append(report.round_index)
        keys.append(made.key.unprivate_bytes)

    made.run([Observer(second)])
    assert refused == [0, 1, 2, 3]
    assert len({*keys}) == 1  # the noise of all rounds is under one key
    assert made.key.unprivate_bytes not in keys  # and nobody has it when the run has ended
    assert made.run().state.round_index == 4


def test_a_run_that_fails_leaves_its_training_free_for_another():
    made = training()
    with pytest.raises(OSError, match="fails at round 1"):
        made.run([Logged([], fail="round 1")])
    assert made.run().state.round_index == 4


@pytest.mark.parametrize("wrong", [None, 3, "x", [None], [object()], [Callback]])
def test_what_is_no_list_of_callbacks_is_refused_in_a_sentence(wrong):
    with pytest.raises(SettingError, match="callbacks"):
        training(rounds=1).run(wrong)


# Ctrl-C ---------------------------------------------------------------------------------------------------------------


class Press(Callback):
    """Ctrl-C or another signal, so many times, after this many rounds."""

    def __init__(self, after, times=1, number=signal.SIGINT):
        self.after, self.times, self.number = after, times, number

    def on_round(self, report, state):
        if state.round_index == self.after:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


@pytest.fixture
def handler():
    before, other = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield before
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGTERM) is other


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_after_the_round_the_result_stands_and_the_run_can_be_resumed(handler, capsys, number, tmp_path):
    result = small_training(6).run([RunDirectory(tmp_path / "r"), Press(2, number=number), StopOnInterrupt()])
    assert (result.stopped, result.guarantee.rounds, len(result.reports)) == ("interrupted", 2, 2)
    assert torch.equal(result.state.params, small_training(6).run([StopAfter(2)]).state.params)
    assert "stopping after this round" in capsys.readouterr().err
    whole, rest = small_training(6).run(), small_training(6).resume(tmp_path / "r")
    assert torch.equal(rest.state.params, whole.state.params)
    assert (len(rest.reports), rest.guarantee) == (4, whole.guarantee)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_stops_at_once_and_the_handler_is_given_back(handler, number):
    with pytest.raises(KeyboardInterrupt):
        small_training(50).run([Press(1, times=2, number=number), StopOnInterrupt()])


def test_without_the_callback_no_signal_is_taken_over(handler):
    class Look(Callback):
        def on_round(self, report, state):
            assert signal.getsignal(signal.SIGINT) is handler

    small_training(1).run([Look()])
    with pytest.raises(KeyboardInterrupt):
        small_training(50).run([Press(1)])


def test_one_object_serves_one_run_after_the_other(handler):
    stop = StopOnInterrupt()
    assert small_training(50).run([Press(1), stop]).stopped == "interrupted"
    assert small_training(2).run([stop]).stopped == "finished"


def test_several_runs_at_once_stop_together_and_the_last_gives_the_handler_back(handler):
    stop = StopOnInterrupt()
    for _ in range(2):
        stop.on_start(None, None)
    stop.close()
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.stop_requested
    stop.close()
    stop.close()  # once too often


def test_outside_the_main_thread_nothing_changes(handler):
    results = []
    thread = threading.Thread(target=lambda: results.append(small_training(1).run([StopOnInterrupt()])))
    thread.start()
    thread.join()
    assert results[0].stopped == "finished"


def test_measuring_does_not_disturb_users_who_draw_from_torchs_generator():
    class Loose(torch.nn.Linear):
        def forward(self, x):
            return super().forward(torch.nn.functional.dropout(x, 0.5, self.training))

    def run(measure):
        torch.manual_seed(0)
        made = flat_training(
            Loose(6, 3).double(), cross_entropies, POPULATION, rounds=8, cohort_size=20, local=LOCAL, seed=1,
            noise_multiplier=0.5, engine="one-by-one",
        )  # fmt: skip
        assert made.problem.draws_globally
        return made.run([Evaluate(measure, every=1)]).state.params

    quiet = run(lambda model: {"drawn": 0.0})
    for _ in range(3):  # they would meet by chance
        assert torch.equal(run(lambda model: {"drawn": sum(float(torch.rand(1)) for _ in range(10000))}), quiet)
