"""What decides the promise (`Privacy`) and what decides only the time (`Compute`), told apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ..engine.core.fast_parts import FastParts
from ..errors import SettingError, nearest, refuse
from ..privacy.relations import Relation
from ..random.streams import NoiseSource
from ..settings import SETTINGS, check_declared, declared
from ..synonyms import refuses_unknown_keywords

if TYPE_CHECKING:  # torch is loaded when it is needed: settings can be checked without it
    import torch

    from ..engine.choose import Engine, Workers
    from ..engine.core.precision import Precision
    from ..engine.core.row_fields import RowFields
    from ..federated.backend import Backend
    from ..federated.round import Algorithm


class Upload(Protocol):
    """How users send what they have trained; `federation/simulated.py` has some."""

    def simulated(self, training: Any) -> tuple[Algorithm, Backend]:
        """Algorithm and backend of a training (all but its backend is made) whose users upload in this way."""
        ...


@refuses_unknown_keywords
@dataclass(frozen=True)
class Privacy:
    """The promise. Give either `epsilon`, which chooses the noise, or `noise_multiplier`.

    Args:
      epsilon: The largest privacy loss. The least noise that reaches it is used.
      noise_multiplier: Noise of a round, in clips. 0 means no noise and no privacy.
      delta: The chance that is left for a larger loss, at most 0.1. Left out, it is `population_size ** -1.1`.
      population_size: How many users there are, declared beforehand and not read from the data. The relation is then
        add-or-remove. Left out, the number of users at hand is public and the relation is zero-out.
      sampling: "poisson" or "fixed". A fixed-size cohort makes the number of users public; its relation is replace-one.
      relation: Which two populations are neighbours, if not the one above.
      count_stddev: Noise on the count of users within the clip, in users. Left out, it is cohort_size / 20, or more
        where that would cost over 1% of noise.
      max_epsilon: Training stops before the round that would pass it.
      noise_source: "system" draws cohorts and noise so that nobody can repeat them. "seed" takes them from the
        training's seed: whoever knows the seed can subtract the noise. Left out, "seed" if the training is given a
        seed.

    Raises:
      SettingError: If both or neither of `epsilon` and `noise_multiplier` are given, or a number is outside its range.

    Example:
      >>> cl.Training(model, loss, people, privacy=cl.Privacy(epsilon=4.0, population_size=20_000), ...)
    """

    epsilon: float | None = declared("epsilon")
    noise_multiplier: float | None = declared("noise_multiplier")
    delta: float | None = declared("delta")
    population_size: int | None = declared("population_size")
    sampling: str = declared("sampling")
    relation: Relation | str | None = declared("relation")
    count_stddev: float | None = declared("count_stddev")
    max_epsilon: float | None = declared("max_epsilon")
    noise_source: NoiseSource | None = declared("noise_source", default=None)

    def __post_init__(self) -> None:
        check_declared(self)
        if self.epsilon is None and self.noise_multiplier is None:
            raise SettingError(
                "epsilon=None and noise_multiplier=None, but one of them must be set: give epsilon=4.0, say, or "
                "noise_multiplier=0 to train without privacy"
            )
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise SettingError(
                f"epsilon={self.epsilon!r} and noise_multiplier={self.noise_multiplier!r} are both set but one follows "
                "from the other: drop one of them, or give the limit as max_epsilon"
            )
        if self.noise_multiplier == 0 and self.max_epsilon is not None:
            raise refuse("max_epsilon", self.max_epsilon, "left out where there is no noise", "add noise or drop it")


@refuses_unknown_keywords
@dataclass(frozen=True)
class Compute:
    """How a cohort is trained. Nothing here changes the guarantee; results change by rounding alone.

    Args:
      device: Where users train. "auto" takes a GPU if there is one and the model is large enough to gain from it.
      engine: "one-by-one", "stacked" (many users as one program) or "auto".
      precision: Of the training: "float32", "tf32" or "bf16". Sums and noise are float64.
      workers: Processes of this machine that share each cohort. "torchrun" takes those that torchrun started. None
        takes those, or one for each core if there is no GPU.
      row_fields: Parameters of which a user's data touch few rows, and the field that names the rows.
      fast: Switches for single fast parts.

    Raises:
      SettingError: If a value is not allowed.

    Example:
      >>> cl.Training(model, loss, people, compute=cl.Compute(device="cuda", precision="bf16"), ...)
    """

    # A library takes a GPU and other cores only if told so; the command line has "auto" and None for these two.
    device: torch.device | str = declared("device", default="cpu")
    engine: Engine = declared("engine")
    precision: Precision = declared("precision")
    workers: Workers | None = declared("workers", default=1)
    row_fields: RowFields = field(default_factory=dict)
    fast: FastParts = field(default_factory=FastParts)

    def __post_init__(self) -> None:
        check_declared(self)
        if not isinstance(self.fast, FastParts):
            raise refuse("fast", self.fast, "a FastParts", "give FastParts(prefetch=False), say")
        if not isinstance(self.row_fields, Mapping):
            raise refuse("row_fields", self.row_fields, "a mapping from parameters to fields", "see engine.md")

    def resolved(self, parameters: int, cohort_size: int) -> Compute:
        """The same with a torch device and a number of workers in place of "auto" and None.

        Args:
          parameters: Number of trained parameters.
          cohort_size: Users of a round.

        Returns:
          A `Compute` without "auto".

        Raises:
          SettingError: If the device is not there.
        """
        device = _device(self.device, parameters)
        return replace(self, device=device, workers=_workers(self.workers, device, cohort_size))

    def check_device(self) -> None:
        """Refuse a device that is not there or cannot hold the sums, before any data are loaded."""
        import torch

        name = str(self.device)
        if name == "auto":
            return
        try:
            device = torch.device(name)
        except RuntimeError:
            meant = "cuda" if re.match("gpu|nvidia", name.lower()) else name
            way_out = nearest(meant, SETTINGS["device"].choices)
            raise refuse("device", name, "auto, cpu or cuda", way_out) from None
        if device.type not in ("cpu", "cuda"):
            raise refuse("device", name, "auto, cpu or cuda (sums are kept in float64)", "use cpu")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise refuse("device", name, "present, and torch finds no CUDA device here", "use cpu or auto")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            last = torch.cuda.device_count() - 1
            raise refuse("device", name, f"one of those that torch finds, cuda:0 to cuda:{last}", "use cuda or auto")


def _device(name: torch.device | str, parameters: int) -> torch.device:
    """One by one, a small model spends its time starting kernels, and a processor core starts them faster."""
    import torch

    from ..engine.choose import SMALL_MODEL
    from ..engine.workers.torchrun import torchrun_rank

    Compute(device=name).check_device()
    if name == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() and parameters >= SMALL_MODEL else "cpu")
    else:
        device = torch.device(name)
    rank = torchrun_rank()
    return device if rank is None else rank.device(device)


def _workers(workers: Workers | None, device: torch.device, cohort_size: int) -> Workers:
    """As set; else those that torchrun started; else one a core, and no more than users come.

    Where torch sees a GPU one is the default even on the processor: forked copies may not run autograd there.
    """
    import torch

    from ..engine.workers.forked import usable_cores
    from ..engine.workers.torchrun import torchrun_rank

    if workers is not None:
        return workers
    if torchrun_rank() is not None:
        return "torchrun"
    return 1 if device.type == "cuda" or torch.cuda.is_available() else min(usable_cores(), cohort_size)
