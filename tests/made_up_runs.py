"""Records of runs that nobody trained, with known numbers: what experiments choose from them can be said by hand."""

import math
from collections.abc import Callable

from clipline.settings import STAND_IN
from clipline.study.record import RunRecord, RunSpec
from clipline.tasks import task_named
from clipline_paper.study.experiments import Grid
from clipline_paper.study.protocol import Protocol

CHECKSUM = "generated"
FRACTIONS = {0.1: [0.0, 0.0, 0.1, 0.1], 0.5: [0.0, 0.5, 0.5, 0.5], 0.9: [0.0, 0.4, 0.9, 0.9]}
CLIPS = {0.1: [0.1, 0.15, 0.2, 0.3], 0.5: [0.1, 0.5, 0.8, 0.8], 0.9: [0.1, 9.0, 3.2, 3.0]}  # so C_min 0.2, C_max 3.2


class MadeUp:
    """Answers with records whose metric is `value(settings)`; None is a run that diverged. `asked` has every run."""

    def __init__(self, metric: str, value: Callable[..., float | None]) -> None:
        self.metric, self.value = metric, value
        self.asked: dict[str, RunSpec] = {}

    def results(self, specs):
        return [self.record(spec) for spec in specs]

    def record(self, spec: RunSpec) -> RunRecord:
        settings, run = spec.settings, spec.identity(CHECKSUM)
        self.asked[run] = spec
        value = self.value(settings)
        quantile = settings.quantile if settings.quantile in CLIPS else 0.5
        adaptive = settings.clip == "quantile"
        rounds = {
            "round": [0, 1, 2, 3],
            "clip": CLIPS[quantile] if adaptive else [settings.clip if settings.clip != "none" else None] * 4,
            "fraction_within": FRACTIONS[quantile] if adaptive else [None] * 4,
            self.metric: [None, 0.5, None, value],
        }
        if spec.unprivate_quantiles:
            rounds |= {f"unprivate_quantile_{q:g}": [0.3, 0.4, 0.5, 0.6] for q in (0.1, 0.3, 0.5, 0.7, 0.9)}
        return RunRecord(
            run, spec.parts(CHECKSUM, None), "diverged" if value is None else "finished", rounds,
            {self.metric: value}, None, {"device": "cpu"},
        )  # fmt: skip


def grid_of(protocol: Protocol, value: Callable[..., float | None]) -> Grid:
    settings = protocol.base(
        task_named(protocol.task).settings, {"data": STAND_IN} if protocol.task != "handwriting" else {}
    )
    return Grid(MadeUp(protocol.metric, value), protocol, settings)


def quality(settings) -> float:
    """An accuracy: best at server factor 3.16 and clip 0.8; noise costs 0, 0.01, 0.03, 0.2; seeds differ by 0.001."""
    noise = {0.0: 0.0, 0.01: 0.01, 0.03: 0.03, 0.1: 0.2}[
        round(settings.noise_multiplier * 100 / settings.cohort_size, 6)
    ]
    if settings.clip == "none":
        return 0.79 - abs(math.log10(settings.client_lr) + 1.0) - abs(math.log10(settings.server_lr) + 0.5)
    rate = 0.1 * abs(math.log10(settings.server_lr / 10**-0.5) - 0.5)
    clip = 0.0 if settings.clip == "quantile" else 0.1 * abs(math.log2(settings.clip / 0.8))
    at = {0.1: 0.04, 0.5: 0.0}.get(settings.quantile, 0.02) if settings.clip == "quantile" else 0.001
    return 0.8 - noise - rate - clip - at + 0.001 * settings.seed
