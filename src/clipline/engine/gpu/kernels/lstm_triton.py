"""Triton kernels of `lstm.py`: one launch for the whole recurrence; each program loops over time for one user.

Plain twin, switch, test and what it buys: see `lstm.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: ignore-errors


def _dot_precision(tensor: Tensor, exact: bool) -> str:
    """`input_precision` of `tl.dot`: matters for float32 only."""
    return "ieee" if exact and tensor.dtype == torch.float32 else "tf32"


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(users, 4 hidden, hidden) -> (users, 4, padded, padded): padded to multiples of 16, for aligned loads."""
    users, _, hidden = weight.shape
    side = triton.cdiv(hidden, 16) * 16
    padded = torch.zeros(users, 4, side, side, dtype=dtype, device=weight.device)
    padded[:, :, :hidden, :hidden] = weight.view(users, 4, hidden, hidden)
    return padded


def _tile_shape(tensor: Tensor, height: int, depth: int) -> tuple[int, int]:
    """Tile shape of the weights: halved for types wider than bfloat16, to fit into shared memory."""
    return (height, depth) if tensor.dtype == torch.bfloat16 else (height // 2, depth // 2)


def lstm_forward(gate_inputs: Tensor, weight: Tensor, active: Tensor, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Forward pass in one launch: outputs, activated gates, cells."""
    gate_inputs, active = gate_inputs.contiguous(), active.contiguous()  # the kernels assume it
    users, time, batch, width = gate_inputs.shape
    hidden = width // 4
    outputs, gates = gate_inputs.new_empty(users, time, batch, hidden), torch.empty_like(gate_inputs)
    cells = torch.empty_like(outputs, dtype=torch.float32)
    padded = _padded(weight, gate_inputs.dtype)
    _lstm_forward[(users, triton.cdiv(batch, 16))](
        gate_inputs, padded, active, outputs, gates, cells, time, batch, hidden, padded.shape[2],
        16, *_tile_shape(gate_inputs, 128, 64), _dot_precision(gate_inputs, exact), num_warps=8, num_stages=2,
    )  # fmt: skip
    return outputs, gates, cells


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _lstm_forward(
    gate_inputs, weight, active, outputs, gates, cells, time, batch,
    HIDDEN: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    valid = row < batch
    weights = weight + user * 4 * PADDED * PADDED
    kind = outputs.dtype.element_ty
    for t in range(time):
        here = (user * time + t) * batch + row  # (rows,) of (users, time, batch)
        before = here - batch
        is_active = tl.load(active + here, mask=valid, other=0) != 0
        for h0 in range(0, HIDDEN, BLOCK_H):
            h = h0 + tl.arange(0, BLOCK_H)
            inside = valid[:, None] & (h < HIDDEN)[None, :]
            first = here[:, None] * 4 * HIDDEN + h[None, :]
            gate_in = tl.load(gate_inputs + first, mask=inside, other=0.0).to(tl.float32)
            gate_forget = tl.load(gate_inputs + first + HIDDEN, mask=inside, other=0.0).to(tl.float32)
            candidate = tl.load(gate_inputs + first + 2 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
            gate_out = tl.load(gate_inputs + first + 3 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
            old_cell = tl.zeros((ROWS, BLOCK_H), tl.float32)
            old_state = tl.zeros((ROWS, BLOCK_H), tl.float32)
            if t > 0:
                old_cell = tl.load(cells + before[:, None] * HIDDEN + h[None, :], mask=inside, other=0.0)
                old_state = tl.load(outputs + before[:, None] * HIDDEN + h[None, :], mask=inside, other=0.0).to(
                    tl.float32
                )
                for k0 in range(0, HIDDEN, BLOCK_K):
                    k = k0 + tl.arange(0, BLOCK_K)
                    a = tl.load(
                        outputs + before[:, None] * HIDDEN + k[None, :],
                        mask=valid[:, None] & (k < HIDDEN)[None, :], other=0.0,
                    )  # fmt: skip
                    known = (k < HIDDEN)[:, None] & (h < HIDDEN)[None, :]
                    w = weights + h[None, :] * PADDED + k[:, None]
                    step = PADDED * PADDED
                    gate_in = tl.dot(a, tl.load(w, mask=known, other=0.0), gate_in, input_precision=PRECISION)
                    gate_forget = tl.dot(
                        a, tl.load(w + step, mask=known, other=0.0), gate_forget, input_precision=PRECISION
                    )
                    candidate = tl.dot(
                        a, tl.load(w + 2 * step, mask=known, other=0.0), candidate, input_precision=PRECISION
                    )
                    gate_out = tl.dot(
                        a, tl.load(w + 3 * step, mask=known, other=0.0), gate_out, input_precision=PRECISION
                    )
            gate_in, gate_forget, gate_out = tl.sigmoid(gate_in), tl.sigmoid(gate_forget), tl.sigmoid(gate_out)
            candidate = _tanh(candidate)
            new_cell = gate_forget * old_cell + gate_in * candidate
            new_state = gate_out * _tanh(new_cell)
            tl.store(gates + first, gate_in.to(kind), mask=inside)
            tl.store(gates + first + HIDDEN, gate_forget.to(kind), mask=inside)
            tl.store(gates + first + 2 * HIDDEN, candidate.to(kind), mask=inside)
            tl.store(gates + first + 3 * HIDDEN, gate_out.to(kind), mask=inside)
            where = here[:, None] * HIDDEN + h[None, :]
            tl.store(cells + where, tl.where(is_active[:, None], new_cell, old_cell), mask=inside)
            tl.store(outputs + where, tl.where(is_active[:, None], new_state, old_state).to(kind), mask=inside)
        tl.debug_barrier()  # all threads of the program read in the next step what this one wrote


def lstm_backward(
    grad: Tensor, outputs: Tensor, gates: Tensor, cells: Tensor, weight: Tensor, active: Tensor, exact: bool
) -> Tensor:
    """Backward pass in one launch: the gradient with respect to `gate_inputs`."""
    grad, outputs, gates, cells, active = (tensor.contiguous() for tensor in (grad, outputs, gates, cells, active))
    users, time, batch, hidden = outputs.shape
    grad_gate_inputs = torch.empty_like(gates)
    grad_state = torch.zeros(users, batch, hidden, dtype=torch.float32, device=grad.device)
    grad_cell = torch.zeros_like(grad_state)
    padded = _padded(weight, gates.dtype)
    _lstm_backward[(users, triton.cdiv(batch, 16))](
        grad, gates, cells, padded, active, grad_gate_inputs, grad_state, grad_cell, time, batch,
        hidden, padded.shape[2], 16, *_tile_shape(grad, 128, 128), _dot_precision(grad, exact),
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return grad_gate_inputs


@triton.jit
def _lstm_backward(
    grad, gates, cells, weight, active, grad_gate_inputs, grad_state, grad_cell, time, batch,
    HIDDEN: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    valid = row < batch
    weights = weight + user * 4 * PADDED * PADDED
    own_rows = (user * batch + row)[:, None] * HIDDEN
    kind = grad_gate_inputs.dtype.element_ty
    for back in range(time):
        t = time - 1 - back
        here = (user * time + t) * batch + row
        is_active = (tl.load(active + here, mask=valid, other=0) != 0)[:, None]
        for h0 in range(0, HIDDEN, BLOCK_H):
            h = h0 + tl.arange(0, BLOCK_H)
            inside = valid[:, None] & (h < HIDDEN)[None, :]
            first = here[:, None] * 4 * HIDDEN + h[None, :]
            where = here[:, None] * HIDDEN + h[None, :]
            gate_in = tl.load(gates + first, mask=inside, other=0.0).to(tl.float32)
            gate_forget = tl.load(gates + first + HIDDEN, mask=inside, other=0.0).to(tl.float32)
            candidate = tl.load(gates + first + 2 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
            gate_out = tl.load(gates + first + 3 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
            grad_c = tl.load(grad_cell + own_rows + h[None, :], mask=inside, other=0.0)
            grad_out = tl.load(grad_state + own_rows + h[None, :], mask=inside, other=0.0)
            grad_out += tl.load(grad + where, mask=inside, other=0.0).to(tl.float32)
            old = tl.zeros((ROWS, BLOCK_H), tl.float32)
            if t > 0:
                old = tl.load(cells + where - batch * HIDDEN, mask=inside, other=0.0)
            tanh_cell = _tanh(tl.load(cells + where, mask=inside, other=0.0))
            total = grad_c + grad_out * gate_out * (1 - tanh_cell * tanh_cell)
            base = grad_gate_inputs + first
            tl.store(base, tl.where(is_active, total * candidate * gate_in * (1 - gate_in), 0.0).to(kind), mask=inside)
            tl.store(
                base + HIDDEN,
                tl.where(is_active, total * old * gate_forget * (1 - gate_forget), 0.0).to(kind),
                mask=inside,
            )
            tl.store(
                base + 2 * HIDDEN,
                tl.where(is_active, total * gate_in * (1 - candidate * candidate), 0.0).to(kind),
                mask=inside,
            )
            tl.store(
                base + 3 * HIDDEN,
                tl.where(is_active, grad_out * tanh_cell * gate_out * (1 - gate_out), 0.0).to(kind),
                mask=inside,
            )
            tl.store(grad_cell + own_rows + h[None, :], tl.where(is_active, total * gate_forget, grad_c), mask=inside)
            tl.store(grad_state + own_rows + h[None, :], tl.where(is_active, 0.0, grad_out), mask=inside)
        tl.debug_barrier()
        for h0 in range(0, HIDDEN, BLOCK_H):
            h = h0 + tl.arange(0, BLOCK_H)
            inside = valid[:, None] & (h < HIDDEN)[None, :]
            total = tl.load(grad_state + own_rows + h[None, :], mask=inside, other=0.0)
            for k0 in range(0, 4 * PADDED, BLOCK_K):
                k = k0 + tl.arange(0, BLOCK_K)
                gate, unit = k // PADDED, k % PADDED
                known = (gate < 4) & (unit < HIDDEN)
                a = tl.load(
                    grad_gate_inputs + here[:, None] * 4 * HIDDEN + (gate * HIDDEN + unit)[None, :],
                    mask=valid[:, None] & known[None, :], other=0.0,
                )  # fmt: skip
                known = (gate < 4)[:, None] & (h < PADDED)[None, :]
                b = tl.load(weights + k[:, None] * PADDED + h[None, :], mask=known, other=0.0)
                total = tl.dot(a, b, total, input_precision=PRECISION)
            tl.store(grad_state + own_rows + h[None, :], total, mask=inside)
        tl.debug_barrier()
