"""Train models with user-level differential privacy and no clip norm to tune.

Every public name is imported when it is first used, so that `import clipline` stays light.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .lazy_names import lazily

# Read by MKL at a process's first product, see engine/stacked/rounding.py. Setting it to something else wins.
os.environ.setdefault("MKL_CBWR", "AUTO")

if TYPE_CHECKING:
    from .data.population import Population
    from .data.private_statistics import PrivateStatistics
    from .engine.core.fast_parts import FastParts
    from .errors import CliplineError, HopelessNoiseWarning, SettingError
    from .federated.clip_controllers import FixedClip, QuantileClip, ScheduledClip
    from .federated.local_sgd import LocalAdam, LocalSGD
    from .federated.mechanism import BandedNoise, IndependentNoise
    from .federated.server_optimisers import ServerAdam, ServerNormalised, ServerSGD, ServerYogi
    from .federation.simulated import Quantised, RandomMask, SecureSum
    from .privacy.guarantee import Guarantee
    from .privacy.planning import plan
    from .privacy.relations import Relation
    from .serve.load import load
    from .tasks import task_named
    from .tasks.causal_lm import Perplexity, causal_lm_loss
    from .tasks.sweep import train_many
    from .training.callbacks import Callback, Log, StopOnInterrupt, TensorBoard
    from .training.curves import Curves
    from .training.evaluation import EarlyStopping, Evaluate
    from .training.options import Compute, Privacy
    from .training.progress import Progress
    from .training.result import TrainResult
    from .training.run_directory import RunDirectory
    from .training.side_by_side import run_together
    from .training.training import Training

__version__ = "0.1.0"
__all__ = [
    "BandedNoise", "Callback", "CliplineError", "Compute", "Curves", "EarlyStopping", "Evaluate", "FastParts",
    "FixedClip", "Guarantee", "HopelessNoiseWarning", "IndependentNoise", "LocalAdam", "LocalSGD", "Log",
    "Perplexity", "Population", "Privacy", "PrivateStatistics", "Progress", "QuantileClip", "Quantised",
    "RandomMask", "Relation", "RunDirectory", "ScheduledClip", "SecureSum", "ServerAdam", "ServerNormalised",
    "ServerSGD", "ServerYogi", "SettingError", "StopOnInterrupt", "TensorBoard", "TrainResult", "Training",
    "causal_lm_loss", "load", "plan", "run_together", "task_named", "train_many",
]  # fmt: skip
__getattr__, __dir__ = lazily(
    __name__,
    {
        ".data.private_statistics": "PrivateStatistics",
        ".engine.core.fast_parts": "FastParts",
        ".errors": "CliplineError HopelessNoiseWarning SettingError",
        ".federated.clip_controllers": "FixedClip QuantileClip ScheduledClip",
        ".federated.local_sgd": "LocalAdam LocalSGD",
        ".federated.mechanism": "BandedNoise IndependentNoise",
        ".federation.simulated": "Quantised RandomMask SecureSum",
        ".data.population": "Population",
        ".federated.server_optimisers": "ServerAdam ServerNormalised ServerSGD ServerYogi",
        ".privacy.guarantee": "Guarantee",
        ".privacy.planning": "plan",
        ".privacy.relations": "Relation",
        ".serve.load": "load",
        ".tasks": "task_named",
        ".tasks.causal_lm": "Perplexity causal_lm_loss",
        ".tasks.sweep": "train_many",
        ".training.callbacks": "Callback Log StopOnInterrupt TensorBoard",
        ".training.curves": "Curves",
        ".training.evaluation": "EarlyStopping Evaluate",
        ".training.options": "Compute Privacy",
        ".training.progress": "Progress",
        ".training.result": "TrainResult",
        ".training.side_by_side": "run_together",
        ".training.run_directory": "RunDirectory",
        ".training.training": "Training",
    },
)
