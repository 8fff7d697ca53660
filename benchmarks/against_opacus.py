"""How long is an epoch of example-level DP-SGD by clipline and by Opacus? Peer: Opacus, by hooks and by ghost norms.

    python benchmarks/against_opacus.py [--record] [--turns 3] [--threads 2] [--models logistic cnn]
    pip install --no-deps opacus opt_einsum         first; the rest of what it needs is here

Same made-up data (60,000 images of 28 x 28), model, expected batch (256, by Poisson sampling), clip, noise and learning
rate. *logistic*: one linear layer, 784 to 10. *cnn*: two convolutions and two linear layers, as in Opacus' example for
MNIST. All in one process, by turns; of each the least time counts, as other processes only ever add. A turn of ours is
`Training.run()` as it is, with the accounting at its end; one of Opacus' is the loop that its documentation shows. The
epsilons are those of the same noise. At the end all train a small learnable set, and their accuracies are compared.

Last result (2026-11-16, x86_64, 1 of 2 cores, torch 2.13, Opacus 1.6): logistic 0.58 s an epoch, Opacus 1.39 by hooks
and 0.70 by ghost norms; cnn 7.4 s, Opacus 12.2 and 12.8. Epsilon of ten epochs 1.1013; Opacus 1.1114 (PRV), 1.3534
(RDP). On busy cores give --threads 1: with more, all systems wait for threads that have no core.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import recording
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import clipline as cl

EXAMPLES, BATCH, CLIP, NOISE, RATE, DELTA = 60_000, 256, 1.0, 1.0, 0.5, 1e-5
STEPS = {"logistic": 235, "cnn": 60}  # of a turn; 235 are an epoch
SYSTEMS = ("clipline", "Opacus, hooks", "Opacus, ghost")


class SmallCNN(nn.Module):
    """Two convolutions, each with a pool, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 8, 2, padding=3), nn.Conv2d(16, 32, 4, 2)
        self.fc1, self.fc2 = nn.Linear(512, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 1, 28, 28) -> (batch, 10)."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "logistic": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
    "cnn": SmallCNN,
}


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Made-up images: one of ten fixed patterns each, under noise."""
    rng, patterns = np.random.default_rng(seed), np.random.default_rng(2021).normal(size=(10, 1, 28, 28))
    y = rng.integers(0, 10, count)
    x = 0.06 * patterns[y] + 0.5 * rng.normal(size=(count, 1, 28, 28))
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """One number for each example."""
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


@dataclass(frozen=True)
class Work:
    """What is trained."""

    model: str
    x: Tensor
    y: Tensor
    batch: int
    steps: int
    seed: int = 0


def ours(work: Work) -> Callable[[], nn.Module]:
    """Train `steps` rounds; gives the model."""
    torch.manual_seed(work.seed)
    training = cl.Training(
        MODELS[work.model](),
        losses,
        cl.Population.one_each(x=work.x.numpy(), y=work.y.numpy()),
        rounds=work.steps,
        cohort_size=work.batch,
        local=cl.LocalSGD(lr=1.0),
        clip=cl.FixedClip(CLIP),
        server=cl.ServerSGD(RATE, momentum=0.0),
        privacy=cl.Privacy(noise_multiplier=NOISE, delta=DELTA, population_size=len(work.y)),
    )
    print(f"# {training.engine}", flush=True)
    return lambda: training.run().model


def opacus(work: Work, mode: str) -> Callable[[], nn.Module]:
    """The same by Opacus."""
    from opacus import PrivacyEngine

    torch.manual_seed(work.seed)
    model = MODELS[work.model]()
    loader = DataLoader(TensorDataset(work.x, work.y), batch_size=work.batch)
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), RATE),
        data_loader=loader,
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        grad_sample_mode=mode,
    )
    private, optimizer, loader = made[0], made[1], made[-1]
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()

    def train() -> nn.Module:
        batches = itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), work.steps)
        for x, y in batches:
            optimizer.zero_grad()
            criterion(private(x), y).backward()
            optimizer.step()
        return private

    return train


def made(system: str, work: Work) -> Callable[[], nn.Module]:
    """The training of one system, ready to run."""
    return ours(work) if system == "clipline" else opacus(work, system.split()[-1])


def epoch_seconds(model: str, turns: int) -> dict[str, float]:
    """The least time of an epoch by each system, measured by turns."""
    x, y = images(EXAMPLES, 0)
    runs = {system: made(system, Work(model, x, y, BATCH, STEPS[model])) for system in SYSTEMS}
    taken: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for turn in range(turns + 1):  # the first warms up
        for system in SYSTEMS[turn % 3 :] + SYSTEMS[: turn % 3]:
            begin = time.perf_counter()
            runs[system]()
            taken[system].append((time.perf_counter() - begin) * EXAMPLES / BATCH / STEPS[model])
        print(f"# {model}, turn {turn}: " + ", ".join(f"{name} {times[-1]:.2f} s" for name, times in taken.items()))
    return {system: min(times[1:]) for system, times in taken.items()}


def epsilons() -> dict[str, float]:
    """What ten epochs of the same noise cost, by each accountant."""
    from opacus.accountants import PRVAccountant, RDPAccountant

    rate, rounds = BATCH / EXAMPLES, 10 * STEPS["logistic"]
    population = cl.Population.one_each(x=np.zeros((EXAMPLES, 1), np.float32))
    training = cl.Training(
        nn.Linear(1, 1), lambda model, batch: model(batch["x"])[:, 0], population, rounds=rounds, cohort_size=BATCH,
        local=cl.LocalSGD(lr=1.0), clip=cl.FixedClip(CLIP),
        privacy=cl.Privacy(noise_multiplier=NOISE, delta=DELTA, population_size=EXAMPLES),
    )  # fmt: skip
    found = {"clipline": training.planned.epsilon}
    for name, kind in (("Opacus, PRV", PRVAccountant), ("Opacus, RDP", RDPAccountant)):
        accountant = kind()
        accountant.history = [(NOISE, rate, rounds)]
        found[name] = accountant.get_epsilon(DELTA)
    return found


def accuracies(seeds: int) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation, over seeds, of the accuracy on new examples after training on a small set."""
    test_x, test_y = images(4000, 1)
    found = {}
    for system in SYSTEMS:
        reached = []
        for seed in range(seeds):
            x, y = images(6000, 2)
            model = made(system, Work("logistic", x, y, 128, 150, seed))()
            with torch.no_grad():
                reached.append(float((model(test_x).argmax(dim=1) == test_y).double().mean()))
        found[system] = statistics.mean(reached), statistics.stdev(reached)
    return found


