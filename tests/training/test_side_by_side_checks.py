"""Which runs may train side by side, and what is said of those that share their noise."""

import pytest
import torch
from samples import cross_entropies, flat_training, linear_model, small_population
from torch import nn

from clipline import LocalSGD, run_together
from clipline.errors import SettingError
from clipline.training.side_by_side import SharedNoiseWarning

SMALL = small_population()


def training(seed, model=None, **changes):
    usual = {"rounds": 2, "cohort_size": 20, "local": LocalSGD(0.1, 8), "seed": seed, "noise_multiplier": 0.5}
    return flat_training(model or linear_model(), cross_entropies, SMALL, **{**usual, **changes})


def test_private_runs_that_share_their_noise_are_warned_of():
    with pytest.warns(SharedNoiseWarning, match="2 private runs have the seed 1"):
        run_together([training(1), training(1, local=LocalSGD(0.2, 8)), training(2)])
    run_together([training(1, noise_multiplier=0.0), training(1, noise_multiplier=0.0, local=LocalSGD(0.2, 8))])


def test_runs_that_differ_in_what_is_not_trained_do_not_run_side_by_side():
    def model(seed):
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).double()
        layers[0].requires_grad_(False)
        return layers

    with pytest.raises(SettingError, match="what is not trained in the model of training 1"):
        run_together([training(1, model(1)), training(2, model(2))])


def test_updates_are_watched_in_one_process_only():
    with pytest.raises(SettingError, match="workers=2 must be 1 where updates are watched"):
        run_together([training(1, workers=2), training(2)], unprivate_watch=lambda trainer: trainer)
