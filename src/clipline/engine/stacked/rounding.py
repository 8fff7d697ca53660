"""Stacks on processor cores in which every user is rounded alike, to the last bit, whoever else is there.

In a stack users lie end to end. torch has one routine for whole vector registers and another for the end of an array,
libraries multiply matrices otherwise where they begin elsewhere in memory, and convolutions by their number of
channels. So a user's last bits can depend on who else is there, and at a kink of the network one bit flips a whole
update. Four things keep users apart:

- `filled`: every call has a multiple of `grain` users, the last of which may be copies, so that no array has an end;
- the variable MKL_CBWR, set by `import clipline`: products do not depend on where a matrix lies;
- `one_thread`: sums are added in one order;
- `fixed_size`: every operation of a step is on the lists below, and made-up users keep all bits at other places, in
  other numbers and in other company, on this machine, each time a training is made. Else users train one by one.

Plain twin: `engine/core/one_by_one.py`.
Switch: `engine="one-by-one"`.
Held equal by: tests/engine/stacked/test_rounding.py and tests/adversarial/test_rounding.py.
Buys: that small models stack on cores. A round of 50 users on one core: nn.LSTM 82 ms one by one, 16 stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ...errors import CliplineError
from ...federated.local_sgd import Batch
from ..core.batches import select_rows
from ..core.problem import Problem
from ..isolation.generators import preserve_generators
from ..isolation.guard import users_own
from .probe import made_up_step
from .step import StackStep

_REGISTERS = 128  # bytes that torch's loops take at a time
_FEW = 8  # users: enough where no operation rounds the end of an array otherwise
_USERS = 96  # of the trial, at most
_BYTES = 1 << 28  # of the trial's examples and parameters, at most
_NARROW = 5  # examples: the second width of batches that is tried
_RATE = 2.0**10  # a step so long that what comes of it shows the gradient's last bits
_FACTORS = (1000.0, float("nan"))  # of everybody else's data and parameters

# Nothing is rounded, or one number is rounded correctly, as IEEE 754 asks for; or each number, or row of a user's
# numbers, was found to be rounded alike wherever it stands; or a product, which MKL_CBWR takes care of.
_IN_FEW = """
abs acos acosh adaptive_max_pool2d adaptive_max_pool2d_backward add addbmm addcdiv addcmul addmm amax amin arange asin
asinh atan avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward baddbmm binary_cross_entropy
binary_cross_entropy_backward bmm cat ceil clamp clamp_max clamp_min clone col2im constant_pad_nd convolution
convolution_backward copy copysign cos cumprod cumsum diag_embed diagonal_backward diagonal_scatter digamma div
embedding embedding_dense_backward empty empty_like empty_strided erf erfc exp expm1 eye fill flip floor floor_divide
fmod frac full full_like gather hardshrink hardshrink_backward hardsigmoid hardsigmoid_backward hardswish
hardswish_backward hardtanh hardtanh_backward heaviside im2col index index_add index_copy index_put index_select
kthvalue leaky_relu leaky_relu_backward lerp lgamma lift_fresh_copy linalg_vector_norm linspace log log10 log1p log2
log_sigmoid_backward log_sigmoid_forward logcumsumexp logsumexp masked_fill masked_scatter max max_pool2d_with_indices
max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward maximum mean median min
minimum mm mse_loss mse_loss_backward mul mv nan_to_num native_layer_norm native_layer_norm_backward neg new_empty
new_empty_strided new_full new_ones new_zeros nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward
norm ones ones_like reciprocal reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward
relu remainder repeat replication_pad1d replication_pad1d_backward replication_pad2d replication_pad2d_backward roll
round rsqrt rsub scalar_tensor scatter scatter_add select_backward select_scatter sgn sign sin slice_backward
slice_scatter softshrink softshrink_backward sort sqrt squeeze stack sub sum tan tanh tanh_backward threshold
threshold_backward topk tril triu trunc unfold_backward unsqueeze upsample_nearest1d upsample_nearest1d_backward
upsample_nearest2d upsample_nearest2d_backward value_selecting_reduction_backward where xlogy zero zeros zeros_like
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _index_put_impl _log_softmax _log_softmax_backward_data
_prelu_kernel _prelu_kernel_backward _softmax _softmax_backward_data _to_copy _unsafe_index _unsafe_index_put
_unsafe_view
"""
# Number by number, but the end of an array otherwise than its middle.
_IN_WHOLE_REGISTERS = """
elu elu_backward gelu gelu_backward glu glu_backward huber_loss huber_loss_backward mish mish_backward pow sigmoid
sigmoid_backward silu silu_backward smooth_l1_loss smooth_l1_loss_backward softplus softplus_backward std std_mean var
var_mean
"""
_OWN = {f"clipline.{name}" for name in (
    "stacked_product", "stacked_product_weight", "stacked_lstm", "stacked_lstm_backward",
)}  # fmt: skip
_OWN_IN_WHOLE_REGISTERS = {"clipline.token_losses", "clipline.token_losses_grad"}
IN_FEW = frozenset(f"aten.{name}" for name in _IN_FEW.split()) | _OWN
IN_WHOLE_REGISTERS = frozenset(f"aten.{name}" for name in _IN_WHOLE_REGISTERS.split()) | _OWN_IN_WHOLE_REGISTERS
_SCALED = ("aten.add", "aten.sub", "aten.rsub")  # by a number: a product and a sum, rounded once or twice
_SOFTMAX = {  # row by row over the last axis alone; and which argument the axis is
    "aten._log_softmax": 1, "aten._softmax": 1, "aten._log_softmax_backward_data": 2, "aten._softmax_backward_data": 2,
}  # fmt: skip


class OperationsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operations of a step are `unknown`, and how many users leave no end of an array: `grain`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unknown: set[str] = set()
        self.grain, self.full = _FEW, _FEW  # and where whole registers are needed after all

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        numbers = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        if func.is_view or not any(one.is_floating_point() or one.is_complex() for one in numbers):
            return result
        name = str(func.overloadpacket).rstrip("_")  # in place or not
        self.full = max(self.full, *(full_grain(one.dtype) for one in numbers if one.is_floating_point()), 0)
        if any(one.is_complex() for one in numbers) or name not in IN_FEW | IN_WHOLE_REGISTERS:
            self.unknown.add(str(func.overloadpacket))
        scaled = name in _SCALED and (kwargs or {}).get("alpha", 1) != 1
        across = name in _SOFTMAX and args[_SOFTMAX[name]] % args[0].ndim != args[0].ndim - 1
        if name in IN_WHOLE_REGISTERS or scaled or across or numbers[0].dtype in (torch.bfloat16, torch.float16):
            self.grain = self.full
        return result


def full_grain(dtype: torch.dtype) -> int:
    """How many users leave no end of an array of this type, whatever a user's own numbers."""
    return _REGISTERS // dtype.itemsize


