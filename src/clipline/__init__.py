"""Train models with user-level differential privacy and no clip norm to tune.

Every public name stands here once and is imported when it is first used, so that `import clipline` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "BagLinear": "engine.layers",
    "Callback": "training.callbacks",
    "CliplineError": "errors",
    "Compute": "training.options",
    "Curves": "training.curves",
    "DeltaNoise": "privacy.noise_split",
    "Evaluate": "training.evaluation",
    "FastParts": "engine.fast_parts",
    "FixedClip": "federated.clip_controllers",
    "FixedSizeSampler": "federated.sampling",
    "FixedSizeSampling": "privacy.events",
    "GaussianEvent": "privacy.events",
    "GaussianMechanism": "federated.mechanism",
    "Guarantee": "privacy.guarantee",
    "Ledger": "privacy.ledger",
    "LocalSGD": "federated.local_sgd",
    "MatrixLSTM": "engine.layers",
    "NoSampling": "privacy.events",
    "PatchConv2d": "engine.layers",
    "Plan": "privacy.planning",
    "PoissonRuns": "privacy.selection",
    "PoissonSampler": "federated.sampling",
    "PoissonSampling": "privacy.events",
    "Population": "federated.population",
    "Privacy": "training.options",
    "Progress": "training.progress",
    "QuantileClip": "federated.clip_controllers",
    "Relation": "privacy.relations",
    "RunDirectory": "training.run_directory",
    "ScheduledClip": "federated.clip_controllers",
    "ServerAdam": "federated.server_optimisers",
    "ServerSGD": "federated.server_optimisers",
    "ServerYogi": "federated.server_optimisers",
    "SettingError": "errors",
    "StopOnInterrupt": "training.interrupt",
    "TrainResult": "training.result",
    "Training": "training.training",
    "TruncatedNegativeBinomial": "privacy.selection",
    "TruncatedPoissonSampling": "privacy.events",
    "account": "privacy.accountant",
    "account_grid": "privacy.selection",
    "account_renyi": "privacy.accountant",
    "account_search": "privacy.selection",
    "cohort_within": "privacy.calibration",
    "delta_at": "privacy.accountant",
    "gaussian_mu": "privacy.numerics.gaussian",
    "join_noise": "privacy.noise_split",
    "least_scale": "privacy.calibration",
    "noise_multiplier_for": "privacy.calibration",
    "plan": "privacy.planning",
    "privacy_curve": "privacy.accountant",
    "rounds_within": "privacy.calibration",
    "run_together": "training.side_by_side",
    "split_noise": "privacy.noise_split",
    "task_named": "tasks",
    "train_many": "tasks.sweep",
}
__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from .engine.fast_parts import FastParts
    from .engine.layers import BagLinear, MatrixLSTM, PatchConv2d
    from .errors import CliplineError, SettingError
    from .federated.clip_controllers import FixedClip, QuantileClip, ScheduledClip
    from .federated.local_sgd import LocalSGD
    from .federated.mechanism import GaussianMechanism
    from .federated.population import Population
    from .federated.sampling import FixedSizeSampler, PoissonSampler
    from .federated.server_optimisers import ServerAdam, ServerSGD, ServerYogi
    from .privacy.accountant import account, account_renyi, delta_at, privacy_curve
    from .privacy.calibration import cohort_within, least_scale, noise_multiplier_for, rounds_within
    from .privacy.events import (
        FixedSizeSampling,
        GaussianEvent,
        NoSampling,
        PoissonSampling,
        TruncatedPoissonSampling,
    )
    from .privacy.guarantee import Guarantee
    from .privacy.ledger import Ledger
    from .privacy.noise_split import DeltaNoise, join_noise, split_noise
    from .privacy.numerics.gaussian import gaussian_mu
    from .privacy.planning import Plan, plan
    from .privacy.relations import Relation
    from .privacy.selection import PoissonRuns, TruncatedNegativeBinomial, account_grid, account_search
    from .tasks import task_named
    from .tasks.sweep import train_many
    from .training.callbacks import Callback
    from .training.curves import Curves
    from .training.evaluation import Evaluate
    from .training.interrupt import StopOnInterrupt
    from .training.options import Compute, Privacy
    from .training.progress import Progress
    from .training.result import TrainResult
    from .training.run_directory import RunDirectory
    from .training.side_by_side import run_together
    from .training.training import Training


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module 'clipline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
