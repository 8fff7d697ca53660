"""The kernels of `recurrence.py` for NVIDIA GPUs: a program for each user goes through all of time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: ignore-errors


def _kind(tensor: Tensor, exact: bool) -> str:
    """How a product of float32 is computed; other types have only one way."""
    return "ieee" if exact and tensor.dtype == torch.float32 else "tf32"


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(users, 4 hidden, hidden) -> (users, 4, padded, padded): rows that start where wide loads can."""
    users, _, hidden = weight.shape
    side = triton.cdiv(hidden, 16) * 16
    padded = torch.zeros(users, 4, side, side, dtype=dtype, device=weight.device)
    padded[:, :, :hidden, :hidden] = weight.view(users, 4, hidden, hidden)
    return padded


def _tiles(tensor: Tensor, high: int, deep: int) -> tuple[int, int]:
    """Sides of a tile of weights: half as deep for numbers twice as wide, as both must fit beside a processor."""
    return (high, deep) if tensor.dtype == torch.bfloat16 else (high // 2, deep // 2)


def lstm_forward(driven: Tensor, weight: Tensor, awake: Tensor, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The whole recurrence in one launch, a program for each user: outputs, gates after their curves, cells."""
    driven, awake = driven.contiguous(), awake.contiguous()  # the kernel counts on it
    users, time, batch, width = driven.shape
    hidden = width // 4
    outputs, gates = driven.new_empty(users, time, batch, hidden), torch.empty_like(driven)
    cells = torch.empty_like(outputs, dtype=torch.float32)
    padded = _padded(weight, driven.dtype)
    _lstm_forward[(users, triton.cdiv(batch, 16))](
        driven, padded, awake, outputs, gates, cells, time, batch, hidden, padded.shape[2],
        16, *_tiles(driven, 128, 64), _kind(driven, exact), num_warps=8, num_stages=2,
    )  # fmt: skip
    return outputs, gates, cells


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _lstm_forward(
    driven, weight, awake, outputs, gates, cells, time, batch,
    HIDDEN: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = row < batch
    weights = weight + user * 4 * PADDED * PADDED
    kind = outputs.dtype.element_ty
    for t in range(time):
        here = (user * time + t) * batch + row  # (rows,) of (users, time, batch)
        before = here - batch
        on = tl.load(awake + here, mask=real, other=0) != 0
        for h0 in range(0, HIDDEN, BLOCK_H):
            h = h0 + tl.arange(0, BLOCK_H)
            inside = real[:, None] & (h < HIDDEN)[None, :]
            first = here[:, None] * 4 * HIDDEN + h[None, :]
            enter = tl.load(driven + first, mask=inside, other=0.0).to(tl.float32)
            keep = tl.load(driven + first + HIDDEN, mask=inside, other=0.0).to(tl.float32)
            candidate = tl.load(driven + first + 2 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
            leave = tl.load(driven + first + 3 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
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
                        mask=real[:, None] & (k < HIDDEN)[None, :], other=0.0,
                    )  # fmt: skip
                    known = (k < HIDDEN)[:, None] & (h < HIDDEN)[None, :]
                    w = weights + h[None, :] * PADDED + k[:, None]
                    step = PADDED * PADDED
                    enter = tl.dot(a, tl.load(w, mask=known, other=0.0), enter, input_precision=KIND)
                    keep = tl.dot(a, tl.load(w + step, mask=known, other=0.0), keep, input_precision=KIND)
                    candidate = tl.dot(a, tl.load(w + 2 * step, mask=known, other=0.0), candidate, input_precision=KIND)
                    leave = tl.dot(a, tl.load(w + 3 * step, mask=known, other=0.0), leave, input_precision=KIND)
            enter, keep, leave = tl.sigmoid(enter), tl.sigmoid(keep), tl.sigmoid(leave)
            candidate = _tanh(candidate)
            new_cell = keep * old_cell + enter * candidate
            new_state = leave * _tanh(new_cell)
            tl.store(gates + first, enter.to(kind), mask=inside)
            tl.store(gates + first + HIDDEN, keep.to(kind), mask=inside)
            tl.store(gates + first + 2 * HIDDEN, candidate.to(kind), mask=inside)
            tl.store(gates + first + 3 * HIDDEN, leave.to(kind), mask=inside)
            where = here[:, None] * HIDDEN + h[None, :]
            tl.store(cells + where, tl.where(on[:, None], new_cell, old_cell), mask=inside)
            tl.store(outputs + where, tl.where(on[:, None], new_state, old_state).to(kind), mask=inside)
        tl.debug_barrier()  # what this step wrote is read by all threads in the next


def lstm_backward(
    grad: Tensor, outputs: Tensor, gates: Tensor, cells: Tensor, weight: Tensor, awake: Tensor, exact: bool
) -> Tensor:
    """The gradient with respect to what drives the gates, in one launch."""
    grad, outputs, gates, cells, awake = (tensor.contiguous() for tensor in (grad, outputs, gates, cells, awake))
    users, time, batch, hidden = outputs.shape
    of_driven = torch.empty_like(gates)
    of_state = torch.zeros(users, batch, hidden, dtype=torch.float32, device=grad.device)
    of_cell = torch.zeros_like(of_state)
    padded = _padded(weight, gates.dtype)
    _lstm_backward[(users, triton.cdiv(batch, 16))](
        grad, gates, cells, padded, awake, of_driven, of_state, of_cell, time, batch, hidden, padded.shape[2],
        16, *_tiles(grad, 128, 128), _kind(grad, exact), num_warps=8, num_stages=2,
    )  # fmt: skip
    return of_driven


@triton.jit
def _lstm_backward(
    grad, gates, cells, weight, awake, of_driven, of_state, of_cell, time, batch,
    HIDDEN: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = row < batch
    weights = weight + user * 4 * PADDED * PADDED
    mine = (user * batch + row)[:, None] * HIDDEN
    kind = of_driven.dtype.element_ty
    for back in range(time):
        t = time - 1 - back
        here = (user * time + t) * batch + row
        on = (tl.load(awake + here, mask=real, other=0) != 0)[:, None]
        for h0 in range(0, HIDDEN, BLOCK_H):
            h = h0 + tl.arange(0, BLOCK_H)
            inside = real[:, None] & (h < HIDDEN)[None, :]
            first = here[:, None] * 4 * HIDDEN + h[None, :]
            where = here[:, None] * HIDDEN + h[None, :]
            enter = tl.load(gates + first, mask=inside, other=0.0).to(tl.float32)
            keep = tl.load(gates + first + HIDDEN, mask=inside, other=0.0).to(tl.float32)
            candidate = tl.load(gates + first + 2 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
            leave = tl.load(gates + first + 3 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
            of_c = tl.load(of_cell + mine + h[None, :], mask=inside, other=0.0)
            of_out = tl.load(of_state + mine + h[None, :], mask=inside, other=0.0)
            of_out += tl.load(grad + where, mask=inside, other=0.0).to(tl.float32)
            old = tl.zeros((ROWS, BLOCK_H), tl.float32)
            if t > 0:
                old = tl.load(cells + where - batch * HIDDEN, mask=inside, other=0.0)
            curve = _tanh(tl.load(cells + where, mask=inside, other=0.0))
            total = of_c + of_out * leave * (1 - curve * curve)
            base = of_driven + first
            tl.store(base, tl.where(on, total * candidate * enter * (1 - enter), 0.0).to(kind), mask=inside)
            tl.store(base + HIDDEN, tl.where(on, total * old * keep * (1 - keep), 0.0).to(kind), mask=inside)
            tl.store(
                base + 2 * HIDDEN, tl.where(on, total * enter * (1 - candidate * candidate), 0.0).to(kind), mask=inside
            )
            tl.store(base + 3 * HIDDEN, tl.where(on, of_out * curve * leave * (1 - leave), 0.0).to(kind), mask=inside)
            tl.store(of_cell + mine + h[None, :], tl.where(on, total * keep, of_c), mask=inside)
            tl.store(of_state + mine + h[None, :], tl.where(on, 0.0, of_out), mask=inside)
        tl.debug_barrier()
        for h0 in range(0, HIDDEN, BLOCK_H):
            h = h0 + tl.arange(0, BLOCK_H)
            inside = real[:, None] & (h < HIDDEN)[None, :]
            total = tl.load(of_state + mine + h[None, :], mask=inside, other=0.0)
            for k0 in range(0, 4 * PADDED, BLOCK_K):
                k = k0 + tl.arange(0, BLOCK_K)
                gate, unit = k // PADDED, k % PADDED
                known = (gate < 4) & (unit < HIDDEN)
                a = tl.load(
                    of_driven + here[:, None] * 4 * HIDDEN + (gate * HIDDEN + unit)[None, :],
                    mask=real[:, None] & known[None, :], other=0.0,
                )  # fmt: skip
                known = (gate < 4)[:, None] & (h < PADDED)[None, :]
                b = tl.load(weights + k[:, None] * PADDED + h[None, :], mask=known, other=0.0)
                total = tl.dot(a, b, total, input_precision=KIND)
            tl.store(of_state + mine + h[None, :], total, mask=inside)
        tl.debug_barrier()
