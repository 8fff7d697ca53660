"""Whether a stack on processor cores rounds each user's numbers alike, whoever else is in it.

In a stack users lie end to end, and torch treats the end of an array otherwise than its middle: `sigmoid`, say, has one
routine for whole vector registers and another for what is left, and they differ in the last bit. The last users of a
stack would be rounded otherwise than if somebody came after them. A bit "within the clip" that is as near to the clip
flips with it, and so would those of all users who are alike, when one user leaves.

So on cores `engine="auto"` stacks a model only if every operation of a step is known to treat users alike:
`rounded_by_company` looks at a step of made-up users. What is not known trains one by one. Common operations that do
not treat users alike have a form that does: see `replacements.py`.

All operations of the lists below are tried by tests/engine/rounding/test_known.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Nothing is rounded, or one number is rounded correctly, as IEEE 754 asks for, or sums are added one after the other in
# the order of a user's own numbers.
_EXACT = """
abs adaptive_max_pool2d adaptive_max_pool2d_backward add amax amin arange cat ceil clamp clamp_max clamp_min clone
col2im constant_pad_nd copy copysign diag_embed diagonal_backward diagonal_scatter div embedding
embedding_dense_backward empty empty_like empty_strided eye fill flip floor floor_divide full full_like gather
hardshrink hardshrink_backward hardtanh hardtanh_backward heaviside im2col index index_add index_copy index_put
index_select kthvalue leaky_relu leaky_relu_backward lift_fresh_copy linspace masked_fill masked_scatter max
max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward
maximum median min minimum mul nan_to_num neg new_empty new_empty_strided new_full new_ones new_zeros
nll_loss_backward nll_loss_forward ones ones_like reciprocal reflection_pad1d reflection_pad1d_backward
reflection_pad2d reflection_pad2d_backward relu repeat replication_pad1d replication_pad1d_backward replication_pad2d
replication_pad2d_backward roll round rsub scalar_tensor scatter scatter_add select_backward select_scatter sgn sign
slice_backward slice_scatter sort sqrt squeeze stack sub threshold threshold_backward topk tril triu trunc
unfold_backward unsqueeze upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d
upsample_nearest2d_backward value_selecting_reduction_backward where zero zeros zeros_like _index_put_impl
_prelu_kernel _prelu_kernel_backward _to_copy _unsafe_index _unsafe_index_put _unsafe_view
"""
# By themselves, each number is computed alike wherever it stands: found by trials.
_ELEMENTWISE = """
acos acosh addcdiv addcmul asin asinh atan binary_cross_entropy binary_cross_entropy_backward cos digamma erf erfc exp
expm1 fmod frac hardsigmoid hardsigmoid_backward hardswish hardswish_backward lerp lgamma log log10 log1p log2
log_sigmoid_backward log_sigmoid_forward mse_loss mse_loss_backward remainder rsqrt sin softshrink softshrink_backward
tan tanh tanh_backward xlogy
"""
# Row by row, alike if users are the outermost axis in memory: found by trials. With users side by side, a sum over
# another axis adds the columns of the last users in another order.
_BY_ROW = """
avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward cumprod cumsum linalg_vector_norm logcumsumexp logsumexp
mean native_layer_norm native_layer_norm_backward norm sum _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data
"""
_OWN = """
stacked_convolution stacked_convolution_backward stacked_gru stacked_gru_backward stacked_lstm stacked_lstm_backward
stacked_matrices stacked_product stacked_product_rows stacked_product_weight token_losses token_losses_grad
"""
ALIKE = frozenset(f"aten.{name}" for name in f"{_EXACT} {_ELEMENTWISE}".split()) | frozenset(
    f"clipline.{name}" for name in _OWN.split()
)
ALIKE_BY_ROW = frozenset(f"aten.{name}" for name in _BY_ROW.split())
_SOFTMAX = {  # alike over the last axis alone; and which argument the axis is
    "aten._log_softmax": 1, "aten._softmax": 1, "aten._log_softmax_backward_data": 2, "aten._softmax_backward_data": 2,
}  # fmt: skip
_SCALED = ("aten.add", "aten.sub", "aten.rsub")  # by a number: a product and a sum, rounded once or twice
_ACCUMULATING = ("aten.index_put", "aten._index_put_impl", "aten._unsafe_index_put")
_NOT_IN_HALVES = ("aten.pow", "aten.rsqrt")
_EXPONENTS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)  # powers that torch computes by products and roots


def rounded_by_company(step: Callable[[int], object]) -> frozenset[str]:
    """Operations of a step that may round a user's numbers by who else is there; `step` runs one of so many users."""
    seen = []
    for users in _USERS:
        with CompanyRounding() as mode:
            step(users)
        seen.append(mode)
    found = seen[0].found | seen[1].found
    for (name, one), (other_name, other) in zip_longest(*(mode.by_row for mode in seen), fillvalue=("", ())):
        # An axis that grows with the number of users is theirs; what grows nowhere is of no user.
        pairs = zip(one, other, strict=False)
        if name != other_name or any(a != b and a.outermost * _USERS[1] != b.outermost * _USERS[0] for a, b in pairs):
            found |= {name, other_name} - {""}
    return frozenset(found)


_USERS = (5, 7)  # of the two steps that are compared


class InMemory(NamedTuple):
    """The sizes of a tensor's axes, but for repeated ones, and of the axis whose entries lie farthest apart."""

    sizes: tuple[int, ...]
    outermost: int

    @classmethod
    def of(cls, values: Tensor) -> InMemory:
        """Where the values lie."""
        axes = [pair for pair in zip(values.stride(), values.shape, strict=True) if pair[0] > 0 and pair[1] > 1]
        return cls(tuple(size for _, size in axes), max(axes)[1] if axes else 0)


class CompanyRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations of a step that may round by who else is there; of those by rows, where the numbers lie."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()
        self.by_row: list[tuple[str, tuple[InMemory, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`func`, noted unless it is known."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not self._alike(func, args, kwargs or {}, result):
            self.found.add(str(func.overloadpacket))
        return result

    def _alike(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        name = str(func.overloadpacket).rstrip("_")  # in place or not
        tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor)]
        if any(one.is_complex() for one in tensors):
            return False
        if not any(isinstance(one, Tensor) and one.is_floating_point() for one in tree_leaves(result)):
            return True
        if name in _SCALED and kwargs.get("alpha", 1) != 1:
            return False
        if name in _ACCUMULATING and (args[3:4] == (True,) or kwargs.get("accumulate", False)):
            return False  # several threads add in any order
        if name in _NOT_IN_HALVES and any(one.dtype in (torch.bfloat16, torch.float16) for one in tensors):
            return False
        if name == "aten.pow":
            return isinstance(args[1], int | float) and args[1] in _EXPONENTS
        if name in _SOFTMAX and args[_SOFTMAX[name]] % args[0].ndim != args[0].ndim - 1:
            return False
        if name in ALIKE_BY_ROW:
            self.by_row.append((name, tuple(map(InMemory.of, tensors))))
            return True
        return name in ALIKE
