"""CUDA C++ sources of this room, compiled at run time by NVRTC, which comes with torch for NVIDIA GPUs.

No compiler of the user's machine is used: NVRTC is a library, and its result is loaded through the driver.
"""

from __future__ import annotations

import ctypes
import site
import sys
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CudaError(RuntimeError):
    """NVRTC or the driver refused a kernel."""


class CudaKernel:
    """One kernel on one device; see `cuda_kernel`."""

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


def cuda_kernel(
    path: Path, name: str, constants: Mapping[str, int], shared_bytes: int, device: torch.device
) -> CudaKernel:
    """The kernel `name` of a source file with these constants defined; compiled once in a process.

    Call it in a thread that has used the device: its context must be current.
    """
    with torch.cuda.device(device):
        return _kernel(path, name, tuple(sorted(constants.items())), shared_bytes, torch.cuda.current_device())


@cache
def _kernel(
    path: Path, name: str, constants: tuple[tuple[str, int], ...], shared_bytes: int, device: int
) -> CudaKernel:
    major, minor = torch.cuda.get_device_capability(device)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    image = _compiled(path, constants, f"sm_{major}{minor}")
    _driver("cuModuleLoadData", ctypes.byref(module), image)
    _driver("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    return CudaKernel(function, shared_bytes, device)


@cache
def _compiled(path: Path, constants: tuple[tuple[str, int], ...], architecture: str) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    flags = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{name}={value}" for name, value in constants)]
    options = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), path.read_bytes(), path.name.encode(), 0, None, None))
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(flags), options)
        if failed:
            raise CudaError(f"{path.name} cannot be compiled: {_output(nvrtc, 'ProgramLog', program).decode()}")
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
