"""pfl-research's rounds with adapters: federated averaging with its adaptive clipping at the server.

pfl federates the parameters that require a gradient, so the base stays frozen without a change to it; bfloat16 autocast
is its own option.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

# Last on the path: what the machine has goes before what was brought along (peers/carry.py).
sys.path.append(str(Path(__file__).resolve().parents[1] / ".carry"))

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.dataset import Dataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.privacy import GaussianMechanism
from pfl.privacy.adaptive_clipping import AdaptiveClippingGaussianMechanism
from work import (
    BATCH,
    CLIENT_LR,
    NOISE_MULTIPLIER,
    SERVER_LR,
    SERVER_MOMENTUM,
    START_CLIP,
    Rounds,
    arguments,
    model_and_ids,
)


class Marks(TrainingProcessCallback):  # type: ignore[misc]
    """Tells of every round."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        """The model has been moved."""
        self.rounds.done()
        return False, Metrics()


class Unmeasured(PyTorchModel):  # type: ignore[misc]
    """pfl evaluates the cohort of its first round, before and after: left out, as nobody else evaluates."""

    def evaluate(self, *_: Any, **__: Any) -> Any:
        """Nothing."""
        return Metrics()


def main() -> None:
    """Train."""
    wanted = arguments()
    rounds = Rounds(wanted.device)
    device = pytorch_ops.get_default_device()
    if device.type != wanted.device:
        raise SystemExit(f"pfl chose {device.type}, not {wanted.device}")
    network, ids = model_and_ids(wanted.base, wanted.device)
    rounds.start()
    held = [torch.from_numpy(sequences).to(device) for sequences in ids]
    users = FederatedDataset(
        lambda user: Dataset(raw_data=[held[user]], user_id=str(user)),
        get_user_sampler("minimize_reuse", list(range(len(held)))),
    )
    network.loss = lambda batch: network(input_ids=batch, labels=batch).loss
    network.metrics = lambda batch: {}  # pfl wants them to be there
    trained = [param for param in network.parameters() if param.requires_grad]
    model = Unmeasured(
        network,
        torch.optim.SGD,
        torch.optim.SGD(trained, SERVER_LR, momentum=SERVER_MOMENTUM),
        amp_dtype=torch.bfloat16 if wanted.device == "cuda" else None,
    )
    privacy = AdaptiveClippingGaussianMechanism(
        lambda clip: GaussianMechanism(clip, NOISE_MULTIPLIER),
        initial_clipping_bound=START_CLIP,
        clipping_indicator_noise_stddev=max(0.1 * len(held), 2 * NOISE_MULTIPLIER),  # pfl wants more than the noise
        adaptive_clipping_norm_quantile=0.5,
    )
    federated = sum(param.numel() for param in model.variable_map.values())
    assert federated == sum(param.numel() for param in trained), "pfl federates the adapters and nothing else"
    rounds.ready(network, f"pfl {importlib.metadata.version('pfl')}, torch {torch.__version__}")
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=wanted.rounds,
            evaluation_frequency=10**6,
            train_cohort_size=len(held),
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=users, val_data=None, postprocessors=[privacy]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=CLIENT_LR, local_batch_size=BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=BATCH),
        callbacks=[Marks(rounds)],
    )


if __name__ == "__main__":
    main()
