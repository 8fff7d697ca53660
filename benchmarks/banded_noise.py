"""What does banded noise add to a round of emnist_cr on cores? Processor time of the mechanism's step.

Peer: the step with independent noise, by turns.

    python benchmarks/banded_noise.py [--cohort 10] [--turns 5] [--record]

Nothing else of a round differs, so that the difference is set beside a whole round of generated users, by one process
and one thread. Each step has as much earlier noise as there are bands.
"""

from __future__ import annotations

import argparse
import statistics
import time

import recording
import torch

import clipline
from clipline.federated.clipping import ClippedSum
from clipline.federated.draws import NoiseNow, PlainDraws
from clipline.federated.mechanism import BandedMechanism, GaussianMechanism
from clipline.privacy.events import GroupedPoissonSampling, PoissonSampling
from clipline.random.streams import Streams
from clipline.training.loop import one_round

BANDS, PARAMETERS, ROUNDS, COHORT = (1, 8, 16, 32), 1_206_590, 150, 100


class Mechanism:
    """The mechanism's steps, one after the other, with noise that was drawn before."""

    def __init__(self, bands: int) -> None:
        self.made = GaussianMechanism(COHORT, 1.0, 5.0)
        self.sampling: PoissonSampling | GroupedPoissonSampling = PoissonSampling(0.02)
        if bands > 1:
            self.made = BandedMechanism(COHORT, 1.0, 5.0, bands=bands, rounds=ROUNDS)
            self.sampling = GroupedPoissonSampling(0.02, bands)
        self.state, self.done = self.made.begin(0), 0
        for _ in range(bands):
            self.seconds()

    def seconds(self) -> float:
        """Processor time of one step."""
        drawn = torch.ones(PARAMETERS + 1, dtype=torch.float64)
        noise = NoiseNow(Streams(0).noise(self.done), PARAMETERS + 1)
        noise.numbers = lambda: drawn  # type: ignore[method-assign]
        total = ClippedSum(torch.zeros(PARAMETERS + 1, dtype=torch.float64), 1.0, self.sampling)
        begun = time.process_time()
        _, self.state = self.made.step(total, noise, self.state, self.done)
        spent = time.process_time() - begun
        self.done += 1
        return spent


class Rounds:
    """Whole rounds, one after the other."""

    def __init__(self, cohort: int) -> None:
        task = clipline.task_named("emnist_cr")
        given = {"workers": 1, "rounds": ROUNDS, "cohort_size": cohort,
                 "population_size": 40 * cohort, "device": "cpu"}  # fmt: skip
        self.training = task.training(task.settings.overridden(given, "the benchmark"))
        problem = self.training.problem
        self.draws = PlainDraws(
            self.training.algorithm.sampler, problem.runs[0].streams, self.training.dim, problem.device
        )
        self.state = self.training.init()

    def seconds(self) -> float:
        """Processor time of one round for each user in it: cohorts differ in size."""
        t = self.state.round_index
        users = len(self.training.algorithm.sampler.draw(self.training.problem.runs[0].streams.sampling(t), t).users)
        begun = time.process_time()
        self.state, _ = one_round(self.training.algorithm, self.state, self.draws, self.training.backend)
        return (time.process_time() - begun) / max(users, 1)


def main() -> None:
    """Measure, print, and keep the answer if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = {bands: Mechanism(bands) for bands in BANDS}
    alone = {bands: list[float]() for bands in BANDS}
    for _ in range(3 * arguments.turns):
        for bands, step in steps.items():
            alone[bands].append(step.seconds())
    step_ms = {bands: 1e3 * statistics.median(times) for bands, times in alone.items()}
    del steps
    draw = Streams(0).noise(0)
    begun = time.process_time()
    draw.standard_normal(PARAMETERS + 1)
    drawing = 1e3 * (time.process_time() - begun)

    made = Rounds(arguments.cohort)
    with made.training.backend.running():
        user_ms = 1e3 * statistics.median(made.seconds() for _ in range(arguments.turns))
    round_ms = user_ms * arguments.cohort
    rows = [
        (bands, f"{step_ms[bands]:.1f} ms", f"{step_ms[bands] - step_ms[1]:.1f} ms",
         f"{100 * (step_ms[bands] - step_ms[1]) / round_ms:.1f}%")
        for bands in BANDS
    ]  # fmt: skip
    body = recording.table(("bands", "the mechanism's step", "more than without", "of a round"), rows)
    body += (
        f"\n\nA round of emnist_cr with {arguments.cohort} generated users takes {round_ms / 1e3:.2f} s, of which "
        f"{drawing:.0f} ms to draw its noise. Processor time, {recording.machine('cpu')}."
    )
    print(body)
    if arguments.record:
        recording.record("Banded noise", body)


if __name__ == "__main__":
    main()
