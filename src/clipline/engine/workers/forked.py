"""Worker processes on this machine's cores: forked when a run begins, ended when it ends.

Plain twin: `SingleProcess` of single.py, which trains the same users in this process.
Switch: `Compute(workers=1)`, the default of the library; `--workers 1`.
Held equal by: tests/engine/workers/test_group.py.
Buys: 5.05 s a round with one worker, 2.67 with two (emnist_cr, 20 users, 2 cores nearly idle, 2026-11-15,
benchmarks/workers_speed.py).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from ...errors import GO_ON, WorkerError, check_whole, refuse
from ...federated.backend import CohortRequest, LocalTrainer
from ...federated.clipping import ClippedSum
from ...privacy.events import Sampling
from ..core.problem import Problem
from .group import ProcessGroup
from .single import SingleProcess
from .transport import LostConnectionError, PipeTransport, SharedMemory, SilentError, patience

_MAX_WORKERS = 1024
# One thread forks at a time: a worker of another run would inherit ends of this run's pipes, and keep them open.
_forking = threading.Lock()
_STOPPING = {signal.SIGINT, signal.SIGTERM}  # for rank 0, though whole groups of processes are sent them
_LOST_EXIT_CODE = 3  # of a worker that lost its connection: not the one that caused it


class ManyWorkersWarning(UserWarning):
    """There are more workers than cores."""


def usable_cores() -> int:
    """How many cores this process may use; 1 where the system does not say, as on macOS, where forking is not safe."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def warn_of_too_many(workers: int) -> None:
    """Warn the caller of `Training` if there are more workers than cores."""
    if workers > usable_cores():
        warnings.warn(
            f"workers={workers} is above the {usable_cores()} cores that this process may use, so that workers wait "
            f"for each other: give workers={usable_cores()}",
            ManyWorkersWarning,
            stacklevel=4,
        )


