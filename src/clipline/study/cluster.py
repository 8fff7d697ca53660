"""Runs of a study on the machines of a Ray cluster (extra `cluster`). Records come back to the study directory here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..errors import CliplineError, RunError, SettingError, first_line
from ..tasks.task import Task
from ..tasks.task_file import task_of
from ..tasks.train_settings import TrainSettings
from .execution import Failure, LocalExecutor, PlannedRun, shape_key
from .record import RunRecord, RunSpec, data_checksum, identity_of

_RETRIES = 5  # of a group whose machine or process was lost
_WAIT_SECONDS = 0.5


class ClusterExecutor:
    """Hands groups to the nodes of a Ray cluster: one to a GPU, or to a core where there is none.

    `address` is that of a running cluster, or "auto" for the one on this machine. Every node must have clipline in the
    same version, and stored data at the same path. A group whose node dies is given to another.
    """

    def __init__(
        self, task: Task, add: Callable[[RunRecord], None], on_round: Callable[[str], None], address: str
    ) -> None:
        self._task, self._add, self._on_round, self._address = task, add, on_round, address
        self._ray = _import_ray()
        self._began = False
        self._sizes: dict[Any, int] = {}
        self._running: dict[Any, Sequence[PlannedRun]] = {}

    def free_slots(self) -> int:
        """The GPUs, or cores where there are none, of the nodes there are now, less those at work."""
        resources = self._connected().cluster_resources()
        return max(0, int(resources.get("GPU" if self._takes_gpu() else "CPU", 1)) - len(self._running))

    def most(self, settings: TrainSettings) -> int:
        """What fits the memory of a node and gains speed, as a node says."""
        key = shape_key(RunSpec(settings))
        if key not in self._sizes:
            self._sizes[key] = self._get(self._remote(size_on_node, replace(settings, workers=1)))
        return self._sizes[key]

    def start(self, group: Sequence[PlannedRun]) -> None:
        """Send a group to whichever node is free. One process makes it: other cores have groups of their own."""
        sent = [replace(run, spec=replace(run.spec, settings=replace(run.spec.settings, workers=1))) for run in group]
        self._running[self._remote(make_on_node, sent)] = group

    def wait(self) -> list[tuple[Sequence[PlannedRun], list[Failure]]]:
        """The groups that have ended; none if none does for a moment."""
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_WAIT_SECONDS)
        ended = []
        for reference in ready:
            group = self._running.pop(reference)
            try:
                texts, failures = self._get(reference)
            except self._ray.exceptions.RayError as error:  # lost more often than Ray tries again
                said = f"{type(error).__name__}: {first_line(error)}"
                ended.append((group, [Failure(run, said, str(error)) for run in group]))
                continue
            for text in texts:
                record = RunRecord.from_json(text, "a record from the cluster")
                for _ in record.rounds["round"]:
                    self._on_round(record.id)
                self._add(record)
            by_id = {run.id: run for run in group}
            ended.append((group, [Failure(by_id[run], error, trace) for run, error, trace in failures]))
        return ended

    def close(self) -> None:
        """Cancel what has not ended, and leave the cluster."""
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running.clear()
        if self._began:
            self._ray.shutdown()
        self._began = False

    def _connected(self) -> Any:
        """Ray, with a connection to the cluster."""
        if not self._ray.is_initialized():
            try:
                self._ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
                self._began = True
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise RunError(
                    f"cluster={self._address!r} cannot be reached ({first_line(error)}): start one with  "
                    "ray start --head  and give auto there, or HOST:PORT"
                ) from None
        return self._ray

    def _takes_gpu(self) -> bool:
        return self._task.settings.device != "cpu" and self._ray.cluster_resources().get("GPU", 0) >= 1

    def _remote(self, function: Callable[..., Any], argument: Any) -> Any:
        """The call as a task of Ray, which is tried again if its node or process is lost, not if it raises."""
        ray = self._connected()
        return ray.remote(num_cpus=1, num_gpus=int(self._takes_gpu()), max_retries=_RETRIES)(function).remote(argument)

    def _get(self, reference: Any) -> Any:
        """The answer of a node; a refusal of ours is raised as it was there."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, CliplineError):
                raise cause from None
            raise


def make_on_node(group: Sequence[PlannedRun]) -> tuple[list[str], list[tuple[str, str, str]]]:
    """On a node: make a group. The records as text, and (id, error, trace) of those that failed."""
    records: list[str] = []
    executor = _executor_for(group[0].spec.settings)
    executor.add = lambda record: records.append(record.to_json())
    task = executor.task
    data = data_checksum(group[0].spec.settings)
    for run in group:
        parts = run.spec.parts(data, task.code)
        if identity_of(parts) != run.id:
            other = [name for name, value in parts.items() if run.parts.get(name) != value]
            raise RunError(
                f"a node of the cluster differs in {', '.join(other)} from where the study began: bring the same "
                "clipline, data and task file to every node"
            )
    executor.start(group)
    ((_, failures),) = executor.wait()
    return records, [(failure.run.id, failure.error, failure.trace) for failure in failures]


def size_on_node(settings: TrainSettings) -> int:
    """On a node: how many runs like this one make a group."""
    return _executor_for(settings).most(settings)


_on_this_node: dict[str, LocalExecutor] = {}  # kept by a worker process of Ray, with the data it has loaded


def _executor_for(settings: TrainSettings) -> LocalExecutor:
    if settings.task not in _on_this_node:
        _on_this_node.clear()
        _on_this_node[settings.task] = LocalExecutor(task_of(settings), lambda record: None, lambda run: None)
    return _on_this_node[settings.task]


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise SettingError(
            "cluster needs Ray, which is not installed: pip install 'clipline[cluster]', or leave cluster out"
        ) from None
    return ray