def filled(users: int, values: Tensor) -> Tensor:
    """(n, ...) -> (users, ...) at a multiple of 64 bytes, with copies of the first user at the end."""
    if len(values) == users and values.is_contiguous() and values.data_ptr() % 64 == 0:
        return values
    plain = values.view(torch.int16) if values.dtype == torch.uint16 else values  # which torch cannot copy
    whole = plain.new_empty(users, *plain.shape[1:])
    whole[: len(plain)] = plain
    whole[len(plain) :] = plain[:1]
    return whole.view(values.dtype)


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Within, torch uses one thread on processor cores: several would part sums by how many users are there."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def fixed_size(problem: Problem, made_up: Callable[[int], Batch], step: StackStep) -> tuple[int, str]:
    """By how many users stacks grow, and why a user may be rounded otherwise in other company: "" if not."""
    if problem.device.type != "cpu":
        return 1, "a GPU rounds by how many users are there"
    trial = _Trial(problem, made_up, step)
    seen = OperationsSeen()
    for width in trial.widths:
        trial.look(width, seen)
    if seen.unknown:
        unknown = ", ".join(sorted(seen.unknown))
        return seen.full, f"{unknown} may round differently depending on which users share the stack"
    for grain in sorted({seen.grain, seen.full}):
        if trial.alike(grain):
            return grain, ""
    return seen.full, "on this machine made-up users were rounded differently at other places or in other company"


