"""Worker processes on this machine's cores: forked when a run begins, gone when it ends."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from ...errors import SettingError, WorkerError, check_whole, refuse
from ...federated.backend import CohortRequest, LocalTrainer
from ...federated.clipping import ClippedSum
from ...privacy.events import Sampling
from ..problem import Problem
from .group import LostConnectionError, ProcessGroup
from .single import SingleProcess
from .transport import SharedMemoryTransport

PATIENCE = timedelta(days=30)  # others wait while rank 0 evaluates or writes; dead peers show as closed sockets
_MOST = 1024
_LOST = 3  # exit code of a worker whose connection broke: not the one that broke it


class ManyWorkersWarning(UserWarning):
    """There are more workers than cores."""


def usable_cores() -> int:
    """How many cores this process may use; 1 where the system does not say, as on those where forking is not safe."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def warn_of_too_many(workers: int) -> None:
    """Say to whoever makes a training that workers will wait for each other, if there are more than cores."""
    if workers > usable_cores():
        warnings.warn(
            f"workers={workers} is above the {usable_cores()} cores that this process may use, so that workers wait "
            f"for each other: give workers={usable_cores()}",
            ManyWorkersWarning,
            stacklevel=4,
        )


class ForkedBackend:
    """`size` processes on this machine, one thread each: this one, and copies of it that live as long as a run.

    A copy shares the population's memory and needs nothing pickled: any loss will do. Parameters and sums lie in memory
    that all share, and the sum of a round lies where that of the next will. It ignores Ctrl-C, which is for
    this process to obey between two rounds; it ends when the run does, however that ends, or when this process dies.
    Outside a run everybody trains in this process. `samplings` has one entry for each run that trains side by side.
    """

    def __init__(self, trainer: LocalTrainer, problem: Problem, samplings: Sequence[Sampling], size: int) -> None:
        self.size = check_whole("workers", size, at_least=2, at_most=_MOST, way_out="more machines join by torchrun")
        if "fork" not in multiprocessing.get_all_start_methods():
            raise refuse("workers", size, "1 where processes cannot be forked", "use workers=1, or torchrun")
        if problem.device.type != "cpu":
            raise refuse(
                "workers", size, f"1 on device {problem.device}, which forked processes cannot use",
                "start one process a GPU with torchrun, or use the cpu",
            )  # fmt: skip
        self._trainer, self._problem, self._samplings = trainer, problem, samplings
        self._group: ProcessGroup | None = None
        self._transport: SharedMemoryTransport | None = None
        self._children: Sequence[BaseProcess] = ()

    def sums(self, requests: Sequence[CohortRequest]) -> list[ClippedSum]:
        """The sum of each request, at most one a run: PRIVATE."""
        if self._group is None:
            return SingleProcess(self._trainer).sums(requests)
        try:
            return self._group.sums(requests)
        except LostConnectionError as error:
            raise self._obituary(error) from None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Fork the others, and end them whatever happens."""
        self._check_now()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with tempfile.TemporaryDirectory(prefix="clipline-") as folder:
                self._fork(Path(folder) / "store")
                assert self._group is not None
                yield
                with suppress(LostConnectionError):  # what is done is done
                    self._group.stop()
                for child in self._children:
                    child.join(10)
        finally:
            self._end()
            torch.set_num_threads(threads)

    def _check_now(self) -> None:
        if dist.is_initialized():
            raise SettingError(
                f"workers={self.size} must be 1 where torch.distributed has a group already, of torchrun, of another "
                "run or your own: use workers=1, or destroy that group first"
            )
        if multiprocessing.current_process().daemon:
            raise refuse("workers", self.size, "1 in a daemonic process, which may not fork", "use workers=1")

    def _fork(self, store: Path) -> None:
        context = multiprocessing.get_context("fork")
        self._transport = SharedMemoryTransport(self._problem.model.initial, self.size, len(self._samplings))
        pipes = [context.Pipe(duplex=False) for _ in range(1, self.size)]
        self._children = [
            context.Process(
                target=self._child, args=(rank, store, pipe[1]), daemon=True, name=f"clipline worker {rank}"
            )
            for rank, pipe in enumerate(pipes, start=1)
        ]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # no Ctrl-C before a child ignores it
        collecting = gc.isenabled()
        gc.disable()  # nothing is collected before a child has set aside what it inherits
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # our threads hold no lock that a child asks for
                for child in self._children:
                    child.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            if collecting:
                gc.enable()
        for rank, (child, (ready, said)) in enumerate(zip(self._children, pipes, strict=True), start=1):
            said.close()
            text = _first_words(child, ready)
            ready.close()
            if text:
                last = text.strip().splitlines()[-1]
                raise WorkerError(f"worker {rank} of {self.size} could not begin ({last}): use workers=1\n{text}")
        self._group = self._joined(0, store)

    def _joined(self, rank: int, store: Path) -> ProcessGroup:
        """Rank `rank` of the group that meets over the file `store`, by the loopback device alone."""
        before, hook = os.environ.get("GLOO_SOCKET_IFNAME"), sys.excepthook
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        try:
            file = dist.FileStore(str(store), self.size)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=file, rank=rank, world_size=self.size, timeout=PATIENCE)
        finally:
            sys.excepthook = hook  # torch's would print each line of the caller's later errors as rank 0's
            os.environ.pop("GLOO_SOCKET_IFNAME")
            if before is not None:
                os.environ["GLOO_SOCKET_IFNAME"] = before
        assert self._transport is not None
        return ProcessGroup(self._trainer, self._problem, self._samplings, rank, self.size, self._transport)

    def _child(self, rank: int, store: Path, ready: Connection) -> None:
        """The life of a copy. It leaves by `_exit`: what this process would do at its end is not the copy's to do."""
        code = 1
        try:
            # Garbage of this process is not the copy's to collect: a connection of a run that failed would wait there
            # for threads which no copy has.
            gc.freeze()
            gc.enable()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            threading.Thread(target=_follow_parent, daemon=True).start()
            torch.set_num_threads(1)
            try:
                torch.autograd.backward(
                    torch.ones((), requires_grad=True).square()
                )  # torch refuses where autograd holds a GPU
            except Exception:
                ready.send(traceback.format_exc())
                raise
            ready.send("")
            self._joined(rank, store).serve()
            code = 0
        except LostConnectionError:
            code = _LOST
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _end(self) -> None:
        """End the others at once, if they have not ended, and forget them."""
        for child in self._children:
            if child.pid is not None:
                child.kill()
                child.join()
        self._children, self._group, self._transport = (), None, None
        if dist.is_initialized():
            dist.destroy_process_group()

    def _obituary(self, error: LostConnectionError) -> WorkerError:
        """Who was lost, and how, once it is known: a connection may break a moment before its process has ended."""
        alive = {child.sentinel for child in self._children}
        while alive and all(child.exitcode in (None, _LOST) for child in self._children):
            ended = wait(alive, timeout=10)
            if not ended:
                break
            alive.difference_update(ended)
        for rank, child in enumerate(self._children, start=1):
            code = child.exitcode
            if code not in (None, _LOST):
                hint = "perhaps memory ran out: lower workers and" if code == -signal.SIGKILL else "find the cause and"
                return WorkerError(
                    f"worker {rank} of {self.size} {_ending(child)} but must live as long as the run: {hint} resume"
                )
        return error


def _first_words(child: BaseProcess, ready: Connection) -> str:
    """Nothing from a child that has begun, else what kept it from it."""
    wait([ready, child.sentinel])
    try:
        if ready.poll():
            return str(ready.recv())
    except EOFError:
        pass
    child.join()
    return f"it {_ending(child)}"


def _ending(child: BaseProcess) -> str:
    code = child.exitcode or 0
    return f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"


def _follow_parent() -> None:
    """End this process when its parent has: the parent's end of a pipe closes with it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    with suppress(OSError):
        parent.join()
    os._exit(_LOST)
