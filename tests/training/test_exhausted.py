"""Memory, threads or files that run out end a run in a sentence, whoever's turn it was; the run can be resumed."""

import errno
import multiprocessing
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch
from samples import Observer, cross_entropies, small_population, small_training
from torch import nn

from clipline import LocalSGD, Population, RunDirectory
from clipline.engine.isolation.guard import exhausted, users_own
from clipline.errors import RunError
from clipline.privacy import Ledger
from clipline.training.callbacks import Callback
from clipline.training.options import Compute

FORKS = "fork" in multiprocessing.get_all_start_methods()
ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4503599627370496 bytes. Error code 12 (Cannot allocate memory)"
)
ERRORS = {
    "memory": [
        MemoryError(),
        np._core._exceptions._ArrayMemoryError((1 << 50,), np.dtype("f8")),
        RuntimeError(ALLOCATOR),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),  # on Windows
        RuntimeError("std::bad_alloc"),
        RuntimeError("bad allocation"),  # on Windows
        RuntimeError("could not create a primitive"),  # of oneDNN
        RuntimeError("could not create a memory object"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        RuntimeError("MPS backend out of memory (MPS allocated: 5 GB)"),
        RuntimeError("XPU out of memory. Tried to allocate 8 bytes."),
        RuntimeError("unable to mmap 8 bytes from file </torch_1>: Cannot allocate memory (12)"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    "threads or processes": [
        RuntimeError("can't start new thread"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),  # as fork says it
    ],
    "file descriptors": [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENFILE, "Too many open files in system"),
        RuntimeError("unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)"),
    ],
    "room on a disk or in shared memory": [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("unable to write to file </torch_1>: No space left on device (28)"),
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"),
    ],
}
OF_A_USER = [
    IndexError("Target 99 is out of bounds."),
    RuntimeError("shape '[7, 7]' is invalid for input of size 3"),
    ValueError("not enough memory cells in the table"),  # words count in a RuntimeError only
    OSError(errno.ENOENT, "No such file"),
    RuntimeError("cannot parse 'Too many open files' (of a user's text)"),
    RuntimeError("no label for: Too many open files"),
    RuntimeError("unable to parse 'std::bad_alloc: Cannot allocate memory (12)'"),
    RuntimeError("the text is: can't start new thread"),
    RuntimeError("could not create a primitive descriptor for a convolution"),  # of shapes that do not fit
]


@pytest.mark.parametrize("what", ERRORS)
def test_what_runs_out_is_taken_for_no_users_own_error_and_told_without_its_words(what):
    for error in ERRORS[what]:
        assert not users_own(error)
        told = str(exhausted(error))
        assert told.startswith(f"{what} ran out while users trained")
        assert "may be one user's data or the machine" in told
        assert "resume the run" in told
        assert "8 bytes" not in told  # how much was needed may tell of a user's data
        assert "\n" not in told


def test_an_error_of_a_users_data_stays_the_users_and_one_for_want_of_memory_does_not():
    for error in OF_A_USER:
        assert users_own(error), error
        assert exhausted(error) is None
    error = KeyError("cache")
    error.__context__ = MemoryError()
    assert not users_own(error)
    error.__suppress_context__ = True  # raised from None: it counts by itself
    assert users_own(error)
    assert exhausted(error) is None


class Tags(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(40, 5), nn.Linear(5, 3)

    def forward(self, words):
        return self.out(self.emb(words).mean(dim=1))


def words_population():
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(40), 3)
    return Population.from_arrays(users, words=rng.integers(0, 40, (120, 3)), y=rng.integers(0, 3, 120))


def made(engine, loss, noise_source="seed", **options):
    """A training that runs as `engine` says: (training, what its engine is called)."""
    options = {"seed": 3 if noise_source == "seed" else None, **options}
    local, compute, called = LocalSGD(0.5, batch_size=4), {"engine": engine}, engine
    torch.manual_seed(0)
    if engine == "sparse":
        options |= {"model": Tags(), "population": words_population()}
        compute = {"engine": "one-by-one", "row_fields": {"emb.weight": "words"}}
    elif engine == "single step":
        local, compute = LocalSGD(0.5, max_examples=1), {"engine": "auto"}
    elif engine == "workers":
        compute = {"engine": "one-by-one", "workers": 2}
    if engine in ("sparse", "workers", "one-by-one"):
        called = "one by one"
    options = {"loss": loss, "local": local, "compute": Compute(**compute), "server": None, **options}
    return small_training(8, noise_source=noise_source, **options), called


def plain_loss(model, batch):
    if "words" in batch:
        return nn.functional.cross_entropy(model(batch["words"].long()), batch["y"].long(), reduction="none")
    return cross_entropies(model, batch)


def lack_after(path, after):
    """From the end of this round on there is no memory: a file says so, as no state of Python's reaches a worker."""
    return Observer(lambda report, state: path.touch() if state.round_index == after else None)


def lacking(path, how, where=""):
    """A loss that fails once the file is there; with `where`, only in the process of that name."""

    def loss(model, batch):
        if path.exists() and where in multiprocessing.current_process().name:
            if how == "allocator":
                torch.empty(1 << 50)  # torch's own error
            if how == "thread":
                raise RuntimeError("can't start new thread")
            if how == "files":
                raise OSError(errno.EMFILE, "Too many open files")
            raise MemoryError
        return plain_loss(model, batch)

    return loss


ENGINES = ["one-by-one", "stacked", "single step", "sparse"]


def run_lacks_and_resumes(tmp_path, engine, how, where=""):
    whole = made(engine, plain_loss)[0].run()
    training, called = made(engine, lacking(tmp_path / "lack", how, where))
    assert called in training.engine
    directory = RunDirectory(tmp_path / "r", checkpoint_every=3)
    with pytest.raises(RunError, match="ran out while users trained") as told:
        training.run([directory, lack_after(tmp_path / "lack", 4)])
    assert "\n" not in str(told.value)
    assert Ledger.read(tmp_path / "r" / "ledger.jsonl").rounds < 8
    (tmp_path / "lack").unlink()
    again = training.resume(tmp_path / "r")  # of the same object: nothing of the failed round is left in it
    assert torch.equal(again.state.params, whole.state.params)
    assert again.guarantee == whole.guarantee


@pytest.mark.parametrize("how", ["allocator", "MemoryError", "thread", "files"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_that_lacks_something_ends_and_is_resumed_to_the_same_model(tmp_path, engine, how):
    run_lacks_and_resumes(tmp_path, engine, how)


@pytest.mark.skipif(not FORKS, reason="needs fork")
@pytest.mark.filterwarnings("ignore::clipline.engine.workers.forked.ManyWorkersWarning")
@pytest.mark.parametrize("where", ["MainProcess", "clipline worker 1"])
def test_a_process_that_lacks_memory_ends_the_run_of_all(tmp_path, where):
    run_lacks_and_resumes(tmp_path, "workers", "allocator", where)


def test_a_run_that_lacks_memory_with_noise_from_the_system_loses_no_round(tmp_path):
    training, _ = made("one-by-one", lacking(tmp_path / "lack", "MemoryError"), "system")
    with pytest.raises(RunError, match="memory ran out"):
        training.run([RunDirectory(tmp_path / "r"), lack_after(tmp_path / "lack", 5)])
    (tmp_path / "lack").unlink()
    assert training.resume(tmp_path / "r").guarantee.rounds == 8


@pytest.mark.parametrize("engine", ENGINES)
def test_memory_that_lacks_before_the_first_round_is_told_and_takes_no_other_engine(tmp_path, engine):
    (tmp_path / "lack").touch()
    with pytest.raises(RunError, match="memory ran out"):
        made(engine, lacking(tmp_path / "lack", "allocator"))


@pytest.mark.parametrize("after", range(1, 9))
def test_memory_that_lacks_at_any_call_of_the_trial_never_changes_the_engine(tmp_path, after):
    """The trial runs the loss one by one, in stacks and in blocks: wherever memory ends, the training is not made."""
    for engine in ("auto", "single step"):
        calls = tmp_path / f"{engine} {after}"
        calls.write_text("")

        def loss(model, batch, calls=calls):
            with calls.open("a") as file:
                file.write(".")
            if len(calls.read_text()) == after:
                raise MemoryError
            return plain_loss(model, batch)

        training = None
        with suppress(RunError):
            training, _ = made(engine, loss)
        assert (training is None) == (len(calls.read_text()) >= after)
        if training is not None:  # it was made with fewer calls
            assert training.engine == made(engine, plain_loss)[0].engine


def test_where_errors_are_shown_memory_is_not_shown_as_a_users(tmp_path):
    training, _ = made("one-by-one", lacking(tmp_path / "lack", "MemoryError"), on_error="raise")
    with pytest.raises(RunError, match="memory ran out"):
        training.run([lack_after(tmp_path / "lack", 1)])


@pytest.mark.parametrize(
    "error", [MemoryError("of a dashboard"), BlockingIOError(errno.EAGAIN, "write could not complete")], ids=repr
)
def test_an_error_of_a_callback_is_raised_as_it_is(tmp_path, error):
    def failing(report, state):
        raise error

    training, _ = made("one-by-one", plain_loss)
    with pytest.raises(type(error)) as raised:
        training.run([RunDirectory(tmp_path / "r"), Observer(failing)])
    assert raised.value is error
    assert raised.traceback[-1].name == "failing"
    assert Ledger.read(tmp_path / "r" / "ledger.jsonl").rounds == 1


def test_an_error_of_a_callback_that_hears_of_a_wait_is_raised_as_it_is():
    told = BlockingIOError(errno.EAGAIN, "write could not complete")

    class Failing(Callback):
        def on_wait(self, reason):
            raise told

    training = None

    def loss(model, batch):  # the engine says so while users train, as when it compiles
        if training is not None:
            training.problem.notices.tell("compiling")
        return plain_loss(model, batch)

    training, _ = made("one-by-one", loss)
    with pytest.raises(BlockingIOError) as raised:
        training.run([Failing()])
    assert raised.value is told


TASK = """
from pathlib import Path
import torch

SETTINGS = {"client_lr": 0.5, "cohort_size": 20, "rounds": 5, "noise_multiplier": 1.0}

def model():
    return torch.nn.Linear(6, 3)

def loss(model, batch):
    if Path("lack").exists():
        torch.empty(1 << 50)
    return torch.nn.functional.cross_entropy(model(batch["x"].float()), batch["y"].long(), reduction="none")
"""


def test_the_command_line_says_it_in_one_line_and_ends_as_for_other_runs(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    small_population().save(tmp_path / "store")
    (tmp_path / "lack").touch()
    command = [sys.executable, "-m", "clipline", "train", "task.py", "--data", "store"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("error: memory ran out while users trained")
    assert "Traceback" not in ended.stderr
