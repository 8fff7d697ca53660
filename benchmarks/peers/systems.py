"""The systems that are compared: what they are, how they are installed, and how they are asked for rounds."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
OURS = "clipline"
TORCH = "torch==2.13.0"  # an open range may bring another build


@dataclass(frozen=True)
class Peer:
    """What is installed, and which tasks it cannot do."""

    pins: tuple[str, ...]
    privacy: str
    without: Mapping[str, str] = field(default_factory=dict)  # task -> why not


PEERS = {
    "pfl": Peer(("pfl==0.6.0", TORCH), "adaptive clip, noise"),
    "fedjax": Peer(
        ("fedjax==0.0.17", "jax==0.10.2", "dm-haiku==0.0.17", "optax==0.2.8"),
        "neither clip nor noise",
        {"cifar100": "FedJAX has no residual network"},
    ),
    "flower": Peer(("flwr[simulation]==1.41.0", TORCH), "fixed clip, noise"),
}


PEER_PRECISIONS = ("float32", "bf16")


def add_peer_precision(parser: argparse.ArgumentParser) -> None:
    """The flag for the arithmetic of pfl-research, the one peer that has such a setting (`amp_dtype`)."""
    parser.add_argument(
        "--peer-precision", choices=PEER_PRECISIONS, help="of pfl: float32, its default, or bf16 (autocast, on a GPU)"
    )


def check_peer_precision(parser: argparse.ArgumentParser, wanted: argparse.Namespace) -> None:
    """Refuse bfloat16 where it would not be an equal comparison."""
    if wanted.peer_precision == "bf16" and wanted.device != "cuda":
        parser.error("--peer-precision bf16 needs --device cuda: on cores both sides compute in float32")


class UnavailableError(Exception):
    """A system cannot be installed or does not run; the text says why."""


class System:
    """A process that does rounds when it is asked to; see benchmarks/peers/protocol.py."""

    def __init__(self, name: str, python: str, flags: Sequence[str], environment: dict[str, str], patience: float):
        self.name, self.patience = name, patience
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (lives as long as the process)
        self.process = subprocess.Popen(
            [python, str(BENCHMARKS / "peers" / f"{name}_round.py"), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
            start_new_session=True,  # so that workers which it starts can be ended with it
        )

    def ready(self) -> str:
        """Its versions, once data and model are in place."""
        versions: str = self._answer()["ready"]
        return versions

    def rounds(self, in_a_row: int) -> float:
        """Seconds of each of so many more rounds, on average."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then the missing answer tells
            print(in_a_row, file=self.process.stdin, flush=True)
        seconds: float = self._answer()["seconds"]
        return seconds

    def finish(self) -> dict[str, Any]:
        """No more rounds: its peak memory."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self._answer()

    def end(self) -> None:
        """End it and whatever it has started; a system that has finished gets a moment to do so itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10 if self.process.stdin.closed else 0)
        self._kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        timer = threading.Timer(self.patience, self._kill)
        timer.daemon = True  # it must not keep this program alive
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)  # its last words come after its last answer
        self._kill()
        self.process.wait()
        self.errors.seek(0)
        said = [text for text in self.errors.read().splitlines() if text.strip()]
        raise UnavailableError(f"stopped with code {self.process.returncode}: {said[-1] if said else 'without a word'}")


def environment_of(name: str, device: str, here: bool) -> dict[str, str]:
    """The variables for one system: the device, its own packages, and no word home."""
    variables = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    paths = [path for path in variables.pop("PYTHONPATH", "").split(os.pathsep) if path]
    if name == OURS:
        paths = [str(BENCHMARKS.parent / "src"), *paths]  # this tree, whatever is installed
    else:
        paths = [str(BENCHMARKS / ".carry"), *paths] if here else []
    if paths:
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    if device == "cpu":
        variables.update(CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")
    else:
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.3"  # JAX takes its share at once: leave some to the others
    return variables


def python_of(name: str, here: bool) -> str:
    """The Python that runs this system, after installing the peer if it is not there yet."""
    if here or name == OURS:
        return sys.executable
    folder, pins = BENCHMARKS / ".peers" / name, PEERS[name].pins
    python, done = folder / "bin" / "python", folder / "installed.json"
    if done.exists() and json.loads(done.read_text()) == list(pins):
        return str(python)
    print(f"installing {' '.join(pins)} into {folder}", file=sys.stderr)
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", *pins],
    ):
        made = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
        if made.returncode:
            said = (made.stderr or made.stdout).strip().splitlines()
            raise UnavailableError(f"cannot be installed: {said[-1] if said else command}")
    done.write_text(json.dumps(pins))
    return str(python)
