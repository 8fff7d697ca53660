"""Sparse products and sums of terms in C, for which torch has no one operation: terms.c, compiled when first needed.

It takes the system's C compiler, a fraction of a second, and leaves no file behind. Without a compiler, or with
CLIPLINE_NATIVE=0 in the environment, callers do the same with torch's operations, which is slower.
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
_REALS = {torch.float32: "float", torch.float64: "double"}
_ARGUMENTS = {"product": 20, "hang": 4, "arrange": 10, "squares": 9, "add": 9}
_PATIENCE = 60  # seconds for the compiler


@cache
def compiled(dtype: torch.dtype) -> ctypes.CDLL | None:
    """terms.c for updates of this type; None where it cannot be compiled."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or dtype not in _REALS or os.environ.get("CLIPLINE_NATIVE") == "0":
        return None
    for tuned in (["-march=native"], []):  # which not every compiler knows
        flags = ["-O3", *tuned, "-shared", "-fPIC", f"-DREAL={_REALS[dtype]}"]
        try:
            with tempfile.TemporaryDirectory(prefix="clipline-") as folder:
                target = str(Path(folder) / "terms.so")
                command = [compiler, *flags, "-o", target, str(_SOURCE)]
                subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE)
                return _typed(ctypes.CDLL(target))
        except subprocess.TimeoutExpired:
            return None
        except (OSError, subprocess.SubprocessError, AttributeError):  # the last: it holds no functions of ours
            continue
    return None


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """Numbers and pointers alike are 64 bits wide."""
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_int64] * arguments, ctypes.c_int64
    return library


def call(function: Any, *arguments: int | Tensor) -> int:
    """Call it with whole numbers, and with tensors, which must be contiguous, as pointers to their numbers."""
    assert len(arguments) == len(function.argtypes)  # more would be cut to 32 bits
    return int(function(*[address(one) if isinstance(one, Tensor) else one for one in arguments]))


def address(tensor: Tensor) -> int:
    """Where its numbers lie, one after the other."""
    if not tensor.is_contiguous():
        raise ValueError("tensors must be contiguous where C reads them")
    return tensor.data_ptr()
