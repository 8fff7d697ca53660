"""What callbacks measure between rounds does not reach the training."""

from concurrent.futures import ThreadPoolExecutor

import torch
from samples import cross_entropies, flat_training, linear_model, small_population
from torch import nn

from clipline import LocalSGD
from clipline.training.callbacks import Callback

SMALL = small_population()


class Measure(Callback):
    """Calls `metrics(model)` after every round, in the background."""

    def __init__(self, metrics):
        self._metrics = metrics

    def on_start(self, training, state):
        self._training, self._thread = training, ThreadPoolExecutor(1)

    def measure(self, state, *, last):
        return self._thread.submit(lambda: self._metrics(self._training.model_at(state)))

    def close(self):
        self._thread.shutdown()


def training(model=None, **changes):
    usual = {"rounds": 2, "cohort_size": 20, "local": LocalSGD(0.1, 8), "seed": 1, "noise_multiplier": 0.5}
    return flat_training(model or linear_model(), cross_entropies, SMALL, **{**usual, **changes})


def test_who_measures_a_model_cannot_change_the_training():
    def spoil(model):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        return {"zero": 0.0}

    quiet = training().run([Measure(lambda model: {"zero": 0.0})])
    loud = training().run([Measure(spoil)])
    assert torch.equal(quiet.state.params, loud.state.params)
    assert quiet.state.params.any()
    assert [report.metrics for report in loud.reports] == [{"zero": 0.0}] * 2


def test_measuring_beside_the_training_does_not_disturb_what_draws_from_torchs_generator():
    class Loose(nn.Linear):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5, self.training))

    def run(metrics):
        torch.manual_seed(0)
        model = Loose(6, 3).double()
        return training(model, rounds=6, engine="one-by-one").run([Measure(metrics)]).state.params

    quiet = run(lambda model: {"nothing": 0.0})
    for _ in range(3):
        assert torch.equal(run(lambda model: {"noise": float(torch.rand(2000).sum())}), quiet)
