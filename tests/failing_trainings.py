"""Trainings that fail and trainings that do not, each a second of work; run as a program this writes their page.

docs/results/failing.md has a row for each. tests/training/test_failing_trainings.py makes them again and compares.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import clipline as cl
from clipline.engine.trial_warnings import DivergingRateWarning

USERS, TESTERS, EXAMPLES, FEATURES, CLASSES = 600, 200, 8, 12, 5


@dataclass(frozen=True)
class Data:
    train: cl.Population
    test: cl.Population


@cache
def classes(constant: bool = False, broken: float = 0.0, one_each: bool = False) -> Data:
    """Five classes by a linear rule with noise; of a share `broken` of users the loss is not a number."""
    rng = np.random.default_rng(5)
    ids = np.repeat(np.arange(USERS + TESTERS), EXAMPLES)
    x = rng.normal(size=(len(ids), FEATURES)).astype(np.float32)
    truth = rng.normal(size=(FEATURES, CLASSES))
    y = (x @ truth + rng.normal(size=(len(ids), CLASSES)) + np.arange(CLASSES) / 4).argmax(axis=1)
    if constant:
        y[:] = 1
    trains = ids < USERS
    weight = np.where(ids % 100 < 100 * broken, -1, 1).astype(np.float32)
    made = [
        cl.Population.one_each(x=x[rows], y=y[rows], weight=weight[rows]) if one_each
        else cl.Population.from_arrays(ids[rows], x=x[rows], y=y[rows], weight=weight[rows])
        for rows in (trains, ~trains)
    ]  # fmt: skip
    return Data(*made)


@cache
def numbers() -> Data:
    """A number to come near to, by the same kind of rule."""
    rng = np.random.default_rng(6)
    ids = np.repeat(np.arange(USERS + TESTERS), EXAMPLES)
    x = rng.normal(size=(len(ids), FEATURES)).astype(np.float32)
    y = (x[:, :6].sum(axis=1) + 0.5 * rng.normal(size=len(ids))).astype(np.float32)
    trains = ids < USERS
    return Data(*(cl.Population.from_arrays(ids[rows], x=x[rows], y=y[rows]) for rows in (trains, ~trains)))


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return losses * batch["weight"].sqrt()


def accuracy(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """As a task file has it: with what would do without a model."""
    y = batch["y"]
    shares = {f"share_{name}": (y == name).float() for name in range(CLASSES)}
    return {"accuracy": (model(batch["x"]).argmax(dim=1) == y).float(), **shares}


def square(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]).squeeze(1) - batch["y"]) ** 2


def error(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    y = batch["y"]
    return {"absolute_error": (model(batch["x"]).squeeze(1) - y).abs(), "baseline_error": y.abs()}


def network(outputs: int = CLASSES, hidden: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def linear(outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, outputs)


def trained(
    data: Data | None = None, model: nn.Module | None = None, *, loss: Any = cross_entropy, metric: Any = accuracy,
    rounds: int = 40, client_lr: float = 0.3, server: Any = None, clip: Any = None, z: float = 0.3, every: int = 5,
    **privacy: Any,
) -> cl.TrainResult:  # fmt: skip
    """A short training with settings that work, but for what is given."""
    data = classes() if data is None else data
    torch.set_num_threads(1)
    with warnings.catch_warnings():  # the page is about what is found afterwards
        warnings.simplefilter("ignore", DivergingRateWarning)
        training = cl.Training(
            network() if model is None else model, loss, data.train, rounds=rounds, cohort_size=60, clip=clip, seed=3,
            server=cl.ServerSGD(1.0, momentum=0.5) if server is None else server,
            local=cl.LocalSGD(lr=client_lr, batch_size=8), privacy=cl.Privacy(noise_multiplier=z, **privacy),
        )  # fmt: skip
    evaluate = cl.Evaluate(data.test, metric, every=every)
    evaluate.reads_guarantee = False  # accounting takes longer than these rounds
    return training.run([evaluate])


FAILING: dict[str, Callable[[], cl.TrainResult]] = {
    "server rate 1 under noise of 1.2 clips": lambda: trained(
        model=network(hidden=400), z=0.8, rounds=80, server=cl.ServerSGD(1.0)
    ),
    "server rate 100": lambda: trained(server=cl.ServerSGD(100.0), rounds=50),
    "users' rate 1e4": lambda: trained(client_lr=1e4),
    "users' rate 1e-5": lambda: trained(client_lr=1e-5, clip=cl.FixedClip(1.0), z=0.01),
    "noise of 5 clips": lambda: trained(z=18.0),
    "clip from 1e-6": lambda: trained(clip=cl.QuantileClip(start=1e-6)),
    "clip from 0.01, users' rate 10; the model learned": lambda: trained(
        clip=cl.QuantileClip(start=0.01), client_lr=10.0, rounds=60
    ),
    "clip from 1e6": lambda: trained(clip=cl.QuantileClip(start=1e6)),
    "loss of 9 users of 10 not a number": lambda: trained(classes(broken=0.9)),
    "all labels the same": lambda: trained(classes(constant=True)),
    "quantile 0.99, noise 2": lambda: trained(clip=cl.QuantileClip(0.99), rounds=60, z=2.0, server=cl.ServerSGD(3.0)),
    "too few rounds": lambda: trained(rounds=20, client_lr=0.02, clip=cl.FixedClip(0.2), z=0.1, every=2),
    "no budget for one round": lambda: trained(max_epsilon=0.01),
}
HEALTHY: dict[str, Callable[[], cl.TrainResult]] = {
    "median": lambda: trained(),
    "median, noise 1": lambda: trained(z=1.0),
    "quantile 0.1": lambda: trained(clip=cl.QuantileClip(0.1), rounds=70),
    "quantile 0.9": lambda: trained(clip=cl.QuantileClip(0.9)),
    "fixed clip": lambda: trained(clip=cl.FixedClip(0.3)),
    "no noise": lambda: trained(z=0.0),
    "no noise, no clip": lambda: trained(clip=cl.FixedClip(float("inf")), z=0.0),
    "linear": lambda: trained(model=linear()),
    "single examples": lambda: trained(
        classes(one_each=True), linear(), server=cl.ServerSGD(4.0, momentum=0), rounds=50, z=0.5
    ),
    "regression": lambda: trained(numbers(), network(1), loss=square, metric=error, client_lr=0.05),
    "linear regression": lambda: trained(numbers(), linear(1), loss=square, metric=error, client_lr=0.02),
    "Adam at the server": lambda: trained(server=cl.ServerAdam(0.03)),
}


PAGE = Path(__file__).parents[1] / "docs" / "results" / "failing.md"
_ABOUT = """# Trainings that fail, and what is said of them

A test makes each of these trainings and compares what it gets with this page, so the two cannot differ.
`python tests/failing_trainings.py` writes the page. Numbers may differ from machine to machine, and the test leaves
them out; the sentences may not. [If it does not learn](../howto/learning.md#at-the-end) has the rules.

600 users of 8 examples train a network of 293 parameters, 60 users a round, over 20 to 80 rounds.
The seed is 3, and 200 other users are measured on.
"""


def row(name: str, result: cl.TrainResult) -> str:
    said = "<br>".join(map(str, result.findings)) or "nothing"
    return f"| {name} | {said} |"


def write_page() -> None:
    parts = [_ABOUT]
    for title, table in (("Failing", FAILING), ("Healthy", HEALTHY)):
        parts += [f"## {title}\n", "| training | what is said |\n| --- | --- |"]
        parts += [row(name, make()) for name, make in table.items()]
        parts[-1] += "\n"
    PAGE.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    write_page()
