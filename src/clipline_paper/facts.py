"""What is known of every task before anything is loaded: Table 1 of the paper, Figure 7, and the original programs.

Nothing heavy is imported here, so that `clipline tasks` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Data = Literal["stand-in", "embedded"]  # without prepared data; `data.task_stores.data_state` says what is there


@dataclass(frozen=True)
class TaskFacts:
    """One task. Learning rates are the powers of ten that Table 1 rounds; `noise_at_100` is z*, `best_clip` is C*.

    `users` are those of the original; `stand_in_users` those that are generated unless asked otherwise.
    """

    name: str
    parameters: int
    users: int
    rounds: int
    client_lr: float
    server_lr: float
    clip_min: float | None
    clip_max: float | None
    noise_at_100: float | None
    best_clip: float
    batch_size: int
    max_examples: int | None
    metric_name: str
    stand_in_users: int
    data: Data = "stand-in"
    lower_is_better: bool = False


FACTS = {
    facts.name: facts
    for facts in (
        TaskFacts(
            "handwriting", 5994, 40_000, 150, 0.5, 1.0, None, None, None, 0.7, 20, None, "accuracy", 40_000, "embedded"
        ),
        TaskFacts(
            "cifar100", 11_227_812, 500, 4000, 0.1, 10**-0.5, 0.75, 2.2, 0.03, 0.98, 20, None, "accuracy", 500
        ),
        TaskFacts(
            "emnist_cr", 1_206_590, 3400, 1500, 10**-1.5, 1.0, 0.28, 0.85, 0.1, 0.37, 20, None, "accuracy", 3400
        ),
        TaskFacts(
            "emnist_ae", 2_837_314, 3400, 3000, 10**0.5, 10**0.25, 0.22, 0.95, 0.03, 0.32, 20, None,
            "mean_squared_error", 3400, lower_is_better=True,
        ),
        TaskFacts(
            "shakespeare", 820_522, 715, 1200, 1.0, 10**-0.5, 0.25, 3.6, 0.1, 0.95, 4, None, "accuracy", 715
        ),
        TaskFacts(
            "so_nwp", 4_050_748, 342_477, 1500, 10**-0.75, 10**0.25, 0.3, 1.6, 0.01, 0.3, 16, 1000,
            "accuracy_no_oov_or_eos", 2000,
        ),
        TaskFacts(
            "so_lr", 5_000_500, 342_477, 1500, 10**2.5, 10**0.25, 16.0, 135.0, 0.01, 16.0, 100, 1000,
            "recall_at_5", 1000,
        ),
    )
}  # fmt: skip
