"""Triton's launchers: every kernel gets its own, however many threads make them."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clipline.engine.gpu.programs import triton_runtime
from clipline.engine.gpu.programs.triton_runtime import OneAtATime, prepare_triton


def in_threads(calls: list[Any]) -> None:
    """Begin all at once."""
    together = threading.Barrier(len(calls))
    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(lambda call: (together.wait(), call()), calls))


def test_threads_that_load_into_one_module_each_read_what_they_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    module, read = dict[str, int](), dict[int, int]()

    def make(number: int) -> None:  # as Python loads a C module again: into the object that is there
        module["launch"] = number
        time.sleep(0.001)
        read[number] = module["launch"]

    active = SimpleNamespace(launcher_cls=make)
    monkeypatch.setattr(triton_runtime, "triton_driver", SimpleNamespace(active=active))
    prepare_triton()
    locked = active.launcher_cls
    prepare_triton()
    assert active.launcher_cls is locked
    in_threads([lambda number=number: active.launcher_cls(number) for number in range(16)])
    assert read == {number: number for number in range(16)}


def test_a_launcher_that_cannot_be_made_keeps_nobody_waiting() -> None:
    def make(ready: bool) -> str:
        if not ready:
            raise RuntimeError("no compiler")
        return "launcher"

    locked = OneAtATime(make)
    with pytest.raises(RuntimeError, match="no compiler"):
        locked(False)
    assert locked(ready=True) == "launcher"


def test_without_triton_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runtime, "triton_driver", None)
    prepare_triton()  # and not an error
    assert triton_runtime.triton_driver is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_that_threads_make_ready_at_once_keep_their_launchers() -> None:
    from clipline.engine.gpu.kernels import noise_triton

    prepare_triton()
    words = torch.zeros(1, noise_triton.SEGMENT, dtype=torch.int64, device="cuda")
    noise_triton.philox_words(words, (1, 2), 0)
    noise_triton.chacha20_words(words, (0,) * 8, 0)
    functions = [noise_triton._philox_words, noise_triton._chacha20_words]
    kernels = [
        kernel for function in functions for kernel in function.device_caches[torch.cuda.current_device()][0].values()
    ]
    own = [kernel.run.launch for kernel in kernels]  # made by one thread
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            for kernel in kernels:
                kernel.module = kernel._run = None
            in_threads([kernel._init_handles for kernel in kernels])
            assert [kernel.run.launch for kernel in kernels] == own
    finally:
        sys.setswitchinterval(interval)
