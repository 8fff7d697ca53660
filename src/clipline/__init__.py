"""Train models with user-level differential privacy and no clip norm to tune.

Every public name stands here once and is imported when it is first used, so that `import clipline` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "CliplineError": "errors",
    "FixedClip": "federated.controllers",
    "FixedSizeSampler": "federated.sampling",
    "GaussianEvent": "privacy.events",
    "GaussianMechanism": "federated.mechanism",
    "Guarantee": "privacy.accountant",
    "Ledger": "privacy.ledger",
    "LocalSGD": "federated.clients",
    "PoissonSampler": "federated.sampling",
    "Population": "federated.population",
    "QuantileClip": "federated.controllers",
    "Relation": "privacy.relations",
    "ScheduledClip": "federated.controllers",
    "ServerAdam": "federated.server",
    "ServerSGD": "federated.server",
    "ServerYogi": "federated.server",
    "SettingError": "errors",
    "TrainResult": "federated.training",
    "Training": "federated.training",
    "account": "privacy.accountant",
    "join_noise": "privacy.split",
    "noise_multiplier_for": "privacy.calibration",
    "split_noise": "privacy.split",
    "task_named": "tasks",
}
__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from .errors import CliplineError, SettingError
    from .federated.clients import LocalSGD
    from .federated.controllers import FixedClip, QuantileClip, ScheduledClip
    from .federated.mechanism import GaussianMechanism
    from .federated.population import Population
    from .federated.sampling import FixedSizeSampler, PoissonSampler
    from .federated.server import ServerAdam, ServerSGD, ServerYogi
    from .federated.training import Training, TrainResult
    from .privacy.accountant import Guarantee, account
    from .privacy.calibration import noise_multiplier_for
    from .privacy.events import GaussianEvent
    from .privacy.ledger import Ledger
    from .privacy.relations import Relation
    from .privacy.split import join_noise, split_noise
    from .tasks import task_named


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module 'clipline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
