import re
from functools import partial

import pytest
from samples import ROOT, Observer, StopAfter, small_training, terminal_of

from clipline.console import Bar
from clipline.engine.core.notices import Notices
from clipline.engine.gpu.programs.program_cache import forget_programs
from clipline.engine.stacked.trainer import Stacked
from clipline.engine.workers.single import SingleProcess
from clipline.training import progress
from clipline.training.callbacks import Callback
from clipline.training.evaluation import Evaluate
from clipline.training.progress import Progress, _fraction

training = partial(small_training, 5)


def evaluate(every=2):
    return Evaluate(lambda model: {"accuracy": 0.25, "loss": 1.5}, every=every)


def at_once(monkeypatch):
    """Every line is printed, however young the last one is."""
    for name in ("QUIET_SECONDS", "_TENTH_SECONDS"):
        monkeypatch.setattr(progress, name, 0.0)


def test_a_log_has_a_line_for_every_round_that_was_evaluated_on_standard_error(capsys):
    training().run([evaluate(), Progress()])
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["round 2/5", "round 4/5", "round 5/5"]
    for line in lines:
        assert "  accuracy 0.250  loss 1.500  clip 0." in line
        assert "  fraction within " in line
        assert "  epsilon so far " in line
        assert re.search(r" rounds/s  0:\d\d:\d\d left", line)


def test_a_named_metric_is_shown_alone_and_from_the_first_round_on(capsys, monkeypatch):
    at_once(monkeypatch)
    small_training(2).run([evaluate(), Progress("accuracy")])
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("round 1/2  accuracy -  clip 0.1")
    assert "accuracy 0.250  clip" in second


def test_rounds_without_metrics_are_mentioned_now_and_then(capsys, monkeypatch):
    training().run([Progress()])
    (last,) = capsys.readouterr().err.splitlines()  # five rounds take less than a second
    assert last.startswith("round 5/5  clip 0.")
    monkeypatch.setattr(progress, "_TENTH_SECONDS", 0.0)
    small_training(30).run([Progress()])
    shown = [int(re.match(r"round (\d+)/30  ", line)[1]) for line in capsys.readouterr().err.splitlines()]
    assert shown == [3, 6, 9, 12, 15, 18, 21, 24, 27, 30]
    small_training(30).run([evaluate(every=12), Progress()])
    shown = [int(re.match(r"round (\d+)/30  ", line)[1]) for line in capsys.readouterr().err.splitlines()]
    assert shown == [3, 6, 9, 12, 24, 30]  # once a round was measured, those that are
    at_once(monkeypatch)
    training().run([Progress()])
    assert len(capsys.readouterr().err.splitlines()) == 5


def test_noise_that_is_not_comfortable_is_told_before_the_first_round(capsys):
    noisy = small_training(2, noise_multiplier=5.0)
    assert 0.2 < noisy.noise_norm < 2
    noisy.run([Progress()])
    first, *others = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"can it train\?  (feasible|doubtful): the noise is 1\.\d times the longest possible .*", first)
    small_training(2, noise_multiplier=0.1).run([Progress()])
    assert not any("can it train?" in line for line in [*others, *capsys.readouterr().err.splitlines()])


