"""Launches `lstm.cu`: the recurrence in bfloat16, with the recurrent weights on chip for all time steps.

Plain twin, switch, test and what it buys: see `lstm.py`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .cuda_source import CudaError, CudaKernel, cuda_kernel

_SOURCE = Path(__file__).with_name("lstm.cu")
_THREADS = 256
_FORWARD_PARTS, _BACKWARD_PARTS = 4, 8  # as in the source
_UNITS = (32, 16)  # of a block of threads; 64 are no faster for 2 to 100 users (hidden size 256, H200)
# Launches that may run at once: a training has two streams, and a process perhaps two trainings. Each holds at most one
# group that has not started in whole; if these could fill the GPU, they would wait for each other without end.
_AT_ONCE = 4


def lstm_forward(gate_inputs: Tensor, weight: Tensor, active: Tensor, units: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, activated gates, cells; see `stacked_lstm`."""
    users, time, batch, width = gate_inputs.shape
    hidden, rows = width // 4, _rows(batch)
    gate_inputs, active, weight = _laid_out(gate_inputs, active.bool(), weight.to(gate_inputs.dtype))
    outputs, gates = gate_inputs.new_empty(users, time, batch, hidden), torch.empty_like(gate_inputs)
    cells = torch.empty_like(outputs, dtype=torch.float32)
    if not cells.numel():
        return outputs, gates, cells
    groups = users * -(-batch // rows)
    exchange, sync = _shared_by_blocks(groups, rows, hidden, gate_inputs)
    kernel = _kernels(hidden, units, rows, gate_inputs.device)[0]
    arguments: list[Tensor | int] = [gate_inputs, weight, active, outputs, gates, cells, exchange, sync, time, batch]
    kernel(groups * -(-hidden // units), _THREADS, arguments)
    return outputs, gates, cells


def lstm_backward(grad: Tensor, gates: Tensor, cells: Tensor, weight: Tensor, active: Tensor, units: int) -> Tensor:
    """The gradient with respect to `gate_inputs`."""
    users, time, batch, hidden = cells.shape
    rows = _rows(batch)
    grad, gates, cells, active, weight = _laid_out(grad, gates, cells, active.bool(), weight.to(gates.dtype))
    grad_gate_inputs = torch.empty_like(gates)
    if not cells.numel():
        return grad_gate_inputs
    groups = users * -(-batch // rows)
    exchange, sync = _shared_by_blocks(groups, rows, 4 * hidden, gates)
    kernel = _kernels(hidden, units, rows, gates.device)[1]
    arguments: list[Tensor | int] = [grad, gates, cells, weight, active, grad_gate_inputs, exchange, sync, time, batch]
    kernel(groups * -(-hidden // units), _THREADS, arguments)
    return grad_gate_inputs


@cache
def units_on_chip(hidden: int, batch: int, device: torch.device) -> int:
    """How many units a block of threads keeps on chip; 0 if this device or size cannot."""
    if torch.cuda.get_device_capability(device) < (8, 0) or hidden % 2:
        return 0
    properties = torch.cuda.get_device_properties(device)
    room = properties.shared_memory_per_block_optin - 1024  # type: ignore[attr-defined]
    most = properties.multi_processor_count // _AT_ONCE  # blocks of a group: each may take a multiprocessor
    fitting = [
        units
        for units in _UNITS
        if max(_shared_bytes(hidden, units, _rows(batch))) <= room and -(-hidden // units) <= most
    ]
    for units in fitting[:1]:
        try:
            _kernels(hidden, units, _rows(batch), device)
            return units
        except CudaError:  # without NVRTC or with another driver the kernels of Triton serve
            return 0
    return 0


@cache
def _kernels(hidden: int, units: int, rows: int, device: torch.device) -> tuple[CudaKernel, CudaKernel]:
    constants = {"HIDDEN": hidden, "UNITS": units, "ROWS": rows}
    sizes = _shared_bytes(hidden, units, rows)
    names = ("lstm_forward", "lstm_backward")
    forward, backward = (
        cuda_kernel(_SOURCE, name, constants, size, device) for name, size in zip(names, sizes, strict=True)
    )
    return forward, backward


def _shared_bytes(hidden: int, units: int, rows: int) -> tuple[int, int]:
    """Bytes of shared memory that a block of threads needs, forward and backward."""
    forward = 4 * units * _stride(hidden) + _FORWARD_PARTS * rows * (4 * units + 8) * 4
    backward = -(-4 * hidden // 32) * 32 * units * 2 + _BACKWARD_PARTS * rows * (units + 8) * 4
    return forward, backward


def _stride(depth: int) -> int:
    """Bytes of a row of weights in shared memory."""
    chunks = -(-depth // 32)
    return chunks * 64 + (64 if chunks % 2 == 0 else 0)


def _rows(batch: int) -> int:
    """Sequences of a user that share a group of blocks."""
    return 8 if batch <= 8 else 16


def _laid_out(*tensors: Tensor) -> list[Tensor]:
    """Contiguous, and at addresses from which 16 bytes can be read at once: a view may begin anywhere."""
    contiguous = [tensor.contiguous() for tensor in tensors]
    return [tensor.clone() if tensor.data_ptr() % 16 else tensor for tensor in contiguous]


def _shared_by_blocks(groups: int, rows: int, depth: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """What the blocks of a group pass to each other, twice for alternate steps, and their counters."""
    exchange = like.new_zeros(groups, 2, rows, -(-depth // 32) * 32)
    return exchange, torch.zeros(1 + groups, 32, dtype=torch.int32, device=like.device)
