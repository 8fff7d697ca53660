"""Layers that replace torch's in the engine's copy of a model, so that they run under vmap; and safe vmap rules.

The caller's model keeps its own layers, and parameters keep torch's names. `StackSafe` corrects the operations whose
vmap rules would mix users up. vmap has no rule for torch's recurrences or for fused attention, which become explicit
products. Models of Hugging Face also look at the values of their padding mask to choose a kernel, which a stack cannot
do, and drop attention weights with numbers from torch's global generator, which users would share. What has no form for
a stack (several directions, projections, dropout between layers, packed sequences) says so, and users then train one by
one.

Plain twin: torch's own layers and operations, which also run here for a single user.
Switch: `engine="one-by-one"`.
Held equal by: tests/engine/stacked/test_vmap_layers.py, test_vmap_rules.py, test_attention.py, test_sequence_layers.py.
Buys: what `gpu/recorded_step.py` says, which could not run without. A round of 50 users, 16 wide, 20 steps, on one
core: LSTM 113 ms one by one and 63 stacked, GRU 349 and 42, encoder 246 and 65. A Llama of width 64 with LoRA, 16 users
on one core: 0.24 s a round one by one, 0.10 stacked (adapters.md).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.user_random import UserRandom
from ..core.vmap_axis import in_vmap, is_batched, product
from ..gpu.kernels import convolution
from ..gpu.kernels import lstm as lstm_ops

_PREFIX = "clipline_"  # of these forms of attention in transformers' registry
_FORMS = ("sdpa", "eager")
_SOURCE = "clipline_dropout"  # the submodule that draws what attention drops


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    weighed: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention`: softmax(query key^T scale + mask) value, the softmax in float32 or more.

    A query with all keys masked gives zeros, as in torch. The weights are dropped by `F.dropout`, which has no version
    for a stack unless `_DropoutFrom` gives one. `weighed` is a function of the weights, after the softmax.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = (query @ key.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    nowhere = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        nowhere = ~attn_mask.any(dim=-1, keepdim=True)
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    elif attn_mask is not None:
        scores = scores + attn_mask
    wide = torch.float32 if scores.dtype in (torch.bfloat16, torch.float16) else scores.dtype
    weights = scores.softmax(dim=-1, dtype=wide).to(value.dtype)
    if nowhere is not None:
        weights = weights.masked_fill(nowhere, 0.0)
    weights = weights if weighed is None else weighed(weights)
    return (F.dropout(weights, dropout_p) if dropout_p > 0 else weights) @ value


def use_stackable_attention(module: nn.Module) -> str:
    """Let the transformers models in `module`, a working copy, attend in a way that stacks; in words, or "" if none do.

    The code stays the model's own, "sdpa" or "eager". Masks are made without looking at the values of stacked users,
    and what dropout drops comes from the user's own numbers, in both engines. Models with another attention, or whose
    attention is not chosen by name, are left alone.
    """
    library: Any = sys.modules.get("transformers")
    if "transformers.modeling_utils" not in sys.modules or not hasattr(library, "AttentionMaskInterface"):
        return ""  # no model is of it, or the library is older than these registries
    configs: dict[int, Any] = {id(part.config): part.config for part in module.modules() if _chooses(library, part)}
    for name in _FORMS:
        library.AttentionInterface.register(_PREFIX + name, partial(_attention, name))
        library.AttentionMaskInterface.register(_PREFIX + name, partial(_mask, name))
    for part in list(module.modules()):
        if id(getattr(part, "config", None)) in configs and "attention" in type(part).__name__.lower():
            part.add_module(_SOURCE, UserRandom())
    for config in configs.values():
        config._attn_implementation = _PREFIX + config._attn_implementation
        config.use_cache = False  # keys and values of a training step are not used again
    return "attention as explicit products" if configs else ""


def _chooses(library: Any, part: nn.Module) -> bool:
    """Whether it is a transformers model whose attention is chosen by name, and one of `_FORMS` is."""
    return (
        isinstance(part, library.PreTrainedModel)
        and part.config._attn_implementation in _FORMS
        and getattr(part, "_can_set_attn_implementation", bool)()
        and _eager_of(part) is not None
        and not getattr(part.config, "reorder_and_upcast_attn", False)  # of GPT-2, with a form of its own
    )


def _eager_of(part: nn.Module) -> Callable[..., Any] | None:
    """The eager attention of the file that defines this module, as transformers' files have one."""
    eager: Callable[..., Any] | None = getattr(sys.modules.get(type(part).__module__), "eager_attention_forward", None)
    return eager


