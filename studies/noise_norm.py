"""How much noise on the mean update a training bears, on handwriting: evidence for the words of `clipline plan`.

python studies/noise_norm.py [--classes 10] [--rounds 150]

Each run trains with noise whose norm on the mean update is so many clips, at several server rates, of which the best
counts. The run without noise also shows how long the mean update is, in clips: users are generated, so nothing private
is shown. Takes a quarter of an hour on two cores; docs/howto/plan.md has what it printed.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

import clipline as cl
from clipline.federated.mechanism import Release
from clipline.federated.server_optimisers import ServerState
from clipline.privacy import DeltaNoise, join_noise
from clipline.tasks.task import LoadedTask, Task

USERS, COHORT = 4_000, 100
RATIOS = (0.0, 0.5, 1.0, 2.0, 4.0)  # norm of the noise on the mean update, in clips
RATES = (1.0, 0.3, 0.1, 0.03, 0.01)  # of the server


@dataclass(frozen=True)
class Measured:
    """A server optimiser that writes down the norm of every released mean before the one inside takes it."""

    inner: cl.ServerSGD
    norms: list[float] = field(default_factory=list)

    def init(self, params: Tensor) -> ServerState:
        """As the one inside."""
        return self.inner.init(params)

    def update(self, params: Tensor, state: ServerState, release: Release) -> tuple[Tensor, ServerState]:
        """As the one inside."""
        self.norms.append(float(release.mean.norm()))
        return self.inner.update(params, state, release)


def trained(loaded: LoadedTask, task: Task, rounds: int, ratio: float, rate: float) -> tuple[float, list[float]]:
    """Accuracy on other users, and the norm of every released mean in clips."""
    model = loaded.make(0)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    delta_noise, count_stddev = DeltaNoise(ratio * COHORT / math.sqrt(parameters)), float(COHORT)
    server = Measured(cl.ServerSGD(rate))
    result = cl.Training(
        model,
        loaded.loss,
        loaded.population,
        rounds=rounds,
        cohort_size=COHORT,
        local=cl.LocalSGD(lr=task.settings.client_lr, batch_size=task.settings.batch_size),
        clip=cl.QuantileClip(0.5, start=0.35),
        server=server,
        privacy=cl.Privacy(noise_multiplier=join_noise(delta_noise, count_stddev), count_stddev=count_stddev),
        seed=1,
    ).run()
    clips = [report.clip for report in result.reports]
    accuracy = loaded.evaluate(result.model)["accuracy"]
    return accuracy, [norm / clip for norm, clip in zip(server.norms, clips, strict=True)]


def main() -> None:
    """Print a line for every noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=150)
    given = parser.parse_args()
    torch.set_num_threads(1)
    task = cl.task_named("handwriting")
    loaded = task.load(task.settings.overridden({"population_size": USERS, "classes": given.classes}, "this script"))
    print(
        f"{sum(p.numel() for p in loaded.make(0).parameters()):,} parameters, {given.rounds} rounds of {COHORT} users"
    )
    for ratio in RATIOS:
        runs = {rate: trained(loaded, task, given.rounds, ratio, rate) for rate in RATES if ratio > 0 or rate == 1.0}
        shown = ", ".join(f"{accuracy:.3f} at rate {rate:g}" for rate, (accuracy, _) in runs.items())
        print(f"noise of {ratio:g} clips: {shown}", flush=True)
        if ratio == 0:
            norms = runs[1.0][1]
            quarters = [norms[len(norms) * k // 4 : len(norms) * (k + 1) // 4] for k in range(4)]
            means = ", ".join(f"{sum(part) / len(part):.2f}" for part in quarters)
            print(f"  the mean update is {norms[0]:.2f} clips long in the first round; by quarters {means}", flush=True)


if __name__ == "__main__":
    main()
