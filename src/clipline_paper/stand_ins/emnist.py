"""Stand-in for federated EMNIST: generated writers of 62 characters, with as many examples as in the original."""

from __future__ import annotations

from clipline import Population
from clipline.tasks import writers_population

MEAN_EXAMPLES = 671_585 / 3_400  # of the original: 197.5 a writer


def emnist_users(first: int, users: int, mean_examples: float = MEAN_EXAMPLES) -> Population:
    """Writers from number `first` on: `pixels` (28, 28) uint8 with paper 255, `labels` uint8 in EMNIST's order."""
    return writers_population(first, users, classes=62, mean_examples=mean_examples)
