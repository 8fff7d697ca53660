"""What must be the same when an interrupted run goes on: a round that is run again has to release the same numbers."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import torch

from .. import __version__
from ..engine.sparse.native import compiled
from ..tasks.settings import TrainSettings
from .checkpoint import DATA_FINGERPRINT
from .training import Training


class Circumstances:
    """Settings, versions, what computes, and the data: as text, a line each.

    With noise from the seed, two releases of one round have the same noise: had anything of this changed in between,
    their difference would show the data. The fingerprint of the data is computed in a thread, which begins at once and
    is waited for when the text is asked for.

    Left out are settings that change no release or rounding alone: the number of workers, timing, and the folder of the
    data, which their fingerprint stands for. The code of a model and a loss cannot be seen from here.
    """

    def __init__(self, settings: TrainSettings, training: Training) -> None:
        same = replace(settings, workers=None, data=None, unprivate_timing=False)
        plain, clients = training.plain, training.algorithm.clients
        native = bool(plain.noted) and compiled(clients.flat.vector.dtype) is not None
        facts = {
            "clipline version": __version__,
            "torch version": torch.__version__,
            "numpy version": np.__version__,
            "device in use": device_name(clients.flat.vector.device),
            "engine in use": type(clients).__name__,
            "C routines": "in use" if native else "not in use",
        }
        self._text = same.to_toml() + "".join(f"{name}: {value}\n" for name, value in facts.items())
        self._fingerprint = _in_thread(training.population.fingerprint)

    def __str__(self) -> str:
        return f"{self._text}{DATA_FINGERPRINT}: {self._fingerprint.result()}\n"


def device_name(device: torch.device) -> str:
    """The type of a device and what decides how it rounds: the model of a GPU, the instructions of a processor."""
    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    return f"{device.type}, {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _in_thread(work: Callable[[], str]) -> Future[str]:
    """What this will give, from a thread that does not keep the process alive when a run ends before."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # for whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name="clipline-fingerprint", daemon=True).start()
    return future
