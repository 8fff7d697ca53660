"""The GRU recurrence for a stack of users as a single operation, each user with their own weights.

A custom op ("clipline::...") for the same reason as the LSTM's: `torch.func.vmap` has no rule for torch's recurrence,
and unrolled by the compiler it would be thousands of small steps.

Plain twin: `nn.GRU`, which also runs where users train one by one.
Switch: `engine="one-by-one"`.
Held equal by: tests/engine/gpu/kernels/test_gru.py and tests/engine/stacked/test_sequence_layers.py.
Buys: 349 ms a round one by one, 42 stacked (50 users, 16 wide, 20 steps, one core; docs/explanation/engine.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.vmap_axis import product_of_rows, users_first


@torch.library.custom_op("clipline::stacked_gru", mutates_args=())
def stacked_gru(gate_inputs: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(users, time, batch, 3 hidden) by (users, 3 hidden, hidden) and (users, 3 hidden) -> outputs, activated gates.

    `gate_inputs` is x W_ih + b_ih; gates are reset, update, candidate as in `nn.GRU`. State starts at zero. The gates
    that are given out have (users, time, batch, 4 hidden): reset, update, candidate, and what the state adds to the
    candidate before it is reset.
    """
    users, time, batch, width = gate_inputs.shape
    hidden = width // 3
    outputs = gate_inputs.new_empty(users, time, batch, hidden)
    gates = gate_inputs.new_empty(users, time, batch, 4 * hidden)
    weight_t = weight.to(gate_inputs.dtype).transpose(1, 2).contiguous()
    bias = bias.to(gate_inputs.dtype).unsqueeze(1)
    state = gate_inputs.new_zeros(users, batch, hidden)
    for t in range(time):
        inputs, sums = gate_inputs[:, t], torch.baddbmm(bias, state, weight_t)
        both = (inputs[..., : 2 * hidden] + sums[..., : 2 * hidden]).chunk(2, dim=2)
        reset, update = (gate.sigmoid() for gate in both)  # in rows of `hidden`: rounded alike, however many users
        added = sums[..., 2 * hidden :]
        candidate = (inputs[..., 2 * hidden :] + reset * added).tanh()
        torch.cat([reset, update, candidate, added], dim=2, out=gates[:, t])
        outputs[:, t] = candidate + update * (state - candidate)
        state = outputs[:, t]
    return outputs, gates


@stacked_gru.register_fake
def _(gate_inputs: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    *axes, width = gate_inputs.shape
    return gate_inputs.new_empty(*axes, width // 3), gate_inputs.new_empty(*axes, 4 * (width // 3))


@torch.library.custom_op("clipline::stacked_gru_backward", mutates_args=())
def stacked_gru_backward(grad: Tensor, outputs: Tensor, gates: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to `gate_inputs`, the weights and the bias."""
    users, time, batch, hidden = outputs.shape
    grad_inputs = outputs.new_empty(users, time, batch, 3 * hidden)
    grad_sums = torch.empty_like(grad_inputs)
    wide = weight.to(outputs.dtype)
    start = torch.zeros_like(outputs[:, 0])
    grad_state = start
    for t in reversed(range(time)):
        reset, update, candidate, added = gates[:, t].chunk(4, dim=2)
        before = outputs[:, t - 1] if t > 0 else start
        total = grad[:, t] + grad_state
        of_candidate = total * (1 - update) * (1 - candidate.square())
        of_reset = of_candidate * added * reset * (1 - reset)
        of_update = total * (before - candidate) * update * (1 - update)
        torch.cat([of_reset, of_update, of_candidate], dim=2, out=grad_inputs[:, t])
        torch.cat([of_reset, of_update, of_candidate * reset], dim=2, out=grad_sums[:, t])
        grad_state = torch.baddbmm(total * update, grad_sums[:, t], wide)
    previous = torch.cat([start.unsqueeze(1), outputs[:, :-1]], dim=1)
    flat = grad_sums.flatten(1, 2)
    grad_weight = product_of_rows(flat, previous.flatten(1, 2)).contiguous()
    return grad_inputs, grad_weight.to(weight.dtype), flat.sum(dim=1).to(weight.dtype)


@stacked_gru_backward.register_fake
def _(grad: Tensor, outputs: Tensor, gates: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    *axes, hidden = outputs.shape
    return outputs.new_empty(*axes, 3 * hidden), weight.new_empty(weight.shape), weight.new_empty(weight.shape[:2])


def _gru_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*output, inputs[1])
    ctx.set_materialize_grads(False)


def _gru_backward(ctx, grad, _gates):  # type: ignore[no-untyped-def]
    outputs, gates, weight = ctx.saved_tensors
    return stacked_gru_backward(grad.contiguous(), outputs, gates, weight)


stacked_gru.register_autograd(_gru_backward, setup_context=_gru_setup)


@torch.library.custom_op("clipline::gru", mutates_args=())
def gru(gate_inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One user's recurrence over (time, batch, 3 hidden); under vmap, `stacked_gru`."""
    outputs: Tensor = stacked_gru(gate_inputs.unsqueeze(0), weight.unsqueeze(0), bias.unsqueeze(0))[0]
    return outputs.squeeze(0)


@gru.register_fake
def _(gate_inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return gate_inputs.new_empty(*gate_inputs.shape[:2], gate_inputs.shape[2] // 3)


@gru.register_vmap
def _(info, in_dims, gate_inputs, weight, bias):  # type: ignore[no-untyped-def]
    arguments = (
        users_first(info, dim, tensor) for dim, tensor in zip(in_dims, (gate_inputs, weight, bias), strict=True)
    )
    gate_inputs, weight, bias = (tensor.contiguous() for tensor in arguments)
    return stacked_gru(gate_inputs, weight, bias)[0], 0
