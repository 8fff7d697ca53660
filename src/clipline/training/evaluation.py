"""Metrics of a model while the next rounds are already training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..engine.working_model import WorkingModel

Evaluate = Callable[[nn.Module], Mapping[str, float]]
Metrics = Mapping[str, float]
Result = TypeVar("Result")


class Evaluation:
    """Calls `evaluate(model)` in a thread of its own, on a copy of the model, one set of parameters after the other."""

    def __init__(self, flat: WorkingModel, evaluate: Evaluate | None) -> None:
        self._evaluate = evaluate
        self._module = copy.deepcopy(flat.module).eval() if evaluate is not None else None
        self._device = flat.vector.device
        on_gpu = self._device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="clipline-evaluation")

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Do other work in the same thread, in turn."""
        return self._thread.submit(work)

    def __enter__(self) -> Evaluation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def begin(self, params: Tensor) -> Future[Metrics]:
        """The metrics of these parameters, which must not change; without an `evaluate`, none."""
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None
        return self._thread.submit(self._measure, params, ready)

    def _measure(self, params: Tensor, ready: torch.cuda.Event | None) -> Metrics:
        if self._evaluate is None or self._module is None:
            return {}
        with torch.no_grad(), torch.cuda.stream(self._stream):  # without a stream, the latter does nothing
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            params = params.clone()  # what is measured may be changed by whoever measures it
            trainable = [param for param in self._module.parameters() if param.requires_grad]
            pieces = torch.split(params, [param.numel() for param in trainable])
            for param, piece in zip(trainable, pieces, strict=True):
                param.data = piece.view_as(param)
            metrics = dict(self._evaluate(self._module))
            if self._stream is not None:
                self._stream.synchronize()
            return metrics
