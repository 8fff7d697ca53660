"""Switches of the fast parts. Each has a reference implementation, and a test that holds the two equal."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...errors import refuse
from ...settings import check_declared, declared
from ...synonyms import refuses_unknown_keywords


@refuses_unknown_keywords
@dataclass(frozen=True)
class FastParts:
    """Which fast parts are used. Turning one off changes the time, and results by rounding alone.

    Args:
      compiled_steps: GPU: "always" is one compiled program, replayed as CUDA graphs. "auto" compiles where a training
        is long enough to gain from it, and otherwise records its steps as written. "never" is vmap, step by step.
      kept_programs: GPU: a program that was compiled in this process serves every training of its shape.
      kernels: GPU: convolution and LSTM use kernels of our own.
      single_step: CPU: users of one example share the round's weights.
      prefetch: The next round's cohort and noise are drawn while this one ends.
      device_noise: GPU: it draws the noise itself, the same numbers as a CPU.

    Raises:
      SettingError: If a value is not allowed.

    Example:
      >>> cl.Compute(device="cuda", fast=cl.FastParts(compiled_steps="never"))
    """

    compiled_steps: str = declared("compiled_steps")
    kept_programs: bool = True
    kernels: bool = True
    single_step: bool = True
    prefetch: bool = True
    device_noise: bool = True

    def __post_init__(self) -> None:
        check_declared(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if "setting" not in field.metadata and not isinstance(value, bool):
                raise refuse(f"fast parts: {field.name}", value, "True or False", "leave it out for the default")
