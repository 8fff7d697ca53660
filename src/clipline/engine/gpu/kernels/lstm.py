"""The LSTM recurrence for a stack of users as a single operation, each user with their own weights.

It is a custom op ("clipline::...") so that `torch.func.vmap` and `torch.compile` treat it as one operation and do not
unroll it into thousands of small steps.

In bfloat16 `lstm.cu` keeps the weights on chip. Where it cannot serve, the kernels of Triton read them again in every
time step.

Plain twin: the loop over time in `stacked_lstm` and `_lstm_loop_backward`.
Switch: `FastParts.kernels`.
Held equal by: tests/engine/gpu/kernels/test_lstm.py (against a textbook recurrence; the GPU part needs a GPU).
Buys: shakespeare on an H200: 226 ms a round by the loop, 67 by Triton; so_nwp 162 by Triton, 117 with weights on chip
(benchmarks/results/README.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.precision import kernels_in_use
from ...core.vmap_axis import is_batched, product_of_rows, users_first
from . import lstm_cuda

try:
    from . import lstm_triton as triton_recurrence
except ImportError:  # Triton comes with torch for NVIDIA GPUs and is absent elsewhere
    triton_recurrence = None  # type: ignore[assignment]


def fused(tensor: Tensor) -> bool:
    """Whether there is a kernel for this device and type, and it is not switched off."""
    return (
        kernels_in_use()
        and tensor.device.type == "cuda"
        and tensor.dtype != torch.float64
        and triton_recurrence is not None
    )


def units_on_chip(gate_inputs: Tensor) -> int:
    """How many units' weights a block of GPU threads keeps on chip in `lstm.cu`; 0 where Triton's kernels serve."""
    if gate_inputs.dtype != torch.bfloat16:
        return 0
    return lstm_cuda.units_on_chip(gate_inputs.shape[3] // 4, gate_inputs.shape[2], gate_inputs.device)


@torch.library.custom_op("clipline::stacked_lstm", mutates_args=())
def stacked_lstm(gate_inputs: Tensor, weight: Tensor, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(users, time, batch, 4 hidden) by (users, 4 hidden, hidden) -> outputs, activated gates, cells.

    `gate_inputs` is x W_ih + b. Where `active` (users, time, batch) is false the state is held, as for masked steps.
    Computed in the type of `gate_inputs`.
    """
    if fused(gate_inputs):
        if units := units_on_chip(gate_inputs):
            return lstm_cuda.lstm_forward(gate_inputs, weight, active, units)
        exact = not torch.backends.cuda.matmul.allow_tf32
        return triton_recurrence.lstm_forward(gate_inputs, weight, active, exact)
    users, time, batch, width = gate_inputs.shape
    hidden = width // 4
    outputs, gates = gate_inputs.new_empty(users, time, batch, hidden), torch.empty_like(gate_inputs)
    cells = torch.empty_like(outputs, dtype=_wide(gate_inputs))
    weight_t = weight.to(gate_inputs.dtype).transpose(1, 2).contiguous()
    state = gate_inputs.new_zeros(users, batch, hidden)
    cell = torch.zeros_like(state, dtype=cells.dtype)
    for t in range(time):
        sums, is_active = torch.baddbmm(gate_inputs[:, t], state, weight_t), active[:, t].unsqueeze(2)
        *of_sigmoid, candidate = (sums[..., part * hidden : (part + 1) * hidden] for part in (0, 1, 3, 2))
        (gate_in, forget, gate_out), candidate = (one.sigmoid() for one in of_sigmoid), candidate.tanh()
        torch.cat([gate_in, forget, candidate, gate_out], dim=2, out=gates[:, t])
        new_cell = forget * cell + gate_in * candidate
        outputs[:, t] = torch.where(is_active, gate_out * new_cell.tanh(), state)
        cells[:, t] = torch.where(is_active, new_cell, cell)
        cell, state = cells[:, t], outputs[:, t]
    return outputs, gates, cells


