"""Launches `lstm.cu`: the recurrence in bfloat16, with the recurrent weights on chip for all time steps.

NVRTC, which comes with torch for NVIDIA GPUs, compiles the source at run time. No compiler of the user's machine is
used: NVRTC is a library, and its result is loaded through the driver.

Plain twin, switch, test and what it buys: see `lstm.py`.
"""

from __future__ import annotations

import ctypes
import site
import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("lstm.cu")
_THREADS = 256
_FORWARD_PARTS, _BACKWARD_PARTS = 4, 8  # as in the source
_UNITS = (32, 16)  # of a block of threads; 64 are no faster for 2 to 100 users (hidden size 256, H200)
# Launches that may run at once, of several trainings in a process. Each holds at most one
# group that has not started in whole; if these could fill the GPU, they would wait for each other without end.
_AT_ONCE = 4
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


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
    """Forward and backward. Call it in a thread that has used the device: its context must be current."""
    constants = (("HIDDEN", hidden), ("UNITS", units), ("ROWS", rows))
    with torch.cuda.device(device):
        here = torch.cuda.current_device()
        forward, backward = _shared_bytes(hidden, units, rows)
        return (
            _kernel("lstm_forward", constants, forward, here),
            _kernel("lstm_backward", constants, backward, here),
        )


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


class CudaError(RuntimeError):
    """NVRTC or the driver refused a kernel."""


class CudaKernel:
    """One kernel on one device."""

    def __init__(self, function: ctypes.c_void_p, shared_bytes: int, device: int) -> None:
        self._function, self._shared_bytes, self._device = function, shared_bytes, device
        _driver("cuFuncSetAttribute", function, ctypes.c_int(_MOST_SHARED), ctypes.c_int(shared_bytes))

    def __call__(self, blocks: int, threads: int, arguments: Sequence[Tensor | int]) -> None:
        """Launch on its device's stream. Tensors are given as pointers: they must live until the kernel has run."""
        values = [
            ctypes.c_void_p(one.data_ptr()) if isinstance(one, Tensor) else ctypes.c_int(one) for one in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        one = ctypes.c_uint(1)
        with torch.cuda.device(self._device):  # its context, also where another device is the current one
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            _driver(
                "cuLaunchKernel", self._function, ctypes.c_uint(blocks), one, one, ctypes.c_uint(threads), one, one,
                ctypes.c_uint(self._shared_bytes), stream, pointers, None,
            )  # fmt: skip


def _kernel(name: str, constants: tuple[tuple[str, int], ...], shared_bytes: int, device: int) -> CudaKernel:
    major, minor = torch.cuda.get_device_capability(device)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    image = _compiled(constants, f"sm_{major}{minor}")
    _driver("cuModuleLoadData", ctypes.byref(module), image)
    _driver("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    return CudaKernel(function, shared_bytes, device)


@cache
def _compiled(constants: tuple[tuple[str, int], ...], architecture: str) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    flags = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{name}={value}" for name, value in constants)]
    options = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), _SOURCE.read_bytes(), _SOURCE.name.encode(), 0, None, None))
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(flags), options)
        if failed:
            raise CudaError(f"{_SOURCE.name} cannot be compiled: {_output(nvrtc, 'ProgramLog', program).decode()}")
        return _output(nvrtc, "CUBIN", program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _output(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    held = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, held))
    return held.raw


@lru_cache(maxsize=1)
def _nvrtc() -> ctypes.CDLL:
    """NVRTC, from where torch's packages put it, or from the system."""
    version = str(torch.version.cuda).split(".")[0]
    name = f"nvrtc64_{version}0_0.dll" if sys.platform == "win32" else f"libnvrtc.so.{version}"
    roots = [Path(root) / "nvidia" for root in [*site.getsitepackages(), *sys.path]]
    found = [str(path) for root in roots for path in root.glob(f"*/lib/{name}")]
    for path in [*found, name]:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise CudaError(f"{name}, which comes with torch for CUDA, is not found")


@lru_cache(maxsize=1)
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _driver(call: str, *arguments: object) -> None:
    result = getattr(_cuda(), call)(*arguments)
    if result:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(result, ctypes.byref(text))
        raise CudaError(f"{call} failed: {(text.value or b'unknown error').decode()}")


def _check(result: int) -> None:
    if result:
        raise CudaError(f"NVRTC failed with error {result}")
