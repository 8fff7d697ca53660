"""Versions of everything that writes a program or a kernel: what another one has stored does not count."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import torch


@cache
def code_versions() -> list[str]:
    """Of torch, Triton, Python and the code of this package, but not the settings of torch's compiler."""
    from .... import __version__

    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:  # it is there on NVIDIA GPUs alone
        triton = "none"
    own = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        own.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return [torch.__version__, str(torch.version.git_version), triton, sys.version, __version__, own.hexdigest()]
