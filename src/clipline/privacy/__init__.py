"""Accounting: what a run promises about one user, and what it costs. NumPy and SciPy in float64, no array framework.

Begin with `relations` and `events`, then `dominating_pairs` (the one table that everything rests on) and `accountant`
(ledger -> guarantee). The public names below are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import lazily

if TYPE_CHECKING:
    from .accountant import account, account_renyi, default_relation, delta_at
    from .calibration import cohort_within, least_scale, noise_multiplier_for, rounds_within
    from .events import (
        FixedSizeSampling,
        GaussianEvent,
        GroupedPoissonSampling,
        NoSampling,
        PoissonSampling,
        Statistic,
        TruncatedPoissonSampling,
        sampling_named,
    )
    from .feasibility import NoiseTable
    from .guarantee import Guarantee, rounded_up
    from .ledger import Ledger
    from .noise_split import DeltaNoise, join_noise, split_noise
    from .numerics import gaussian_mu
    from .planning import Plan, plan, plan_table
    from .relations import Relation
    from .selection import PoissonRuns, TruncatedNegativeBinomial, account_grid, account_search

__all__ = [
    "DeltaNoise", "FixedSizeSampling", "GaussianEvent", "GroupedPoissonSampling", "Guarantee", "Ledger",
    "NoSampling", "NoiseTable", "Plan", "PoissonRuns", "PoissonSampling", "Relation", "Statistic",
    "TruncatedNegativeBinomial", "TruncatedPoissonSampling", "account", "account_grid", "account_renyi",
    "account_search", "cohort_within", "default_relation", "delta_at", "gaussian_mu", "join_noise", "least_scale",
    "noise_multiplier_for", "plan", "plan_table", "rounded_up", "rounds_within",
    "sampling_named", "split_noise",
]  # fmt: skip
__getattr__, __dir__ = lazily(
    __name__,
    {
        ".accountant": "account account_renyi default_relation delta_at",
        ".calibration": "cohort_within least_scale noise_multiplier_for rounds_within",
        ".events": "FixedSizeSampling GaussianEvent GroupedPoissonSampling NoSampling PoissonSampling Statistic "
        "TruncatedPoissonSampling sampling_named",
        ".feasibility": "NoiseTable",
        ".guarantee": "Guarantee rounded_up",
        ".ledger": "Ledger",
        ".noise_split": "DeltaNoise join_noise split_noise",
        ".numerics": "gaussian_mu",
        ".planning": "Plan plan plan_table",
        ".relations": "Relation",
        ".selection": "PoissonRuns TruncatedNegativeBinomial account_grid account_search",
    },
)