@stacked_lstm.register_fake
def _(gate_inputs: Tensor, weight: Tensor, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    outputs = gate_inputs.new_empty(*gate_inputs.shape[:3], gate_inputs.shape[3] // 4)
    return outputs, gate_inputs.new_empty(gate_inputs.shape), torch.empty_like(outputs, dtype=_wide(gate_inputs))


@torch.library.custom_op("clipline::stacked_lstm_backward", mutates_args=())
def stacked_lstm_backward(
    grad: Tensor, outputs: Tensor, gates: Tensor, cells: Tensor, weight: Tensor, active: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to `gate_inputs` and the weights."""
    if fused(grad):
        if units := units_on_chip(gates):
            grad_gate_inputs = lstm_cuda.lstm_backward(grad.to(gates.dtype), gates, cells, weight, active, units)
        else:
            exact = not torch.backends.cuda.matmul.allow_tf32
            grad_gate_inputs = triton_recurrence.lstm_backward(
                grad.to(gates.dtype), outputs, gates, cells, weight, active, exact
            )
    else:
        grad_gate_inputs = _lstm_loop_backward(grad, outputs, gates, cells, weight, active)
    previous = torch.zeros_like(outputs)
    previous[:, 1:] = outputs[:, :-1]
    grad_weight = product_of_rows(grad_gate_inputs.flatten(1, 2), previous.flatten(1, 2))
    return grad_gate_inputs, grad_weight.to(weight.dtype)


@stacked_lstm_backward.register_fake
def _(
    grad: Tensor, outputs: Tensor, gates: Tensor, cells: Tensor, weight: Tensor, active: Tensor
) -> tuple[Tensor, Tensor]:
    return gates.new_empty(gates.shape), weight.new_empty(weight.shape)


def _lstm_loop_backward(
    grad: Tensor, outputs: Tensor, gates: Tensor, cells: Tensor, weight: Tensor, active: Tensor
) -> Tensor:
    grad_gate_inputs, weight = torch.empty_like(gates), weight.to(gates.dtype)
    grad_state, grad_cell = torch.zeros_like(outputs[:, 0]), torch.zeros_like(cells[:, 0])
    for t in reversed(range(outputs.shape[1])):
        before = cells[:, t - 1] if t > 0 else torch.zeros_like(cells[:, 0])
        gate_in, forget, candidate, gate_out = gates[:, t].chunk(4, dim=2)
        is_active, tanh_cell = active[:, t].unsqueeze(2), cells[:, t].tanh()
        grad_out = grad[:, t] + grad_state
        total = grad_cell + grad_out * gate_out * (1 - tanh_cell.square())
        parts = (
            total * candidate * gate_in * (1 - gate_in),
            total * before * forget * (1 - forget),
            total * gate_in * (1 - candidate.square()),
            grad_out * tanh_cell * gate_out * (1 - gate_out),
        )
        grad_gate_inputs[:, t] = torch.cat(parts, dim=2) * is_active
        grad_cell = torch.where(is_active, total * forget, grad_cell)
        # A held state passes its gradient straight to the state before, not through the weights.
        held = (grad_out * ~is_active).to(outputs.dtype)
        grad_state = torch.baddbmm(held, grad_gate_inputs[:, t], weight)
    return grad_gate_inputs


def _lstm_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, weight, active = inputs
    ctx.save_for_backward(*output, weight, active)
    ctx.set_materialize_grads(False)


def _lstm_backward(ctx, grad, _gates, _cells):  # type: ignore[no-untyped-def]
    outputs, gates, cells, weight, active = ctx.saved_tensors
    grad_gate_inputs, grad_weight = stacked_lstm_backward(grad.contiguous(), outputs, gates, cells, weight, active)
    return grad_gate_inputs, grad_weight, None


stacked_lstm.register_autograd(_lstm_backward, setup_context=_lstm_setup)


@torch.library.custom_op("clipline::lstm", mutates_args=())
def lstm(gate_inputs: Tensor, weight: Tensor, active: Tensor) -> Tensor:
    """One user's recurrence over (time, batch, 4 hidden); under vmap, `stacked_lstm`."""
    outputs: Tensor = stacked_lstm(gate_inputs.unsqueeze(0), weight.unsqueeze(0), active.unsqueeze(0))[0]
    return outputs.squeeze(0)


def recurrence(gate_inputs: Tensor, weight: Tensor, active: Tensor) -> Tensor:
    """(time, batch, 4 hidden) -> (time, batch, hidden), of users under vmap, or of one by the code of a stack."""
    given, batched = (gate_inputs, weight, active), is_batched(gate_inputs, weight)
    outputs: Tensor = lstm(*given) if batched else stacked_lstm(*(one.unsqueeze(0) for one in given))[0].squeeze(0)
    return outputs


@lstm.register_fake
def _(gate_inputs: Tensor, weight: Tensor, active: Tensor) -> Tensor:
    return gate_inputs.new_empty(*gate_inputs.shape[:2], gate_inputs.shape[2] // 4)


@lstm.register_vmap
def _(info, in_dims, gate_inputs, weight, active):  # type: ignore[no-untyped-def]
    arguments = (
        users_first(info, dim, tensor) for dim, tensor in zip(in_dims, (gate_inputs, weight, active), strict=True)
    )
    gate_inputs, weight, active = (tensor.contiguous() for tensor in arguments)
    return stacked_lstm(gate_inputs, weight, active)[0], 0


def _wide(tensor: Tensor) -> torch.dtype:
    """The type in which the cell state is accumulated."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
