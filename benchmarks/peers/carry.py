"""Gather what pfl and FedJAX need beyond torch and JAX, for a GPU machine where nothing can be installed.

    python benchmarks/peers/carry.py        fills benchmarks/.carry, for Python 3.12 on x86_64 Linux

There `python benchmarks/against_peers.py --here --peers pfl,fedjax --device cuda` finds that folder by itself. Nothing
is taken that such a machine brings along (torch, NumPy, SciPy, JAX): a second copy would hide the one with CUDA.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CARRY = Path(__file__).resolve().parents[1] / ".carry"
PYTHON = "3.12"
PACKAGES = (
    # pfl and what it imports on the way to a round
    "pfl==0.6.0",
    "dp-accounting==0.5.1",
    "prv-accountant==0.2.0",
    "multiprocess==0.70.19",
    "dill==0.4.1",
    "attrs==23.2.0",
    "packaging==25.0",
    # FedJAX, the same
    "fedjax==0.0.17",
    "dm-haiku==0.0.17",
    "jmp==0.0.4",
    "tabulate==0.10.0",
    "optax==0.2.8",
    "msgpack==1.2.4",  # compiled
    "requests==2.34.2",
    "urllib3==2.8.0",
    "certifi==2026.10.18",
    "idna==3.20",
    "charset-normalizer==3.5.2",
    # both
    "absl-py==1.4.0",
)
NEVER = ("torch", "numpy", "scipy", "jax", "jaxlib", "triton", "nvidia")
STRAY = ("bin", "build", "docs", "examples", "experiments")  # that wheels bring beside their packages
LIMIT_MIB = 40


def unwanted(folder: Path) -> list[str]:
    """Names in the folder that would hide what the machine brings along."""
    return [name for name in NEVER if (folder / name).exists()]


def size_mib(folder: Path) -> float:
    """Of all files below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def main() -> None:
    """Fill the folder anew, and say what is in it."""
    if CARRY.exists():
        shutil.rmtree(CARRY)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(CARRY)]
    # --only-binary is the price of --python-version; both peers and all their needs have wheels.
    command += ["--python-version", PYTHON, "--implementation", "cp", "--only-binary", ":all:"]
    for platform in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"):
        command += ["--platform", platform]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([*command, *PACKAGES], check=True, env=environment)
    for folder in [*(CARRY / name for name in STRAY), *CARRY.rglob("tests"), *CARRY.rglob("__pycache__")]:
        shutil.rmtree(folder, ignore_errors=True)
    (CARRY / "VERSION").unlink(missing_ok=True)
    hidden, size = unwanted(CARRY), size_mib(CARRY)
    if hidden or size > LIMIT_MIB:
        raise SystemExit(f"{CARRY} holds {', '.join(hidden) or 'nothing forbidden'} and {size:.1f} of {LIMIT_MIB} MiB")
    names = sorted(path.name for path in CARRY.iterdir() if not path.name.endswith(".dist-info"))
    print(f"{CARRY}: {size:.1f} MiB, {', '.join(names)}")


if __name__ == "__main__":
    main()
