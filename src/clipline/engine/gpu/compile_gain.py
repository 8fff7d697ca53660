"""Whether compiling a step pays: what it would save in a whole training, against the time that the compiler takes.

A compiler joins operations that read and write the same numbers. What that saves is estimated from the operations of
one step on made-up users, so it depends on the model, the number of users, rounds and batches, never on anybody's
data or on a clock: a training that is run again, or resumed, takes the same way. Where it saves little, steps run as
they are written, recorded as CUDA graphs all the same, and training begins at once.

Plain twin: compiling whatever comes.
Switch: `FastParts.compiled_steps`, or --compiled-steps: "always".
Held equal by: tests/engine/stacked/test_step.py (compiled, recorded and as written), test_compile_gain.py.
Buys: on an H200, 400 rounds of so_lr on real users: 35.6 s from the start of the process compiled, 20.4 as written; 150
rounds of handwriting: 43.0 and 23.5. A round is slower: 4.7 ms compiled, 7.8 as written (benchmarks/results/README.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...federated.local_sgd import LocalTraining

# Products, convolutions and operations of our own are one kernel each, compiled or not.
_KERNELS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward")
_LAUNCH_S = 2e-6  # of a small operation in a recording
_BANDWIDTH = 3e12  # bytes a second of an operation on large tensors, on an H200
_SAVED = 0.25  # of the time of operations that can be joined: as measured for emnist_cr, shakespeare and so_lr
_EXAMPLES = 400  # that the longest user of a round is taken to have: they decide how many steps the round has
WORTH_S = 4.5  # seconds that each program has to save in a whole training: it takes 5 to 20 to compile


@dataclass(frozen=True)
class StepWork:
    """What one step of a stack does: `operations` of torch, and the bytes a user moves by each that can be joined."""

    operations: int
    joined: tuple[int, ...]

    def seconds_saved(self, users: int, rounds: int, local: LocalTraining) -> float:
        """About how much time compiling saves in so many rounds of so many users on a large GPU."""
        step = sum(max(_LAUNCH_S, users * moved / _BANDWIDTH) for moved in self.joined)
        examples = min(_EXAMPLES, local.max_examples or _EXAMPLES)
        return _SAVED * step * local.epochs * math.ceil(examples / local.batch_size) * rounds


class CountWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of a step of `users` users that runs within."""

    def __init__(self, users: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._users, self._operations, self._joined = users, 0, list[int]()

    @property
    def work(self) -> StepWork:
        """What has run so far."""
        return StepWork(self._operations, tuple(self._joined))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operations += 1
        if _joinable(func):
            tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor)]
            self._joined.append(sum(one.nbytes for one in tensors if one.layout == torch.strided) // self._users)
        return result


def _joinable(func: Any) -> bool:
    """Whether a compiler joins the operation with others: it is torch's own, moves numbers, and is no product."""
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims"):
        return False
    return not func.is_view and func.overloadpacket.__name__ not in _KERNELS