class ForkedBackend:
    """`size` processes on this machine, one thread each: this one, and workers forked from it for the time of a run.

    A worker shares the population's memory and needs nothing pickled: any loss will do. Parameters and sums are in
    shared memory, which every round reuses. A worker ignores Ctrl-C and SIGTERM, which this process handles between two
    rounds; it ends when the run does, however that ends, or when this process dies. Outside a run all users train in
    this process. `samplings` has one entry for each run that trains side by side.
    """

    def __init__(self, trainer: LocalTrainer, problem: Problem, samplings: Sequence[Sampling], size: int) -> None:
        self.size = check_whole(
            "workers", size, at_least=2, at_most=_MAX_WORKERS, way_out="more machines join by torchrun"
        )
        if "fork" not in multiprocessing.get_all_start_methods():
            raise refuse("workers", size, "1 where processes cannot be forked", "use workers=1, or torchrun")
        if problem.device.type != "cpu":
            raise refuse(
                "workers", size, f"1 on device {problem.device}, which forked processes cannot use",
                "start one process a GPU with torchrun, or use the cpu",
            )  # fmt: skip
        self._trainer, self._problem, self._samplings = trainer, problem, samplings
        self._group: ProcessGroup | None = None
        self._children: Sequence[BaseProcess] = ()
        self._peers: Sequence[Connection] = ()

    def sums(self, requests: Sequence[CohortRequest]) -> list[ClippedSum]:
        """The sum of each request, at most one request for each run: PRIVATE."""
        if self._group is None:
            return SingleProcess(self._trainer).sums(requests)
        try:
            return self._group.sums(requests)
        except SilentError:
            raise
        except LostConnectionError as error:
            raise self._worker_error(error) from None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Fork the workers; on leaving, end them, whatever happened."""
        self._check_can_fork()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with _forking:
                memory = self._fork()
            self._group = self._joined(memory)
            yield
            with suppress(LostConnectionError):  # the run is over: nothing is lost, and nobody need be waited for
                self._group.stop()
                for child in self._children:
                    child.join(10)
        finally:
            self._kill_workers()
            torch.set_num_threads(threads)

    def _check_can_fork(self) -> None:
        if multiprocessing.current_process().daemon:
            raise refuse("workers", self.size, "1 in a daemonic process, which may not fork", "use workers=1")

    def _fork(self) -> SharedMemory:
        context = multiprocessing.get_context("fork")
        memory = SharedMemory(self._problem.model.initial, self.size, len(self._samplings))
        pipes = [context.Pipe() for _ in range(1, self.size)]  # ends of rank 0 and of the worker
        self._children = [
            context.Process(
                target=self._run_worker, args=(rank, memory, pipes), daemon=True, name=f"clipline worker {rank}"
            )
            for rank in range(1, self.size)
        ]
        self._peers = [ours for ours, _ in pipes]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # until the worker ignores them
        gc_was_enabled = gc.isenabled()
        gc.disable()  # no collection in a worker before gc.freeze()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # about forking with threads: ours hold no lock that a worker needs
                for child in self._children:
                    child.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            if gc_was_enabled:
                gc.enable()
            for _, theirs in pipes:
                theirs.close()
        return memory

    def _joined(self, memory: SharedMemory) -> ProcessGroup:
        """The group as rank 0 sees it, once all workers have begun."""
        for rank, (child, peer) in enumerate(zip(self._children, self._peers, strict=True), start=1):
            if text := _startup_error(child, peer):
                last = text.strip().splitlines()[-1]
                raise WorkerError(f"worker {rank} of {self.size} could not begin ({last}): use workers=1\n{text}")
        return self._member(0, PipeTransport(memory, self._peers, leads=True))

    def _member(self, rank: int, transport: PipeTransport) -> ProcessGroup:
        return ProcessGroup(self._trainer, self._problem, self._samplings, rank, self.size, transport)

    def _run_worker(self, rank: int, memory: SharedMemory, pipes: Sequence[tuple[Connection, Connection]]) -> None:
        """Main function of a worker. Leaves by `os._exit`: the parent's exit handlers are not for workers to run."""
        code = 1
        try:
            # A worker must not collect the parent's garbage: a destructor may wait for threads that do not exist here.
            gc.freeze()
            gc.enable()
            for one in _STOPPING:
                signal.signal(one, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
            own = pipes[rank - 1][1]
            for end in (end for pair in pipes for end in pair if end is not own):
                end.close()  # a pipe ends when the last copy of its end is closed
            threading.Thread(target=_exit_with_parent, daemon=True).start()
            torch.set_num_threads(1)
            try:
                torch.autograd.backward(
                    torch.ones((), requires_grad=True).square()
                )  # torch refuses if the parent has used autograd beside a GPU
            except Exception:
                own.send(traceback.format_exc())
                raise
            own.send("")
            self._member(rank, PipeTransport(memory, [own], leads=False)).serve()
            code = 0
        except LostConnectionError:
            code = _LOST_EXIT_CODE
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _kill_workers(self) -> None:
        """Kill workers that still run, and close the pipes."""
        for child in self._children:
            if child.pid is not None:
                child.kill()
                child.join()
        for peer in self._peers:
            peer.close()
        self._children, self._peers, self._group = (), (), None

    def _worker_error(self, error: LostConnectionError) -> WorkerError:
        """Which worker died, and how. Waits for that: a connection may break shortly before its process has ended."""
        alive = {child.sentinel for child in self._children}
        while alive and all(child.exitcode in (None, _LOST_EXIT_CODE) for child in self._children):
            ended = wait(alive, timeout=10)
            if not ended:
                break
            for child in self._children:
                if child.sentinel in ended:
                    child.join(10)  # its files are closed, but it may not have an exit code yet
            alive.difference_update(ended)
        for rank, child in enumerate(self._children, start=1):
            code = child.exitcode
            if code not in (None, _LOST_EXIT_CODE):
                hint = "perhaps memory ran out: lower workers and" if code == -signal.SIGKILL else "find the cause and"
                return WorkerError(
                    f"worker {rank} of {self.size} {_exit_text(child)} but must live as long as the run: {hint} {GO_ON}"
                )
        return error


def _startup_error(child: BaseProcess, peer: Connection) -> str:
    """The reason why a worker could not start; empty if it did."""
    if not wait([peer, child.sentinel], patience()):
        return f"it was silent for {patience():.0f} s"
    with suppress(EOFError, OSError):
        if peer.poll():
            return str(peer.recv())
    child.join()
    return f"it {_exit_text(child)}"


def _exit_text(child: BaseProcess) -> str:
    code = child.exitcode or 0
    return f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"


def _exit_with_parent() -> None:
    """Exit when the parent process has ended: its end of a pipe closes then."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    with suppress(OSError):
        parent.join()
    os._exit(_LOST_EXIT_CODE)
