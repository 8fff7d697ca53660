"""Train models with user-level differential privacy and no clip norm to tune.

Every public name stands here once and is imported when it is first used, so that `import clipline` stays light.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Read by MKL at a process's first product, see engine/stacked/rounding.py. Setting it to something else wins.
os.environ.setdefault("MKL_CBWR", "AUTO")

_HOMES = {
    "Callback": "training.callbacks",
    "CliplineError": "errors",
    "Compute": "training.options",
    "Curves": "training.curves",
    "EarlyStopping": "training.early_stopping",
    "Evaluate": "training.evaluation",
    "FastParts": "engine.fast_parts",
    "FixedClip": "federated.clip_controllers",
    "Guarantee": "privacy.guarantee",
    "LocalAdam": "federated.local_sgd",
    "LocalSGD": "federated.local_sgd",
    "Log": "training.loggers",
    "Perplexity": "tasks.language.causal_lm",
    "Population": "federated.population",
    "Privacy": "training.options",
    "PrivateStatistics": "data.statistics.private_statistics",
    "Progress": "training.progress",
    "QuantileClip": "federated.clip_controllers",
    "Relation": "privacy.relations",
    "RunDirectory": "training.storage.run_directory",
    "ScheduledClip": "federated.clip_controllers",
    "ServerAdam": "federated.server_optimisers",
    "ServerSGD": "federated.server_optimisers",
    "ServerYogi": "federated.server_optimisers",
    "SettingError": "errors",
    "StopOnInterrupt": "training.interrupt",
    "TensorBoard": "training.loggers",
    "TrainResult": "training.result",
    "Training": "training.training",
    "causal_lm_loss": "tasks.language.causal_lm",
    "load": "serve.load",
    "plan": "privacy.planning",
    "run_together": "training.side_by_side",
    "task_named": "tasks",
    "train_many": "tasks.sweep",
}
__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from .data.statistics.private_statistics import PrivateStatistics
    from .engine.fast_parts import FastParts
    from .errors import CliplineError, SettingError
    from .federated.clip_controllers import FixedClip, QuantileClip, ScheduledClip
    from .federated.local_sgd import LocalAdam, LocalSGD
    from .federated.population import Population
    from .federated.server_optimisers import ServerAdam, ServerSGD, ServerYogi
    from .privacy.guarantee import Guarantee
    from .privacy.planning import plan
    from .privacy.relations import Relation
    from .serve.load import load
    from .tasks import task_named
    from .tasks.language.causal_lm import Perplexity, causal_lm_loss
    from .tasks.sweep import train_many
    from .training.callbacks import Callback
    from .training.curves import Curves
    from .training.early_stopping import EarlyStopping
    from .training.evaluation import Evaluate
    from .training.interrupt import StopOnInterrupt
    from .training.loggers import Log, TensorBoard
    from .training.options import Compute, Privacy
    from .training.progress import Progress
    from .training.result import TrainResult
    from .training.side_by_side import run_together
    from .training.storage.run_directory import RunDirectory
    from .training.training import Training


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module 'clipline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