def opacus_version() -> str:
    """The version that was measured."""
    from importlib.metadata import version

    return version("opacus")


def main() -> None:
    """Measure, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    wanted = parser.parse_args()
    warnings.simplefilter("ignore")  # Opacus warns of its own hooks, and of noise that is not from a secure generator
    torch.set_num_threads(wanted.threads)
    rows = []
    for model in wanted.models:
        seconds = epoch_seconds(model, wanted.turns)
        least = seconds["clipline"]
        ratios = [one / least for one in seconds.values()][1:]
        rows.append((model, *(f"{one:.2f}" for one in [*seconds.values(), *ratios])))
    text = recording.table(
        ("model", *(f"{name}, s an epoch" for name in SYSTEMS), "hooks / ours", "ghost / ours"), rows
    )
    text += "\n\nEpsilon of ten epochs at delta 1e-5: " + ", ".join(f"{k} {v:.4f}" for k, v in epsilons().items())
    text += ". Accuracy on new examples of a small set, mean and standard deviation over seeds: "
    text += ", ".join(f"{k} {mean:.3f} ({spread:.3f})" for k, (mean, spread) in accuracies(wanted.seeds).items()) + "."
    print(text)
    if wanted.record:
        about = f"`{recording.command_line()}`, {recording.machine('cpu')}, Opacus {opacus_version()}; least of turns."
        threads = f"{wanted.threads} thread{'' if wanted.threads == 1 else 's'}"
        recording.record(f"Example-level privacy, against Opacus, {threads}", f"{about}\n\n{text}")


if __name__ == "__main__":
    main()
