"""What is known of every task before anything is loaded: Table 1 of the paper, Figure 7, and the original programs.

Nothing heavy is imported here, so that `clipline tasks` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from clipline.tasks import DEFAULT_TASK, TaskEntry, task_entry


@dataclass(frozen=True, kw_only=True)
class PaperFacts(TaskEntry):
    """A task of the paper: also z* as `noise_at_100`, C* as `best_clip`, and what the original programs train on.

    Learning rates are the powers of ten that Table 1 rounds. `users` are those of the original.
    """

    noise_at_100: float
    best_clip: float
    batch_size: int
    max_examples: int | None = None


CIFAR100 = PaperFacts(
    "cifar100", "clipline_paper.tasks.cifar100:TASK", 11_227_812, 500, 4000, 0.1, 10**-0.5, "accuracy", 500,
    0.75, 2.2, noise_at_100=0.03, best_clip=0.98, batch_size=20,
)  # fmt: skip
EMNIST_CR = PaperFacts(
    "emnist_cr", "clipline_paper.tasks.emnist_cr:TASK", 1_206_590, 3400, 1500, 10**-1.5, 1.0, "accuracy", 3400,
    0.28, 0.85, noise_at_100=0.1, best_clip=0.37, batch_size=20,
)  # fmt: skip
EMNIST_AE = PaperFacts(
    "emnist_ae", "clipline_paper.tasks.emnist_ae:TASK", 2_837_314, 3400, 3000, 10**0.5, 10**0.25,
    "mean_squared_error", 3400, 0.22, 0.95, noise_at_100=0.03, best_clip=0.32, batch_size=20, lower_is_better=True,
)  # fmt: skip
SHAKESPEARE = PaperFacts(
    "shakespeare", "clipline_paper.tasks.shakespeare:TASK", 820_522, 715, 1200, 1.0, 10**-0.5, "accuracy", 715,
    0.25, 3.6, noise_at_100=0.1, best_clip=0.95, batch_size=4,
)  # fmt: skip
SO_NWP = PaperFacts(
    "so_nwp", "clipline_paper.tasks.so_nwp:TASK", 4_050_748, 342_477, 1500, 10**-0.75, 10**0.25,
    "accuracy_no_oov_or_eos", 2000, 0.3, 1.6, noise_at_100=0.01, best_clip=0.3, batch_size=16, max_examples=1000,
)  # fmt: skip
SO_LR = PaperFacts(
    "so_lr", "clipline_paper.tasks.so_lr:TASK", 5_000_500, 342_477, 1500, 10**2.5, 10**0.25, "recall_at_5", 1000,
    16.0, 135.0, noise_at_100=0.01, best_clip=16.0, batch_size=100, max_examples=1000,
)  # fmt: skip
FACTS = {facts.name: facts for facts in (CIFAR100, EMNIST_CR, EMNIST_AE, SHAKESPEARE, SO_NWP, SO_LR)}
ENTRIES: dict[str, TaskEntry] = {DEFAULT_TASK: task_entry(DEFAULT_TASK), **FACTS}  # all that have a protocol
