"""Accounting: what a run promises about one user, and what it costs. NumPy and SciPy in float64, no array framework.

Begin with `relations` and `events`, then `dominating_pairs` (the one table that everything rests on) and `accountant`
(ledger -> guarantee). The public names below are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "DeltaNoise": "noise_split",
    "FixedSizeSampling": "events",
    "GaussianEvent": "events",
    "Guarantee": "guarantee",
    "Ledger": "ledger",
    "NoSampling": "events",
    "NoiseTable": "feasibility.noise_table",
    "Plan": "planning",
    "PoissonRuns": "selection",
    "PoissonSampling": "events",
    "Relation": "relations",
    "Statistic": "events",
    "TruncatedNegativeBinomial": "selection",
    "TruncatedPoissonSampling": "events",
    "account": "accountant",
    "account_grid": "selection",
    "account_renyi": "accountant",
    "account_search": "selection",
    "cohort_within": "calibration",
    "default_relation": "accountant",
    "delta_at": "accountant",
    "gaussian_mu": "numerics.gaussian",
    "join_noise": "noise_split",
    "least_scale": "calibration",
    "noise_multiplier_for": "calibration",
    "plan": "planning",
    "plan_table": "planning",
    "privacy_curve": "accountant",
    "quantile_bound": "noise_split",
    "rounds_within": "calibration",
    "split_noise": "noise_split",
}
__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from .accountant import account, account_renyi, default_relation, delta_at, privacy_curve
    from .calibration import cohort_within, least_scale, noise_multiplier_for, rounds_within
    from .events import (
        FixedSizeSampling,
        GaussianEvent,
        NoSampling,
        PoissonSampling,
        Statistic,
        TruncatedPoissonSampling,
    )
    from .feasibility.noise_table import NoiseTable
    from .guarantee import Guarantee
    from .ledger import Ledger
    from .noise_split import DeltaNoise, join_noise, quantile_bound, split_noise
    from .numerics.gaussian import gaussian_mu
    from .planning import Plan, plan, plan_table
    from .relations import Relation
    from .selection import PoissonRuns, TruncatedNegativeBinomial, account_grid, account_search


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module 'clipline.privacy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
