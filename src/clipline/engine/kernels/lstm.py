"""Long short-term memory for a stack of users as a single operation, each user with weights of their own.

Written as an operation of its own ("clipline::...") so that `torch.func.vmap` and `torch.compile` take it whole: it is
not unrolled into thousands of small steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..stacked.stacks import users_first

try:
    from . import lstm_triton as triton_recurrence
except ImportError:  # Triton comes with torch for NVIDIA GPUs and is absent elsewhere
    triton_recurrence = None  # type: ignore[assignment]


def fused(tensor: Tensor) -> bool:
    """Whether there is a kernel for this device and type."""
    return tensor.device.type == "cuda" and tensor.dtype != torch.float64 and triton_recurrence is not None


@torch.library.custom_op("clipline::stacked_lstm", mutates_args=())
def stacked_lstm(driven: Tensor, weight: Tensor, awake: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(users, time, batch, 4 hidden) by (users, 4 hidden, hidden) -> outputs, gates after their curves, cells.

    `awake` (users, time, batch) is false where the state is held. It computes in the type of `driven`.
    """
    if fused(driven):
        exact = not torch.backends.cuda.matmul.allow_tf32
        return triton_recurrence.lstm_forward(driven, weight, awake, exact)
    users, time, batch, width = driven.shape
    hidden = width // 4
    outputs, gates = driven.new_empty(users, time, batch, hidden), torch.empty_like(driven)
    cells = torch.empty_like(outputs, dtype=_wide(driven))
    turned = weight.to(driven.dtype).transpose(1, 2).contiguous()
    state = driven.new_zeros(users, batch, hidden)
    cell = torch.zeros_like(state, dtype=cells.dtype)
    for t in range(time):
        sums = torch.baddbmm(driven[:, t], state, turned)
        lstm_step(sums, cell, state, awake[:, t], gates[:, t], cells[:, t], outputs[:, t])
        cell, state = cells[:, t], outputs[:, t]
    return outputs, gates, cells


