"""Which way a metric is better: said by whoever made it, or else by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping

LOWER, HIGHER = "lower_is_better", "higher_is_better"  # facts of a run: names of metrics, separated by commas
_PARTS = ("loss", "error", "perplexity", "cross_entropy")  # wherever they stand in the name
_WORDS = {"err", "errs", "mae", "mse", "rmse", "mape", "nll", "ppl", "brier", "regret", "cost"}  # as a whole word


def lower_is_better(metric: str, said: Mapping[str, str] | None = None) -> bool:
    """Whether the smaller value of a metric is the better one.

    So it is for losses, errors and perplexities by their usual names (`test_loss`, `absolute_error`, `err`, `rmse`,
    `val-MAE`); for all others the larger one is. `said` goes before the name: facts of a run that list metrics under
    `lower_is_better` or `higher_is_better`.
    """
    for name, answer in ((LOWER, True), (HIGHER, False)):
        if metric in [one.strip() for one in (said or {}).get(name, "").split(",")]:
            return answer
    name = metric.lower()
    return any(part in name for part in _PARTS) or not _WORDS.isdisjoint(re.split(r"[\W_\d]+", name))


def better_facts(better: Mapping[str, str]) -> dict[str, str]:
    """Metrics by name, each "lower" or "higher", as the facts of a run."""
    listed = {
        fact: ", ".join(name for name, way in better.items() if way == word)
        for fact, word in ((LOWER, "lower"), (HIGHER, "higher"))
    }
    return {fact: names for fact, names in listed.items() if names}
