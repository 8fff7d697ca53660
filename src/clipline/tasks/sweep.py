"""Several settings of one task, trained side by side in one program."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import SettingError, refuse
from ..training.callbacks import Callback
from ..training.result import TrainResult
from ..training.side_by_side import run_together
from .task_file import task_of
from .train_settings import TrainSettings

# What side by side runs must share: what decides the data, the model, the batches and how they are computed.
_SHARED = (
    "task", "population_size", "data", "user_column", "classes", "test_users", "evaluate_on", "augment", "group_count",
    "padding_in_loss", "batch_size", "client_epochs", "max_examples", "device", "precision",
)  # fmt: skip


def train_many(
    settings: Sequence[TrainSettings], callbacks: Sequence[Sequence[Callback]] | None = None
) -> list[TrainResult]:
    """Train several settings at once: seeds, rates, noise, clip, quantile, cohort size and rounds may differ.

    Each result is what the settings alone would give, up to rounding. It takes much less time than one run after the
    other if a single run leaves the machine idle: small models, and GPUs.

    Args:
      settings: The settings, all of the same task.
      callbacks: A list of callbacks for each of them.

    Returns:
      A result for each of the settings, in order.

    Raises:
      SettingError: If the settings differ in what a stack must share.

    Example:
      >>> base = cl.task_named("handwriting").settings
      >>> results = cl.train_many([replace(base, seed=seed) for seed in range(20)])
    """
    if not settings:
        return []
    for number, one in enumerate(settings):
        for name in _SHARED:
            if getattr(one, name) != getattr(settings[0], name):
                limit = f"{getattr(settings[0], name)!r} as in settings 0, which run side by side"
                raise refuse(f"{name} of settings {number}", getattr(one, name), limit, "train these apart")
        if one.engine == "one-by-one":
            raise SettingError(
                f"engine of settings {number} is 'one-by-one' but runs side by side are stacked: leave it out"
            )
    task = task_of(settings[0])
    loaded = task.load(settings[0])
    return run_together([task.training(one, loaded) for one in settings], callbacks)
