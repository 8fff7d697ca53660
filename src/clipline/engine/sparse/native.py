"""Loads terms.c: sparse products and sums of outer products, for which torch has no single operation.

It is compiled when a training that asks for it is made, by the system's C compiler, in a fraction of a second, and
leaves no file behind.

Plain twin: the same with torch's operations (`_Plain` in outer_products.py, the loops in updates.py), equal up to
rounding.
Switch: `FastParts.compile_c`, off by default; also off without a compiler, or with CLIPLINE_NATIVE=0 set.
Held equal by: tests/engine/sparse/test_outer_products.py, test_updates.py and test_recorded_weight.py.
Buys: 88 ms a round instead of 136 (so_lr, 20 users, 2 cores, benchmarks/fast_parts.py, 2026-11-16).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("terms.c")
_C_TYPES = {torch.float32: "float", torch.float64: "double"}
_ARGUMENT_COUNTS = {"bag_product": 20, "link_terms": 4, "sort_terms": 10, "squares": 9, "add": 9}
_COMPILER_TIMEOUT = 60  # seconds


@cache
def compiled(dtype: torch.dtype) -> ctypes.CDLL | None:
    """terms.c for updates of this type; None where it cannot be compiled."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or dtype not in _C_TYPES or os.environ.get("CLIPLINE_NATIVE") == "0":
        return None
    for extra in (["-march=native"], []):  # not every compiler knows the flag
        flags = ["-O3", *extra, "-shared", "-fPIC", f"-DREAL={_C_TYPES[dtype]}"]
        try:
            with tempfile.TemporaryDirectory(prefix="clipline-") as folder:
                target = str(Path(folder) / "terms.so")
                command = [compiler, *flags, "-o", target, str(_SOURCE)]
                subprocess.run(command, check=True, capture_output=True, timeout=_COMPILER_TIMEOUT)
                return _declare(ctypes.CDLL(target))
        except subprocess.TimeoutExpired:
            return None
        except (OSError, subprocess.SubprocessError, AttributeError):  # AttributeError: our functions are missing in it
            continue
    return None


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the signatures: every argument, number or pointer, is 64 bits wide."""
    for name, arguments in _ARGUMENT_COUNTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_int64] * arguments, ctypes.c_int64
    return library


def call(function: Any, *arguments: int | Tensor) -> int:
    """Call a C function with integers and with tensors, which must be contiguous and are passed as pointers."""
    assert len(arguments) == len(function.argtypes)  # ctypes would cut further ones to 32 bits
    return int(function(*[address(argument) if isinstance(argument, Tensor) else argument for argument in arguments]))


def address(tensor: Tensor) -> int:
    """The address of a contiguous tensor's data."""
    if not tensor.is_contiguous():
        raise ValueError("tensors must be contiguous where C reads them")
    return tensor.data_ptr()
