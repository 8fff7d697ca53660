import os
import signal
import threading

import pytest
import torch
from samples import small_training

from clipline.training.callbacks import Callback, StopOnInterrupt


def training(rounds=50):
    return small_training(rounds)


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
def test_ctrl_c_ends_after_the_round_and_the_result_stands(handler, capsys, number):
    result = training().run([Press(2, number=number), StopOnInterrupt()])
    assert (result.stopped, result.guarantee.rounds, len(result.reports)) == ("interrupted", 2, 2)
    assert torch.equal(result.state.params, training(rounds=2).run().state.params)
    assert "stopping after this round" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_stops_at_once_and_the_handler_is_given_back(handler, number):
    with pytest.raises(KeyboardInterrupt):
        training().run([Press(1, times=2, number=number), StopOnInterrupt()])


def test_without_the_callback_no_signal_is_taken_over(handler):
    class Look(Callback):
        def on_round(self, report, state):
            assert signal.getsignal(signal.SIGINT) is handler

    training(rounds=1).run([Look()])
    with pytest.raises(KeyboardInterrupt):
        training().run([Press(1)])


def test_one_object_serves_one_run_after_the_other(handler):
    stop = StopOnInterrupt()
    assert training().run([Press(1), stop]).stopped == "interrupted"
    assert training(rounds=2).run([stop]).stopped == "finished"


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
    thread = threading.Thread(target=lambda: results.append(training(rounds=1).run([StopOnInterrupt()])))
    thread.start()
    thread.join()
    assert results[0].stopped == "finished"