class _Trial:
    """Steps of made-up users, each with other examples, parameters and random keys."""

    def __init__(self, problem: Problem, made_up: Callable[[int], Batch], step: StackStep) -> None:
        self._problem, self._made_up, self._step = problem, made_up, step
        batch_size = problem.local.batch_size
        self.widths = sorted({batch_size, min(batch_size, _NARROW)}, reverse=True)
        one = problem.model.initial.nbytes + 4 * batch_size * problem.examples.bytes_each
        self._most = max(_FEW, min(_USERS, _BYTES // one))

    def look(self, width: int, seen: OperationsSeen) -> None:
        """Note the operations of a step."""
        users = self._users(_FEW, width)
        with seen:
            self._moved(users)

    def alike(self, grain: int) -> bool:
        """Whether all bits of a step stay at other places, in other numbers and in other company, and when repeated."""
        count = max(2, self._most // grain) * grain
        return all(self._alike(grain, count, width) for width in self.widths)

    def _alike(self, grain: int, count: int, width: int) -> bool:
        users = self._users(count, width)
        whole = self._moved(users)
        if whole is None:  # a model may take no batch so narrow: its users then train by themselves
            return True
        everybody = torch.arange(count)
        for who in (everybody, everybody.roll(grain // 2 + 1), everybody[:grain], everybody[-2 * grain :].flip(0)):
            found = self._moved(tree_map(partial(select_rows, rows=who), users))
            if found is None or not all(map(torch.equal, found, (one[who] for one in whole))):
                return False
        for factor in _FACTORS:
            others = [tree_map(partial(_others, factor), part) for part in (users[0], users[2])]
            found = self._moved(tree_map(lambda one: one[:grain], (others[0], users[1], others[1], *users[3:])))
            if found is not None and not all(torch.equal(a[0], b[0]) for a, b in zip(found, whole, strict=True)):
                return False
        return True

    def _users(self, count: int, width: int) -> tuple[Any, ...]:
        """The arguments of a step of so many users."""
        problem, model = self._problem, self._problem.model
        batch = {name: field.reshape(count, width, *field.shape[1:])
                 for name, field in self._made_up(count * width).items()}  # fmt: skip
        generator = torch.Generator().manual_seed(2021)
        noise = torch.randn(model.dim + count, generator=generator).to(model.initial).unfold(0, model.dim, 1)[:count]
        spread = torch.tensor([0.0, 0.02, 0.05]).to(model.initial)[torch.arange(count) % 3, None]
        *made, rates = made_up_step(problem, self._step, batch, model.initial + spread * noise)
        return *made, rates * _RATE

    def _moved(self, users: tuple[Any, ...]) -> list[Tensor] | None:
        """The stack after a step of copies of these users; None where it fails."""
        problem = self._problem
        own = tree_map(lambda one: one.clone(memory_format=torch.contiguous_format), users)
        problem.model.module.train()
        with preserve_generators(), problem.arithmetic(), torch.enable_grad(), one_thread(problem.device):
            problem.isolation.seed(0)
            try:
                self._step(*own)
            except Exception as error:
                if isinstance(error, CliplineError) or not users_own(error):
                    raise
                return None
            finally:
                problem.isolation.after_stack()
        return [piece.nan_to_num(7.0) for piece in own[0]]


def _others(factor: float, values: Tensor) -> Tensor:
    """Everybody's values times this factor but the first user's; whole numbers as they are."""
    return torch.cat([values[:1], values[1:] * factor]) if values.is_floating_point() else values