def test_a_terminal_has_a_live_bar_that_goes_when_the_run_ends_however_it_ends(monkeypatch):
    terminal = terminal_of(monkeypatch, 100)
    training().run([evaluate(), Progress()])
    assert "5/5" in terminal.getvalue()
    assert "epsilon so far" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[?25h")  # the cursor is shown again
    with pytest.raises(ZeroDivisionError):
        training().run([Progress(), Observer(lambda report, state: 1 / 0)])
    assert terminal.getvalue().endswith("\x1b[?25h")


GREEN, RED = "\x1b[38;2;114;156;31m", "\x1b[31m"


def test_a_bar_is_green_only_where_the_run_finished_and_looks_well(monkeypatch):
    terminal = terminal_of(monkeypatch, 100)
    training().run([evaluate(), Progress()])
    assert "finished" in terminal.getvalue()
    assert ("warning" in terminal.getvalue(), GREEN in terminal.getvalue()) == (False, True)
    terminal.truncate(0)
    measured = iter([0.9, 0.7, 0.5, 0.3, 0.1])
    training().run([Evaluate(lambda model: {"accuracy": next(measured)}, every=1), Progress()])
    assert "finished, with 1 warning" in terminal.getvalue()
    assert (GREEN in terminal.getvalue(), RED in terminal.getvalue()) == (False, True)
    terminal.truncate(0)
    training().run([Progress(), StopAfter(0)])
    assert "interrupted" in terminal.getvalue()
    assert GREEN not in terminal.getvalue()


def test_a_resumed_run_counts_from_where_it_begins(capsys, monkeypatch):
    at_once(monkeypatch)
    first = training().run([StopAfter(3)])
    training().run([Progress()], state=first.state)
    assert [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()] == ["round 4/5", "round 5/5"]


# In a notebook ------------------------------------------------------------------------------------------------------

CELL = """
import sys
sys.path[:0] = {path!r}
import torch
torch.set_num_threads(1)
from samples import small_training
from clipline import Evaluate, Progress
result = small_training(4).run([Evaluate(lambda model: {{"<accuracy>": 0.25}}, every=2), Progress()])
result.state.round_index
"""


def test_a_real_kernel_has_one_bar_that_is_updated_and_stores_no_speed():
    reason = "nbclient and ipykernel are not installed"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    nbformat = pytest.importorskip("nbformat", reason=reason)
    path = [str(ROOT / "src"), str(ROOT / "tests")]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL.format(path=path))])
    nbclient.NotebookClient(notebook, timeout=120).execute()
    bar, last = notebook.cells[0].outputs  # nothing on standard error, no warning of missing widgets
    assert bar.output_type == "display_data"
    assert last.data["text/plain"] == "4"
    assert '<progress value="4" max="4"' in bar.data["text/html"]
    assert "round 4/4" in bar.data["text/html"]
    assert "&lt;accuracy&gt; 0.250" in bar.data["text/html"]
    assert bar.data["text/plain"].startswith("round 4/4  <accuracy> 0.250  clip 0.")
    assert "rounds/s" not in str(bar.data)


class Compiles(Callback):
    """Makes the engine compile for `seconds` of a clock, once, when the second round has released."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def on_start(self, training, state):
        self.notices = training.problem.notices

    def on_release(self, state):
        self.clock[0] += 1.0  # a round takes a second
        if state.round_index == 2:
            with self.notices.compiling(375):  # operations, at 0.04 s each
                self.clock[0] += self.seconds


@pytest.fixture
def clock(monkeypatch):
    """What the clock of the progress shows, in seconds; nothing has been compiled yet in this process."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Notices, "_seconds_a_node", 0.04)
    return now


def test_compiling_is_said_in_a_line_and_is_no_part_of_the_speed(clock, capsys, monkeypatch):
    at_once(monkeypatch)
    training().run([Compiles(clock, 100.0), Progress()])
    lines = capsys.readouterr().err.splitlines()
    (waiting,) = [line for line in lines if "compiling" in line]
    assert re.fullmatch(r"round [012]/5  compiling, about 15 s, once", waiting)
    speeds = [re.search(r"([\d.]+) rounds/s", line).group(1) for line in lines if "clip" in line]
    assert len(speeds) == 5
    assert speeds[-1] == "1.0"


def test_compiling_is_said_on_a_terminal_until_it_is_done(monkeypatch):
    terminal = terminal_of(monkeypatch, 100)
    shown = Bar(5)
    shown.wait("compiling, about 15 s, once")
    shown._live.refresh()
    assert "compiling, about 15 s, once" in terminal.getvalue()
    terminal.truncate(0)
    shown.wait(None)
    shown._live.refresh()
    shown.close()
    assert "compiling" not in terminal.getvalue()


class Told(Callback):
    def __init__(self):
        self.heard = []

    def on_wait(self, reason):
        self.heard.append(reason)


def test_a_run_whose_steps_are_compiled_tells_its_callbacks_and_counts_its_programs(uncompiled):
    made, told = training(), Told()
    assert made.programs.programs == 0  # one by one
    forget_programs()
    made.trainer = Stacked(made.one_by_one, 20, block_size=60, compiled=True)
    made.backend = SingleProcess(made.trainer)
    made.run([told])
    assert (made.programs.programs, made.programs.compiled) == (1, 1)
    assert [reason is None for reason in told.heard] == [False, True]
    made.problem.notices.tell("compiling")  # the run has ended
    assert len(told.heard) == 2


def test_all_runs_side_by_side_are_told_that_somebody_compiles(clock):
    first, second = training(), training()
    heard = []
    shared = first.problem.side_by_side([first.problem, second.problem])
    with first.problem.notices.heard_by(heard.append), second.problem.notices.heard_by(heard.append):
        shared.notices.tell("compiling")
    shared.notices.tell("compiling")
    assert heard == ["compiling", "compiling"]


def test_a_fraction_outside_0_and_1_is_called_noisy():
    assert [_fraction(one) for one in (None, 0.0, 0.5, 1.0, -0.114, 1.02)] == [
        "-", "0.00", "0.50", "1.00", "-0.11 (noisy)", "1.02 (noisy)",
    ]  # fmt: skip