def _attention(form: str, module: nn.Module, *args: Any, dropout: float = 0.0, **kwargs: Any) -> Any:
    """The attention of `module` in this form, with dropout from the module's own source."""
    attend = (_eager_of(module) if form == "eager" else None) or sys.modules["transformers"].AttentionInterface()[
        "sdpa"
    ]
    source = getattr(module, _SOURCE, None)
    if dropout == 0 or source is None:
        return attend(module, *args, dropout=dropout, **kwargs)
    with _DropoutFrom(source):
        return attend(module, *args, dropout=dropout, **kwargs)


def _mask(form: str, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The mask of this form; in a stack in full, as whether it can be left out depends on values."""
    if attention_mask is not None and in_vmap():
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    make = sys.modules["transformers"].AttentionMaskInterface()[form]
    mask: Tensor | None = make(*args, attention_mask=attention_mask, **kwargs)
    return mask


class _DropoutFrom(TorchFunctionMode):
    """Within, `F.dropout` draws from this source, and attention with dropout is explicit."""

    def __init__(self, source: UserRandom) -> None:
        super().__init__()
        self._source = source

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            with self:  # a mode is off while it handles a call
                return explicit_attention(*args, **(kwargs or {}))
        return (self._dropout if func is F.dropout else func)(*args, **(kwargs or {}))

    def _dropout(self, values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self._source.dropped(values, p) if training else values


class _NoCell:
    """In the place of an LSTM's last cell, which the stacked recurrence does not give out. Any use of it is refused."""

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(
            "the last cell of nn.LSTM has no version for a stack; its outputs and last state have"
        )


class _Recurrent:
    """What both recurrences share: which way runs, layers one above the other, and the form of what goes in and out."""

    _flat_weights: list[Any]
    _flat_weights_names: list[str]
    bias: bool
    batch_first: bool
    bidirectional: bool
    dropout: float
    num_layers: int
    proj_size: int

    def _torchs_own(self, inputs: Any) -> bool:
        """Whether torch's kernel can run: for one user, on the parameters that torch has listed for it."""
        listed = zip(self._flat_weights_names, self._flat_weights, strict=True)
        own = all(getattr(self, name) is one for name, one in listed)
        return own and not (isinstance(inputs, Tensor) and is_batched(inputs))

    def _run(self, inputs: Any, start: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Outputs and last states as torch gives them. `start` has (layers, batch, hidden) each, or is empty."""
        self._check_stackable(inputs)
        single = inputs.ndim == 2
        values = inputs.unsqueeze(1) if single else inputs.transpose(0, 1) if self.batch_first else inputs
        last: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            weight_ih, weight_hh = (getattr(self, f"weight_{kind}_l{layer}") for kind in ("ih", "hh"))
            biases = [getattr(self, f"bias_{kind}_l{layer}") for kind in ("ih", "hh")] if self.bias else []
            begin = [(one.unsqueeze(1) if single else one)[layer] for one in start]
            values, ended = self._layer(values, weight_ih, weight_hh, biases, begin)
            last.append(ended)
        states = tuple(torch.stack(one).squeeze(1) if single else torch.stack(one) for one in zip(*last, strict=True))
        if single:
            return values.squeeze(1), states
        return values.transpose(0, 1) if self.batch_first else values, states

    def _layer(
        self, values: Tensor, weight_ih: Tensor, weight_hh: Tensor, biases: Sequence[Tensor], start: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer, (time, batch, inputs) -> (time, batch, hidden), and the last states (batch, hidden)."""
        raise NotImplementedError

    def _check_stackable(self, inputs: Any) -> None:
        name, what = type(self).__name__, ""
        if not isinstance(inputs, Tensor):
            what = "of packed sequences"
        elif self.bidirectional:
            what = "in two directions"
        elif self.proj_size or (self.dropout and self.num_layers > 1):
            what = "with a projection" if self.proj_size else "with dropout"
        if what:
            raise NotImplementedError(f"nn.{name} {what} has no version for a stack")


def _products(values: Tensor, weight: Tensor, *biases: Tensor) -> Tensor:
    """The product with weight^T plus biases, in its own type: under autocast adding a bias would promote it."""
    out = values @ weight.T
    for bias in biases:
        out = out + bias.to(out.dtype)
    return out


class LSTM(_Recurrent, nn.LSTM):
    """`nn.LSTM`; in a stack, one operation for all users a layer, which does not give out the last cell.

    Where a state to begin from is given it goes step by step, and gives out the cell too.
    """

    def forward(self, inputs: Any, hx: Any = None) -> Any:
        """As `nn.LSTM`; in a stack for one direction."""
        if self._torchs_own(inputs):
            return super().forward(inputs, hx)
        outputs, states = self._run(inputs, hx or ())
        return outputs, (states[0], states[1] if hx is not None else _NoCell())

    def _layer(
        self, values: Tensor, weight_ih: Tensor, weight_hh: Tensor, biases: Sequence[Tensor], start: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        gate_inputs = _products(values, weight_ih, *biases)
        if not start:
            active = torch.ones_like(gate_inputs[..., 0], dtype=torch.bool)
            out = lstm_ops.recurrence(gate_inputs, weight_hh, active)
            return out, (out[-1],)
        (state, cell), outputs = start, []
        for inputs in gate_inputs.unbind(0):
            gate_in, forget, candidate, gate_out = (inputs + state @ weight_hh.T).chunk(4, dim=-1)
            cell = forget.sigmoid() * cell + gate_in.sigmoid() * candidate.tanh()
            state = gate_out.sigmoid() * cell.tanh()
            outputs.append(state)
        return torch.stack(outputs), (state, cell)


class GRU(_Recurrent, nn.GRU):
    """`nn.GRU`; in a stack, step by step."""

    def forward(self, inputs: Any, hx: Any = None) -> Any:
        """As `nn.GRU`; in a stack for one direction."""
        if self._torchs_own(inputs):
            return super().forward(inputs, hx)
        outputs, (states,) = self._run(inputs, () if hx is None else (hx,))
        return outputs, states

    def _layer(
        self, values: Tensor, weight_ih: Tensor, weight_hh: Tensor, biases: Sequence[Tensor], start: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        gate_inputs = _products(values, weight_ih, *biases[:1])
        (state,), outputs = start or (torch.zeros_like(gate_inputs[0, :, : weight_hh.shape[1]]),), []
        for inputs in gate_inputs.unbind(0):
            of_inputs, of_state = inputs.chunk(3, dim=-1), _products(state, weight_hh, *biases[1:]).chunk(3, dim=-1)
            reset, update = ((a + b).sigmoid() for a, b in zip(of_inputs[:2], of_state[:2], strict=True))
            candidate = (of_inputs[2] + reset * of_state[2]).tanh()
            state = candidate + update * (state - candidate)
            outputs.append(state)
        return torch.stack(outputs), (state,)


class MultiheadAttention(UserRandom, nn.MultiheadAttention):
    """`nn.MultiheadAttention`; in a stack as explicit products, and what is dropped is the user's own in both engines.

    Keys and values of other widths, added biases and zeros, and weights of each head are torch's alone.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention`."""
        drops = self.training and self.dropout > 0
        stacked = is_batched(query, key, value) or any(map(is_batched, self.parameters(recurse=False)))
        usual = self._qkv_same_embed_dim and self.bias_k is None and not self.add_zero_attn and not need_weights
        if not usual or not (stacked or drops):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        single = query.ndim == 2
        parts = [one.unsqueeze(0 if self.batch_first else 1) if single else one for one in (query, key, value)]
        if not self.batch_first:
            parts = [one.transpose(0, 1) for one in parts]  # (batch, time, width)
        if single and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        query, key, value = (
            _products(part, weight, *([] if bias is None else [bias]))
            .reshape(*part.shape[:2], self.num_heads, -1)
            .transpose(1, 2)
            for part, weight, bias in zip(parts, weights, biases, strict=True)
        )  # (batch, heads, time, width of a head)
        mask, nowhere = _joined_mask(query.dtype, attn_mask, key_padding_mask, self.num_heads)

        def weighed(shares: Tensor) -> Tensor:
            shares = shares if nowhere is None else shares.masked_fill(nowhere, 0.0)
            return self.dropped(shares, self.dropout) if drops else shares

        attended = explicit_attention(query, key, value, mask, weighed=weighed)
        out = self.out_proj(attended.transpose(1, 2).flatten(2))
        out = out if self.batch_first else out.transpose(0, 1)
        return (out.squeeze(0 if self.batch_first else 1) if single else out), None


def _joined_mask(
    dtype: torch.dtype, attn_mask: Tensor | None, key_padding_mask: Tensor | None, heads: int
) -> tuple[Tensor | None, Tensor | None]:
    """What is added to the scores (batch, heads, queries, keys), and which queries have all keys masked, or None.

    In torch's masks true means "masked", and numbers are added. A query with all keys masked gets zeros, as in torch.
    """
    joined: Tensor | None = None
    if attn_mask is not None:
        if attn_mask.ndim == 3:  # (batch * heads, queries, keys)
            attn_mask = attn_mask.reshape(-1, heads, *attn_mask.shape[1:])
        joined = _additive(attn_mask, dtype)
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, dtype)[:, None, None, :]
        joined = padding if joined is None else joined + padding
    if joined is None:
        return None, None
    hidden = joined == -torch.inf
    return joined.masked_fill(hidden, torch.finfo(dtype).min / 2), hidden.all(dim=-1, keepdim=True)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


LIBRARY_IS_FAST = ("cpu",)  # devices where torch's grouped convolution of a stack is faster than patches


def make_stackable(module: nn.Module) -> str:
    """Give a working copy layers and attention that run under vmap; in words, which attention, or "" if as it was."""
    attention = use_stackable_attention(module)
    replace_layers(module)
    return attention


def replace_layers(module: nn.Module) -> nn.Module:
    """The module itself, changed in place: layers of torch's own classes become those of `_OURS`."""
    for layer in module.modules():
        if (ours := _OURS.get(type(layer))) is not None:
            layer.__class__ = ours
            if issubclass(ours, UserRandom):
                layer.register_buffer("key", torch.zeros(2, dtype=torch.int32), persistent=False)
    return module


class StackSafe(TorchFunctionMode):
    """Active while the loss of a stack is computed: replaces operations whose vmap rules would mix users up.

    vmap of an embedding concatenates the users' weights: an index beyond a user's last row reads the next user's row,
    and `padding_idx` applies to the first user only. A label out of range is an error for the whole block, and on a GPU
    for the whole process. Here both are recorded, and `spoiled` makes the loss of such a user NaN.
    """

    replacing = False  # whether a replacement runs

    def __init__(self) -> None:
        super().__init__()
        self._invalid: list[Tensor] = []  # () bool each under vmap: one a user

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _CHECKED and func not in _SAFE:
            return func(*args, **(kwargs or {}))
        before, StackSafe.replacing = StackSafe.replacing, True
        try:
            if func in _CHECKED:
                return _CHECKED[func](self._invalid, *args, **(kwargs or {}))
            return _SAFE[func](*args, **(kwargs or {}))
        finally:
            StackSafe.replacing = before

    def spoiled(self, loss: Tensor) -> Tensor:
        """The loss, or NaN if an index or label was out of range."""
        for invalid in self._invalid:
            loss = loss + torch.where(invalid, math.nan, 0.0).to(loss.dtype)
        return loss


def _embedding(
    invalid: list[Tensor],
    numbers: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`F.embedding`. The row at `padding_idx` gets no gradient; an index out of range is recorded in `invalid`."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise NotImplementedError("embedding with max_norm, scale_grad_by_freq or sparse has no version for a stack")
    height = len(weight)
    rows = F.embedding(numbers.clamp(0, height - 1), weight)
    if padding_idx is not None:
        rows = torch.where((numbers == padding_idx % height).unsqueeze(-1), rows.detach(), rows)
    invalid.append(((numbers < 0) | (numbers >= height)).any())
    return rows


def _with_labels(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`F.cross_entropy` or `F.nll_loss`; a label out of range is recorded in `invalid`."""

    def safe(invalid: list[Tensor], scores: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # On the CPU a bad label is an error, after which the block trains again, user by user. Floating-point labels
        # are class probabilities; positional `args` are torch's deprecated signature.
        if labels.device.type == "cpu" or labels.is_floating_point() or args:
            return loss(scores, labels, *args, **kwargs)
        classes = scores.shape[1] if scores.ndim > 1 else scores.shape[0]
        known = ((labels >= 0) & (labels < classes)) | (labels == kwargs.get("ignore_index", -100))
        invalid.append(~known.all())
        return loss(scores, torch.where(known, labels, 0), **kwargs)

    return safe


def _aten_embedding(
    invalid: list[Tensor], weight: Tensor, numbers: Tensor, padding_idx: int = -1, *args: Any, **kwargs: Any
) -> Tensor:
    """`torch.embedding`: weight first, and padding_idx -1 for none."""
    return _embedding(invalid, numbers, weight, None if padding_idx < 0 else padding_idx, None, 2.0, *args, **kwargs)


def _prod(values: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.prod`. torch's backward pass takes another path, with other overflows, as soon as any user has a zero."""
    values = values if dtype is None else values.to(dtype)
    if not values.is_floating_point() or values.numel() == 0:
        return values.prod() if dim is None else values.prod(dim, keepdim)
    along = values.reshape(-1) if dim is None or values.ndim == 0 else values
    product = along.cumprod(dim or 0).narrow(dim or 0, -1, 1)
    return product.squeeze(dim or 0) if not keepdim or values.ndim == 0 else product


def _select_scatter(values: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """`torch.select_scatter`, whose gradient of `source` is too large under vmap."""
    place = range(values.shape[dim])[index]
    return values.slice_scatter(source.unsqueeze(dim), dim, place, place + 1)


def _index_fill(values: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """`index_fill`, if all users share the index. Otherwise vmap would read -1 as the last entry of the user before."""
    if is_batched(index):
        raise NotImplementedError("index_fill has no version for a stack: use torch.where")
    return torch.index_fill(values, dim, index, value)


def _view(values: Tensor, *shape: Any, **options: Any) -> Tensor:
    """`Tensor.view`, or a copy where users' values lie in memory otherwise than one user's would."""
    try:
        return values.view(*shape, **options)
    except RuntimeError:
        if options or any(isinstance(one, torch.dtype) for one in shape):
            raise
        return values.reshape(*shape)


_CHECKED: dict[Any, Callable[..., Any]] = {
    F.embedding: _embedding,
    F.cross_entropy: _with_labels(F.cross_entropy),
    F.nll_loss: _with_labels(F.nll_loss),
    torch.embedding: _aten_embedding,
}
_SAFE: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: explicit_attention,
    Tensor.view: _view,
    torch.prod: _prod,
    Tensor.prod: _prod,
    torch.select_scatter: _select_scatter,
    Tensor.select_scatter: _select_scatter,
    torch.index_fill: _index_fill,
    Tensor.index_fill: _index_fill,
}
_ATEN = torch.ops.aten
_UNSAFE_OPS = {
    _ATEN.embedding,
    _ATEN.prod,
    _ATEN.index_fill_,
}  # unsafe under vmap; index_fill decomposes to index_fill_


class Bypass(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """For the trial of a stack: refuses unsafe operations that bypass `StackSafe`, as in a scripted function.

    So do those in a `torch.autograd.Function`, and `torch.ops.aten` called by name. Some torch operations take another
    path while this mode is active, so the trial must also pass without it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in _UNSAFE_OPS and not StackSafe.replacing:
            raise NotImplementedError(
                f"{func.overloadpacket} has no version for a stack in a scripted function, in an autograd.Function or "
                "called by this name"
            )
        return func(*args, **(kwargs or {}))


class Dropout(UserRandom, nn.Dropout):
    """`nn.Dropout` from the user's own random numbers."""

    def forward(self, values: Tensor) -> Tensor:
        """In training each value is dropped with probability p and the others are scaled by 1 / (1 - p)."""
        return self.dropped(values, self.p) if self.training else values


class Linear(nn.Linear):
    """`nn.Linear`; under vmap, `product`."""

    def forward(self, values: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        device_type = values.device.type
        # A frozen weight has a product for each user on cores, where one over all rows is rounded by how many they are.
        apart = device_type == "cpu" and isinstance(self.weight, nn.Parameter) and is_batched(values)
        if not is_batched(self.weight) and not apart:  # frozen, or shared: one product over the rows of all users
            return F.linear(values, self.weight, self.bias)
        dtype = product_dtype(self.weight)
        out: Tensor = product(values.reshape(-1, self.in_features).to(dtype), self.weight.to(dtype))
        out = out if self.bias is None else out + self.bias.to(dtype)
        return out.reshape(*values.shape[:-1], self.out_features)


def product_dtype(weight: Tensor) -> torch.dtype:
    """The type in which products with this weight are computed."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


class Conv2d(nn.Conv2d):
    """`nn.Conv2d`; stacked on a GPU, patches times a matrix. Rarer kinds are torch's, slow under vmap; all on cores."""

    def forward(self, images: Tensor) -> Tensor:
        """(batch, in_channels, height, width) -> (batch, out_channels, height, width)."""
        usual = self.groups == 1 and self.padding_mode == "zeros" and set(self.dilation) == {1}
        square = len({*self.kernel_size}) == 1 and len({*self.stride}) == 1
        fast = images.device.type in LIBRARY_IS_FAST
        if fast or images.ndim != 4 or not (usual and square and is_batched(images, self.weight)):
            return super().forward(images)
        zeros = self._reversed_padding_repeated_twice
        return convolution.convolved(images, self.weight.permute(0, 2, 3, 1), self.bias, self.stride[0], tuple(zeros))


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm`; torch's own has no vmap rule."""

    def forward(self, values: Tensor) -> Tensor:
        """(batch, channels, ...) -> the same, each group of channels of each example with mean 0 and variance 1."""
        if not is_batched(values):
            return F.group_norm(values, self.num_groups, self.weight, self.bias, self.eps)
        wide = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
        grouped = wide.reshape(len(values), self.num_groups, -1, *values.shape[2:])
        axes = tuple(range(2, grouped.ndim))
        centred = grouped - grouped.mean(dim=axes, keepdim=True)
        normal = centred * (centred.square().mean(dim=axes, keepdim=True) + self.eps).rsqrt()
        normal = normal.reshape(values.shape)
        if not self.affine:
            return normal
        along = (-1, *[1] * (values.ndim - 2))
        return normal * self.weight.view(along) + self.bias.view(along)


_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: Dropout,
    nn.GroupNorm: GroupNorm,
    nn.Linear: Linear,
    nn.Conv2d: Conv2d,
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.MultiheadAttention: MultiheadAttention,
}
