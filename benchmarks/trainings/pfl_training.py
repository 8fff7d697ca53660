"""pfl-research's training on the users of a store: federated averaging with its adaptive clipping, one process."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
from marks import Marks, arguments


def main() -> None:
    """Train, and tell of every round."""
    wanted, marks = arguments(), Marks()
    import importlib.metadata
    import itertools
    import json
    from functools import lru_cache
    from typing import Any

    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.dataset import Dataset
    from pfl.hyperparam import HyperParam, NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops import pytorch_ops
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy import GaussianMechanism
    from pfl.privacy.adaptive_clipping import AdaptiveClippingGaussianMechanism
    from torch_models import MODELS, tensors_of
    from users import StoredUsers
    from workload import dense_arrays

    class CohortSize(HyperParam, TrainingProcessCallback):  # type: ignore[misc]
        """The size of the next cohort; marks the end of a round."""

        def __init__(self) -> None:
            self.round = 0

        def value(self) -> int:
            return len(cohorts[self.round])

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            if device.type == "cuda":
                torch.cuda.synchronize()
            marks.round()
            self.round = min(self.round + 1, len(cohorts) - 1)
            return False, Metrics()

    class Unmeasured(PyTorchModel):  # type: ignore[misc]
        """pfl evaluates the cohort of its first round, before and after: left out, as nobody else evaluates."""

        def evaluate(self, *_: Any, **__: Any) -> Any:
            return Metrics()

    settings, device = wanted.settings, pytorch_ops.get_default_device()
    if device.type != wanted.device:
        raise SystemExit(f"pfl chose {device.type}, not {wanted.device}")
    users = StoredUsers(Path(wanted.store), even=wanted.even, max_examples=settings["max_examples"])

    @lru_cache(maxsize=None if wanted.task != "so_lr" else 500)  # dense posts of all users would fill 5 GB
    def dataset(user: int) -> Any:
        arrays = dense_arrays(wanted.task, users.fields(user))
        return Dataset(raw_data=[tensor.to(device) for tensor in tensors_of(*arrays)], user_id=str(user))

    cohorts = json.loads(wanted.cohorts.read_text())
    one_by_one, cohort_size = itertools.chain.from_iterable(cohorts), CohortSize()
    population = FederatedDataset(dataset, lambda: next(one_by_one))
    network = MODELS[wanted.task]()
    network.metrics = lambda x, y: {}  # pfl wants them to be there
    network.to(device)
    central = torch.optim.SGD(network.parameters(), settings["server_lr"], momentum=settings["server_momentum"])
    amp_dtype = torch.bfloat16 if wanted.precision == "bf16" else None
    model = Unmeasured(network, torch.optim.SGD, central, amp_dtype=amp_dtype)
    privacy = AdaptiveClippingGaussianMechanism(
        lambda clip: GaussianMechanism(clip, settings["noise_multiplier"]),
        initial_clipping_bound=settings["clip_start"],
        clipping_indicator_noise_stddev=0.1 * wanted.users,
        adaptive_clipping_norm_quantile=0.5,
    )
    marks.ready(f"pfl {importlib.metadata.version('pfl')}, torch {torch.__version__}")
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=wanted.rounds,
            evaluation_frequency=10**6,
            train_cohort_size=cohort_size,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=population, val_data=None, postprocessors=[privacy]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=settings["client_lr"],
            local_batch_size=settings["batch_size"],
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=settings["batch_size"]),
        callbacks=[cohort_size],
    )
    for parameter in network.parameters():
        parameter.detach().cpu()
    marks.result()


if __name__ == "__main__":
    main()
