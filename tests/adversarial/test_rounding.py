"""In floating point too: a user's update is the same to the last bit, whoever else trains and wherever the user is."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from samples import one_by_one, rows_of
from torch import nn

from clipline import LocalSGD, Population
from clipline.engine.stacked.trainer import Stacked
from clipline.random.streams import Streams

USERS, FEATURES, CLASSES = 24, 36, 3
MODELS = {
    "linear": lambda: nn.Linear(FEATURES, CLASSES),
    "tanh": lambda: nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES)),
    "odd": lambda: nn.Sequential(
        nn.Linear(FEATURES, 33), nn.Tanh(), nn.Linear(33, 50), nn.Tanh(), nn.Linear(50, CLASSES)
    ),
    "wide": lambda: nn.Sequential(nn.Linear(FEATURES, 300), nn.ReLU(), nn.Linear(300, CLASSES)),
    "layer norm": lambda: nn.Sequential(nn.Linear(FEATURES, 32), nn.LayerNorm(32), nn.Linear(32, CLASSES)),
    "group norm": lambda: nn.Sequential(nn.Linear(FEATURES, 32), nn.GroupNorm(4, 32), nn.Linear(32, CLASSES)),
    "dropout": lambda: nn.Sequential(nn.Linear(FEATURES, 32), nn.Dropout(0.3), nn.GELU(), nn.Linear(32, CLASSES)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)
    ),
}


def losses(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def loss(model, batch):
    return losses(model, batch).mean()


def engine_of(kind, model, loss):
    rng = np.random.default_rng(3)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 45, USERS))])
    fields = {"x": rng.normal(size=(offsets[-1], FEATURES)).astype(np.float32), "y": rng.integers(0, 3, offsets[-1])}
    torch.manual_seed(0)
    # A rate at which training is unstable: whatever is rounded otherwise grows.
    plain = one_by_one(model(), loss, Population(offsets, fields), LocalSGD(5.0, 20), Streams(0))
    return plain if kind == "one-by-one" else Stacked(plain, USERS)


def updates(engine, users):
    """user -> update, of users who train together."""
    return dict(zip(users.tolist(), rows_of(engine, users), strict=True))


@pytest.mark.parametrize("loss", [losses, loss])
@pytest.mark.parametrize("engine", ["one-by-one", "stacked"])
@pytest.mark.parametrize(
    ("model", "threads"),
    # Several threads share only large products, sums and convolutions: those of these three.
    [*((model, 1) for model in MODELS), ("wide", 2), ("layer norm", 2), ("convolution", 2)],
)
def test_a_user_rounds_alike_whoever_else_trains(model, engine, loss, threads):
    torch.set_num_threads(threads)
    made, rng = engine_of(engine, MODELS[model], loss), np.random.default_rng(1)
    everybody = updates(made, np.arange(USERS))
    assert sum(float(update.norm()) > 1 for update in everybody.values()) > USERS / 2  # something is trained
    cohorts = [np.array([user]) for user in (0, 7)] + [
        np.sort(rng.choice(USERS, size, replace=False)) for size in (2, 3, 8, 23)
    ]
    for cohort in cohorts:
        for user, update in updates(made, cohort).items():
            assert torch.equal(update, everybody[user]), (user, len(cohort))


def at_zero(model, rng):
    """An example at which the first unit is 0 but for rounding, and all others are far below."""
    weight, bias = (one.detach().double().numpy() for one in (model[0].weight, model[0].bias))
    units, inputs = weight.shape
    target = np.where(np.arange(units) == 0, 0.0, -5.0)
    free = np.linalg.svd(weight)[2][units:]
    x = (np.linalg.pinv(weight) @ (target - bias) + 30 * rng.normal(size=len(free)) @ free).astype(np.float32)
    for place in (int(np.argmax(np.abs(weight[0]))), *rng.integers(inputs, size=5)):
        x[place] -= np.float32((x.astype(np.float64) @ weight[0] + bias[0]) / weight[0, place])
    return x


def test_at_a_kink_where_one_bit_flips_a_whole_update_all_places_and_cohorts_round_alike():
    """Row 17 of the soundness page. Where MKL_CBWR is empty, 32 of these 40 examples are rounded by place."""
    torch.manual_seed(0)
    model, rng = nn.Sequential(nn.Linear(41, 37), nn.ReLU(), nn.Linear(37, CLASSES)), np.random.default_rng(0)
    fields = {"x": np.zeros((192, 41), np.float32), "y": np.zeros(192, np.int64)}
    made = Stacked(one_by_one(model, losses, Population(2 * np.arange(97), fields), LocalSGD(1.0, 2), Streams(0)), 96)
    assert not made.rounds_by_company
    for _ in range(40):
        fields["x"][:] = at_zero(model, rng)
        rows = torch.cat([rows_of(made, np.arange(96)), rows_of(made, np.arange(1, 96))])
        assert torch.equal(rows, rows[:1].expand_as(rows))
