"""Switches of the fast parts. Each has a reference implementation, and a test that holds the two equal."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...errors import refuse
from ...settings import check_declared, declared
from ...synonyms import refuses_unknown_keywords


@refuses_unknown_keywords
@dataclass(frozen=True)
class FastParts:
    """Which fast parts are used. Turning one off changes the time, and results by rounding alone."""

    # On a GPU: "always" one compiled program, replayed as CUDA graphs; "auto" where a training is long enough to gain
    # from it, else its steps are recorded as they are written; "never" vmap, step by step.
    compiled_steps: str = declared("compiled_steps")
    kept_programs: bool = (
        True  # on a GPU: a program that was compiled in this process serves every training of its shape
    )
    stored_programs: bool = declared("stored_programs")  # on a GPU: later processes load what one has compiled
    straggler_streams: bool = True  # on a GPU: users with many more steps run on a stream beside the others
    kernels: bool = True  # on a GPU: convolution, pooling, group norm, LSTM and sums of updates by kernels of our own
    kernels_ahead: bool = True  # on a GPU: those are compiled in threads before training, all at once
    single_step: bool = True  # on CPU cores: users of one example share the round's weights, see example_level.md
    prefetch: bool = True  # the next round's cohort and noise are drawn while this one ends
    device_noise: bool = True  # on a GPU: it draws the noise itself, the same numbers as processor cores

    def __post_init__(self) -> None:
        check_declared(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if "setting" not in field.metadata and not isinstance(value, bool):
                raise refuse(f"fast parts: {field.name}", value, "True or False", "leave it out for the default")
