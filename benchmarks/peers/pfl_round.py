"""pfl-research's rounds: federated averaging with its adaptive clipping (Andrew et al.) at the server."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import protocol
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.dataset import Dataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy import GaussianMechanism
from pfl.privacy.adaptive_clipping import AdaptiveClippingGaussianMechanism
from torch_models import MODELS, tensors_of
from workload import NOISE_MULTIPLIER, SERVER_MOMENTUM, WORKLOADS, dense_arrays, user_fields


class Timing(TrainingProcessCallback):  # type: ignore[misc]
    """Tells the clock where a round begins and ends."""

    def __init__(self, clock: protocol.Clock, cuda: bool) -> None:
        self.clock = clock
        self.synchronise = torch.cuda.synchronize if cuda else None

    def on_train_begin(self, *, model: Any) -> Any:
        """Wait for the first round."""
        self.clock.go()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        """The model has been moved: wait for the next round, or stop."""
        self.clock.done(self.synchronise)
        return not self.clock.go(), Metrics()


def main() -> None:
    """Serve rounds."""
    wanted = protocol.arguments()
    clock = protocol.Clock()
    work, device = WORKLOADS[wanted.task], pytorch_ops.get_default_device()
    if device.type != wanted.device:
        raise SystemExit(f"pfl chose {device.type}, not {wanted.device}")
    held = [
        [tensor.to(device) for tensor in tensors_of(*dense_arrays(wanted.task, user_fields(wanted.task, user)))]
        for user in range(wanted.users)
    ]
    users = FederatedDataset(
        lambda user: Dataset(raw_data=held[user], user_id=str(user)),
        get_user_sampler("minimize_reuse", list(range(wanted.users))),
    )
    # pfl wants `metrics` too; it measures the cohort in round 0, which is a warm-up.
    network = MODELS[wanted.task]()
    network.metrics = lambda x, y: {"loss": Weighted(network.loss(x, y).item(), 1)}
    network.to(device)
    model = PyTorchModel(
        network,
        torch.optim.SGD,
        torch.optim.SGD(network.parameters(), work.server_lr, momentum=SERVER_MOMENTUM),
        amp_dtype=torch.bfloat16 if wanted.precision == "bf16" else None,
    )
    privacy = AdaptiveClippingGaussianMechanism(
        lambda clip: GaussianMechanism(clip, NOISE_MULTIPLIER),
        initial_clipping_bound=work.clip,
        clipping_indicator_noise_stddev=0.1 * wanted.users,
        adaptive_clipping_norm_quantile=0.5,
    )
    clock.ready(f"pfl {importlib.metadata.version('pfl')}, torch {torch.__version__}")
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=wanted.warmups + wanted.rounds + 1,
            evaluation_frequency=10**6,
            train_cohort_size=wanted.users,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=users, val_data=None, postprocessors=[privacy]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=work.client_lr, local_batch_size=work.batch_size
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=work.examples),
        callbacks=[Timing(clock, device.type == "cuda")],
    )
    clock.close(torch.cuda.max_memory_allocated() if device.type == "cuda" else None)


if __name__ == "__main__":
    main()