@stacked_lstm.register_fake
def _(driven: Tensor, weight: Tensor, awake: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    outputs = driven.new_empty(*driven.shape[:3], driven.shape[3] // 4)
    return outputs, driven.new_empty(driven.shape), torch.empty_like(outputs, dtype=_wide(driven))


@torch.library.custom_op("clipline::stacked_lstm_backward", mutates_args=())
def stacked_lstm_backward(
    grad: Tensor, outputs: Tensor, gates: Tensor, cells: Tensor, weight: Tensor, awake: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients with respect to `driven` and the weights."""
    if fused(grad):
        exact = not torch.backends.cuda.matmul.allow_tf32
        of_driven = triton_recurrence.lstm_backward(grad.to(gates.dtype), outputs, gates, cells, weight, awake, exact)
    else:
        of_driven = _lstm_loop_backward(grad, outputs, gates, cells, weight, awake)
    earlier = torch.cat([torch.zeros_like(outputs[:, :1]), outputs[:, :-1]], dim=1)
    of_weight = torch.bmm(of_driven.flatten(1, 2).transpose(1, 2), earlier.flatten(1, 2))
    return of_driven, of_weight.to(weight.dtype)


@stacked_lstm_backward.register_fake
def _(
    grad: Tensor, outputs: Tensor, gates: Tensor, cells: Tensor, weight: Tensor, awake: Tensor
) -> tuple[Tensor, Tensor]:
    return gates.new_empty(gates.shape), weight.new_empty(weight.shape)


def _lstm_loop_backward(
    grad: Tensor, outputs: Tensor, gates: Tensor, cells: Tensor, weight: Tensor, awake: Tensor
) -> Tensor:
    of_driven, weight = torch.empty_like(gates), weight.to(gates.dtype)
    zeros = torch.zeros_like(outputs[:, 0])
    no_cell = torch.zeros_like(cells[:, 0])
    of_state, of_cell = zeros, no_cell.clone()
    for t in reversed(range(outputs.shape[1])):
        before = cells[:, t - 1] if t > 0 else no_cell
        carried = torch.empty_like(zeros)
        lstm_step_backward(
            grad[:, t], of_state, of_cell, gates[:, t], cells[:, t], before, awake[:, t], of_driven[:, t], carried
        )
        of_state = torch.baddbmm(carried, of_driven[:, t], weight)
    return of_driven


def _lstm_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, weight, awake = inputs
    ctx.save_for_backward(*output, weight, awake)
    ctx.set_materialize_grads(False)


def _lstm_backward(ctx, grad, _gates, _cells):  # type: ignore[no-untyped-def]
    outputs, gates, cells, weight, awake = ctx.saved_tensors
    of_driven, of_weight = stacked_lstm_backward(grad.contiguous(), outputs, gates, cells, weight, awake)
    return of_driven, of_weight, None


stacked_lstm.register_autograd(_lstm_backward, setup_context=_lstm_setup)


@torch.library.custom_op("clipline::lstm", mutates_args=())
def lstm(driven: Tensor, weight: Tensor, awake: Tensor) -> Tensor:
    """One user's recurrence over (time, batch, 4 hidden); in a stack, `stacked_lstm`."""
    outputs: Tensor = stacked_lstm(driven.unsqueeze(0), weight.unsqueeze(0), awake.unsqueeze(0))[0]
    return outputs.squeeze(0)


@lstm.register_fake
def _(driven: Tensor, weight: Tensor, awake: Tensor) -> Tensor:
    return driven.new_empty(*driven.shape[:2], driven.shape[2] // 4)


@lstm.register_vmap
def _(info, in_dims, driven, weight, awake):  # type: ignore[no-untyped-def]
    arguments = (users_first(info, dim, tensor) for dim, tensor in zip(in_dims, (driven, weight, awake), strict=True))
    driven, weight, awake = (tensor.contiguous() for tensor in arguments)
    return stacked_lstm(driven, weight, awake)[0], 0


def lstm_step(
    sums: Tensor, cell: Tensor, state: Tensor, awake: Tensor, gates: Tensor, next_cell: Tensor, next_state: Tensor
) -> None:
    """From (users, batch, 4 hidden) sums to the gates, the next cell and the next state, all written in place."""
    enter, keep, candidate, leave = sums.chunk(4, dim=2)
    enter, keep, candidate, leave = enter.sigmoid(), keep.sigmoid(), candidate.tanh(), leave.sigmoid()
    torch.cat([enter, keep, candidate, leave], dim=2, out=gates)
    on = awake.unsqueeze(2)
    new_cell = keep * cell + enter * candidate
    next_state.copy_(torch.where(on, leave * new_cell.tanh(), state))
    next_cell.copy_(torch.where(on, new_cell, cell))


def lstm_step_backward(
    grad: Tensor,
    of_state: Tensor,
    of_cell: Tensor,
    gates: Tensor,
    cell: Tensor,
    before: Tensor,
    awake: Tensor,
    of_sums: Tensor,
    carried: Tensor,
) -> None:
    """Back through one time step: `of_cell` becomes that of the cell before, `of_sums` and `carried` are written.

    `carried` is what a state that was held hands on to the one before, beside the way through the weights.
    """
    enter, keep, candidate, leave = gates.chunk(4, dim=2)
    on = awake.unsqueeze(2)
    of_out, curve = grad + of_state, cell.tanh()
    total = of_cell + of_out * leave * (1 - curve.square())
    parts = (
        total * candidate * enter * (1 - enter),
        total * before * keep * (1 - keep),
        total * enter * (1 - candidate.square()),
        of_out * curve * leave * (1 - leave),
    )
    of_sums.copy_(torch.cat(parts, dim=2) * on)
    carried.copy_(of_out * ~on)
    of_cell.copy_(torch.where(on, total * keep, of_cell))


def _wide(tensor: Tensor) -> torch.dtype:
    """The type of sums over time."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
