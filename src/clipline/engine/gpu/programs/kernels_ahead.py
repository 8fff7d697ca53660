"""Compiles the Triton kernels that a training needs in threads, all at once, before they are first launched.

Triton compiles a kernel when it is first launched, so one after the other, and a ResNet-18 has forty. Here a step of
synthetic users runs once more, in which the operations with many kernels are not computed: a thread runs each, which
compiles it, and numbers from -1 to 1 stand for its result, as plausible as any. Most of a compilation runs outside of
Python's lock. A later process finds the kernels in Triton's cache, and beside them a mark that this kind of step was
compiled: it takes no such step. Whoever empties the cache takes the mark along.

Plain twin: no such step; every kernel is compiled where it is first launched.
Switch: `FastParts.kernels_ahead`.
Held equal by: tests/engine/gpu/programs/test_kernels_ahead.py.
Buys: on an H200, where no kernel is stored yet, a training of cifar100 is made in 9.0 s instead of 29.3, and so_lr has
ended its first round after 7.5 s instead of 9.9 (docs/results/performance.md).
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .code_versions import code_versions

# Operations of ours that launch a kernel of Triton for every shape. They read their arguments and write into nothing.
_MANY_KERNELS = {
    "clipline.stacked_conv",
    "clipline.stacked_conv_pixels",
    "clipline.stacked_conv_weight",
    "clipline.pool",
    "clipline.pool_backward",
    "clipline.stacked_group_norm",
    "clipline.stacked_group_norm_backward",
}
_MOST_THREADS = 16
_MARK = "compiled_ahead"
_done: set[Hashable] = set()  # kinds of steps


def compile_ahead(
    device: torch.device, step: Callable[[], object], *beside: Callable[[], object], kind: Hashable = None
) -> None:
    """Compile what `step` launches, and what each call `beside` it does, in threads; return when all is compiled.

    What the step computes is meaningless: let it write into copies. Errors are dropped: they come again where the
    same is run in earnest. What this process or an earlier one has compiled for a `kind` of step is not compiled again.
    """
    on_gpu = device.type == "cuda"
    if kind is not None and (kind in _done or (on_gpu and _is_marked(kind))):
        return
    # A thread begins on the first GPU and its default stream, wherever the caller is.
    run_there = partial(_quietly, torch.cuda.current_stream(device) if on_gpu else None)
    threads = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="clipline-kernels")
    came_through = False
    try:
        for call in beside:
            threads.submit(run_there, call)
        with suppress(Exception), warnings.catch_warnings(action="ignore"), _InThreads(threads, run_there):
            step()
            came_through = True
        threads.shutdown()
    finally:  # also where somebody interrupts
        threads.shutdown(cancel_futures=True)
        if on_gpu:  # what was launched has ended, and block sizes do not depend on how much of it ran at once
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
    if kind is not None:
        _done.add(kind)
        if on_gpu and came_through:
            _mark(kind)


def _cache_entry(kind: Hashable) -> Any:
    """Triton's cache at the key of this kind of step."""
    from triton.runtime.cache import get_cache_manager  # type: ignore[import-not-found]

    about = (kind, *code_versions(), torch.cuda.get_device_name())
    return get_cache_manager(hashlib.sha256(repr(about).encode()).hexdigest())


def _is_marked(kind: Hashable) -> bool:
    with suppress(Exception):  # whatever Triton raises where there is no room for files: then nothing is marked
        return _cache_entry(kind).get_file(_MARK) is not None
    return False


def _mark(kind: Hashable) -> None:
    with suppress(Exception):
        _cache_entry(kind).put(b"", _MARK)


class _InThreads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, operations of many kernels run in threads, once for each layout of arguments; others stand for results.

    Those are numbers from -1 to 1, or 0 where they are whole: the caller's code goes on with them.
    """

    def __init__(self, threads: Executor, run_there: Callable[..., None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._threads, self._run_there, self._begun = threads, run_there, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`func`, or numbers of the form of its result."""
        kwargs = kwargs or {}
        if str(func).removesuffix(".default") not in _MANY_KERNELS:
            return func(*args, **kwargs)
        layouts = str((func, tree_map_only(Tensor, _layout, (args, kwargs))))
        if layouts not in self._begun:
            self._begun.add(layouts)
            self._threads.submit(self._run_there, func, *args, **kwargs)
        device = next(one.device for one in args if isinstance(one, Tensor))
        meta_args, meta_kwargs = tree_map_only(Tensor, lambda one: one.to("meta"), (args, kwargs))
        return tree_map_only(Tensor, partial(_stand_in, device), func(*meta_args, **meta_kwargs))


def _quietly(stream: torch.cuda.Stream | None, call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    with suppress(Exception), torch.no_grad(), torch.cuda.stream(stream):  # without a stream, the latter does nothing
        call(*args, **kwargs)


def _layout(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"


def _stand_in(device: torch.device, like: Tensor) -> Tensor:
    """Not zeros: where these are divided by their length, say, they give NaN, which some operations refuse."""
    if not like.is_floating_point():
        return torch.zeros_like(like, device=device)
    numbers = torch.linspace(-1, 1, like.numel(), device=device)
    return numbers.to(like.dtype).view(like.shape)
