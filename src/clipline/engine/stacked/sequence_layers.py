"""`nn.LSTM`, `nn.GRU` and `nn.MultiheadAttention` in forms that `torch.func.vmap` can run for many users.

vmap has no rule for torch's recurrences, and none for the fused attention inside `nn.MultiheadAttention`, where a mode
cannot replace it. Parameters and their names stay torch's. What has no form for a stack (several directions,
projections, dropout between layers, packed sequences) says so, and users then train one by one.

Plain twin: torch's own layers, which run here for a single user.
Switch: `engine="one-by-one"`.
Held equal by: tests/engine/stacked/test_sequence_layers.py.
Buys: a round of 50 users, 16 wide, 20 steps, on one core: LSTM 113 ms one by one and 63 stacked, GRU 349 and 42,
encoder 246 and 65 (docs/explanation/engine.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.user_random import UserRandom
from ..core.vmap_axis import is_batched
from ..gpu.kernels import gru as gru_ops
from ..gpu.kernels import lstm as lstm_ops
from .attention import explicit_attention


def replace_sequence_layer(layer: nn.Module) -> None:
    """Change a layer of these three in place, if it is torch's own."""
    if type(layer) is nn.LSTM:
        layer.__class__ = LSTM
    elif type(layer) is nn.GRU:
        layer.__class__ = GRU
    elif type(layer) is nn.MultiheadAttention:
        layer.__class__ = MultiheadAttention
        layer.register_buffer("key", torch.zeros(2, dtype=torch.int32), persistent=False)


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
        own = all(
            getattr(self, name) is one for name, one in zip(self._flat_weights_names, self._flat_weights, strict=True)
        )
        return own and not (isinstance(inputs, Tensor) and is_batched(inputs))

    def _run(self, inputs: Any, start: Sequence[Tensor] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Outputs and last states as torch gives them, layer by layer. `start` has (layers, batch, hidden) each."""
        self._check_stackable(inputs)
        single = inputs.ndim == 2
        values = inputs.unsqueeze(1) if single else inputs.transpose(0, 1) if self.batch_first else inputs
        last: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            weight_ih, weight_hh = (getattr(self, f"weight_{kind}_l{layer}") for kind in ("ih", "hh"))
            biases = [getattr(self, f"bias_{kind}_l{layer}") for kind in ("ih", "hh")] if self.bias else []
            if start is None:
                values = self._recurrence(values, weight_ih, weight_hh, biases)
                last.append((values[-1],))
            else:
                begin = [(one.unsqueeze(1) if single else one)[layer] for one in start]
                values, ended = self._step_by_step(values, weight_ih, weight_hh, biases, *begin)
                last.append(ended)
        states = tuple(torch.stack(one).squeeze(1) if single else torch.stack(one) for one in zip(*last, strict=True))
        if single:
            return values.squeeze(1), states
        return values.transpose(0, 1) if self.batch_first else values, states

    def _recurrence(self, values: Tensor, weight_ih: Tensor, weight_hh: Tensor, biases: Sequence[Tensor]) -> Tensor:
        """One layer from zeros, (time, batch, inputs) -> (time, batch, hidden), as one operation."""
        raise NotImplementedError

    def _step_by_step(
        self, values: Tensor, weight_ih: Tensor, weight_hh: Tensor, biases: Sequence[Tensor], *start: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer from these states (batch, hidden), in torch's operations: outputs, and the last states."""
        raise NotImplementedError

    def _check_stackable(self, inputs: Any) -> None:
        name = type(self).__name__
        if not isinstance(inputs, Tensor):
            raise NotImplementedError(f"nn.{name} of packed sequences has no version for a stack")
        if self.bidirectional or self.proj_size or (self.dropout and self.num_layers > 1):
            what = (
                "in two directions" if self.bidirectional else "with a projection" if self.proj_size else "with dropout"
            )
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
        outputs, states = self._run(inputs, hx)
        return outputs, (states[0], states[1] if hx is not None else _NoCell())

    def _recurrence(self, values: Tensor, weight_ih: Tensor, weight_hh: Tensor, biases: Sequence[Tensor]) -> Tensor:
        gate_inputs = _products(values, weight_ih, *biases)
        active = torch.ones_like(gate_inputs[..., 0], dtype=torch.bool)
        if is_batched(gate_inputs, weight_hh):
            outputs: Tensor = lstm_ops.lstm(gate_inputs, weight_hh, active)
            return outputs
        with_user_axis = (tensor.unsqueeze(0) for tensor in (gate_inputs, weight_hh, active))
        outputs = lstm_ops.stacked_lstm(*with_user_axis)[0].squeeze(0)
        return outputs

    def _step_by_step(
        self, values: Tensor, weight_ih: Tensor, weight_hh: Tensor, biases: Sequence[Tensor], *start: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        state, cell = start
        outputs = []
        for inputs in _products(values, weight_ih, *biases).unbind(0):
            gate_in, forget, candidate, gate_out = (inputs + state @ weight_hh.T).chunk(4, dim=-1)
            cell = forget.sigmoid() * cell + gate_in.sigmoid() * candidate.tanh()
            state = gate_out.sigmoid() * cell.tanh()
            outputs.append(state)
        return torch.stack(outputs), (state, cell)


class GRU(_Recurrent, nn.GRU):
    """`nn.GRU`; in a stack, one operation for all users a layer, or step by step from a state that is given."""

    def forward(self, inputs: Any, hx: Any = None) -> Any:
        """As `nn.GRU`; in a stack for one direction."""
        if self._torchs_own(inputs):
            return super().forward(inputs, hx)
        outputs, (states,) = self._run(inputs, None if hx is None else (hx,))
        return outputs, states

    def _recurrence(self, values: Tensor, weight_ih: Tensor, weight_hh: Tensor, biases: Sequence[Tensor]) -> Tensor:
        gate_inputs = _products(values, weight_ih, *biases[:1])
        bias = biases[1] if biases else torch.zeros_like(weight_hh[:, 0])
        if is_batched(gate_inputs, weight_hh):
            outputs: Tensor = gru_ops.gru(gate_inputs, weight_hh, bias)
            return outputs
        with_user_axis = (tensor.unsqueeze(0) for tensor in (gate_inputs, weight_hh, bias))
        outputs = gru_ops.stacked_gru(*with_user_axis)[0].squeeze(0)
        return outputs

    def _step_by_step(
        self, values: Tensor, weight_ih: Tensor, weight_hh: Tensor, biases: Sequence[Tensor], *start: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (state,) = start
        outputs = []
        for inputs in _products(values, weight_ih, *biases[:1]).unbind(0):
            of_inputs, of_state = inputs.chunk(3, dim=-1), _products(state, weight_hh, *biases[1:]).chunk(3, dim=-1)
            reset, update = (
                (mine + theirs).sigmoid() for mine, theirs in zip(of_inputs[:2], of_state[:2], strict=True)
            )
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
            return (
                shares if not drops else shares * 0 if self.dropout == 1 else shares * self.kept(shares, self.dropout)
            )

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
