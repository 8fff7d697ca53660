"""What do encoded uploads and secure sums cost in accuracy, noise and bytes? Each beside the plain upload, by seed.

    python studies/uploads.py --processes 15 --seconds 300  # what studies/uploads/runs.jsonl lacks; 4 minutes a seed
    python studies/uploads.py --task so_lr                  # of one task
    python studies/uploads.py --write                       # docs/results/uploads.md and uploads.png, from the runs

All runs of a task have the same privacy for outsiders. Runs of one seed have the same first model and the same cohorts.
`so_lr` trains on real users: `python studies/data/convert.py articles --from ../shared/data/stackoverflow_lr
--to benchmarks/.stores/articles` makes its store. A process is a thread; PyTorch, NumPy and SciPy are enough for runs.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

import clipline as cl
from clipline.data import open_store
from clipline.federated.backend import Backend, CohortRequest
from clipline.federated.clipping import ClippedSum
from clipline.federated.discrete_mechanism import DiscreteMechanism
from clipline.federated.mechanism import GaussianMechanism
from clipline.federated.round import Algorithm
from clipline.federation.encoders import KeptShare, RotatedLevels, packed
from clipline.federation.simulated import UploadBackend
from clipline.layers import BagLinear
from clipline.plotting import PALETTE, new_figure, plain_log_labels, save_figure
from clipline.tasks import Batch, Counts, LoadedTask, Task, TrainSettings, evaluator, initialised
from clipline_paper.tasks import so_lr

RUNS = Path(__file__).parent / "uploads" / "runs.jsonl"
ARTICLES = Path(__file__).parents[1] / "benchmarks" / ".stores" / "articles"
PAGE = Path(__file__).parents[1] / "docs" / "results" / "uploads.md"
PICTURE = PAGE.with_suffix(".png")
Key = tuple[str, str, int]  # task, upload, seed
Runs = dict[Key, dict[str, Any]]
DROPS = "plain, one in ten drops out"
DROPPING = 0.1  # of the clients that were asked
KEYS, BOX, SHARE = 64, 160, 66  # bytes of a client's messages in a secure sum, as in federation/secure_sum.py


@dataclass(frozen=True)
class Dropping:
    """An upload that one client in ten does not send. Others fill up a small cohort with vectors of zero."""

    upload: Any
    share: float = DROPPING

    def simulated(self, training: cl.Training) -> tuple[Algorithm, Backend]:
        """Algorithm and backend of a training whose users upload in this way."""
        algorithm, backend = self.upload.simulated(training)
        assert isinstance(backend, UploadBackend)
        inner, seed, least = backend.total, training.seed or 0, getattr(self.upload, "least_survivors", None) or 0

        def total(request: CohortRequest, vectors: Iterator[Tensor]) -> ClippedSum:
            asked = max(training.cohort_size, len(request.cohort.users))
            stays = np.random.default_rng([seed, request.round_index]).random(asked) >= self.share
            assert stays.sum() >= least, "a real server would abandon this round"
            fill = repeat(torch.zeros(training.dim + 1, dtype=torch.float64), asked - len(request.cohort.users))
            kept = (vector for vector, here in zip(chain(vectors, fill), stays, strict=True) if here)
            return inner(request, kept)

        return algorithm, replace(backend, total=total)


WORDS, TAGS = 500, 50  # of the 10,000 and 500, the most common ones


class FewTags(nn.Module):
    """The paper's model of fewer words and tags; 25,050 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tags = BagLinear(WORDS, TAGS)

    def forward(self, words: Tensor, weights: Tensor) -> Tensor:
        """(batch, 128) word numbers and weights -> (batch, 50) logits."""
        logits: Tensor = self.tags(words, weights * (words < WORDS))
        return logits


def scores(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits of the tags, and which are true: (batch, 50) each."""
    logits = model(batch["words"], batch["weights"])
    return logits, so_lr.multi_hot(batch["tags"], logits)[:, :TAGS]


def tag_loss(model: nn.Module, batch: Batch) -> Tensor:
    """(batch,): as the paper's, mean over the tags."""
    return F.binary_cross_entropy_with_logits(*scores(model, batch), reduction="none").sum(dim=1) / TAGS


def recall(model: nn.Module, batch: Batch) -> Counts:
    """True tags among the five highest scores, and true tags."""
    logits, true = scores(model, batch)
    return {"recall_at_5": (true.gather(1, logits.topk(so_lr.GUESSES, dim=1).indices).sum(), true.sum())}


def few_tags(settings: TrainSettings) -> LoadedTask:
    """The paper's task with this model, on the articles."""
    population, test = open_store(str(settings.data), "so_lr")
    evaluate = evaluator(recall, test, "original", batch_size=500)
    return LoadedTask(population, partial(initialised, FewTags), tag_loss, evaluate, reduction="sum")


@dataclass(frozen=True)
class Job:
    """What is trained, and how often."""

    task: Task
    about: str
    seeds: int
    least_survivors: int
    bits: int = 16

    def uploads(self) -> dict[str, Any]:
        """By name; the first is what others are compared with."""
        return {
            "plain": None,
            "8 bits": cl.Quantised(8),
            "4 bits": cl.Quantised(4),
            f"secure sum, {self.bits} bits": cl.SecureSum(self.bits),
            DROPS: Dropping(cl.RandomMask(1.0)),
            f"secure sum, {self.bits} bits, noise by clients, one in ten drops out": Dropping(
                cl.SecureSum(self.bits, least_survivors=self.least_survivors)
            ),
        }


def small(task: Task, load: Callable[[TrainSettings], LoadedTask], **settings: Any) -> Task:
    """The task with these settings, loaded in this way."""
    return replace(task, load=load, settings=task.settings.overridden(settings, "this script"))


SMALL_SO_LR = {
    "data": str(ARTICLES), "population_size": 7_947, "rounds": 60, "cohort_size": 200, "max_examples": 100,
    "epsilon": 4.0, "client_lr": 100.0, "server_lr": 1.0, "clip": "quantile", "clip_start": 1.0,
}  # fmt: skip
FEW = """The paper's task at a small scale, on real users: 7,947 of CiteULike, at most 100 articles each, 500 words and
50 tags, 25,050 parameters."""
JOBS = {  # the most important first; of 300 that are asked 270 +- 5 stay, of 200 180 +- 4
    "handwriting": Job(cl.task_named("handwriting"), "Generated writers, 5,994 parameters.", 12, least_survivors=240),
    "so_lr": Job(small(so_lr.TASK, few_tags, **SMALL_SO_LR), FEW, 12, least_survivors=160),
}
LOADED: dict[str, LoadedTask] = {}  # before the processes are forked


def trained(key: Key) -> dict[str, Any]:
    """One run: metric, every fifth clip, and what it costs."""
    name, upload_name, seed = key
    task, upload, loaded = JOBS[name].task, JOBS[name].uploads()[upload_name], LOADED[name]
    settings = task.settings.overridden({"seed": seed}, "this script")
    made = cl.Training(
        loaded.make(seed),
        loaded.loss,
        loaded.population,
        rounds=settings.rounds,
        cohort_size=settings.cohort_size,
        local=settings.local(loaded.reduction),
        clip=settings.controller(),
        server=settings.server_optimiser(),
        privacy=settings.privacy(),
        compute=cl.Compute(device="cpu", row_fields=loaded.row_fields),
        seed=seed,
        upload=upload,
    )
    begun = time.process_time()
    result = made.run()
    return {
        "task": name,
        "upload": upload_name,
        "seed": seed,
        "metric": loaded.evaluate(result.model)[task.metric_name],
        "clips": [round(report.clip, 7) for report in result.reports[::5]],
        "epsilon": result.guarantee.epsilon,
        "seconds": round(time.process_time() - begun, 1),
        **costs(made, upload),
    }


def costs(made: cl.Training, upload: Any) -> dict[str, float]:
    """More noise on the mean than plain uploads have, as a share, and bytes a user and round, with and without masks.

    Rounding of vectors that the server decodes is measured on random ones as long as the clip: shorter ones have less.
    """
    inner = getattr(upload, "upload", upload)
    mechanism, users = made.algorithm.mechanism, made.cohort_size
    assert isinstance(mechanism, GaussianMechanism)
    plain = float(GaussianMechanism(users, mechanism.noise_multiplier, mechanism.count_stddev).delta_noise_multiplier)
    rng = np.random.default_rng(0)
    joint = torch.from_numpy(rng.standard_normal(made.dim + 1))
    joint /= joint[:-1].norm()
    joint[-1] = 0.5
    if isinstance(mechanism, DiscreteMechanism):
        code: Any = mechanism.code
        shares = 1.0
        if mechanism.shares is not None:
            staying = (1 - DROPPING) * np.maximum(users, rng.poisson(users, 10_000)).mean()
            shares = staying / mechanism.shares
        noise = math.sqrt(shares * code.stddev**2 + users / 6) * code.unit  # rounding has a variance of 1/6 on average
        words = packed(code.encode(joint, 1.0, 0, rng), code.bits).nbytes
        return {"noise": noise / plain - 1, "bytes": words, "all_bytes": words + KEYS + (users - 1) * (BOX + SHARE)}
    encoder = RotatedLevels(made.dim, inner.bits) if isinstance(inner, cl.Quantised) else KeptShare(made.dim)
    message = encoder.encode(joint, 1.0, 0, rng)
    decoded = encoder.decode(message, 1.0, 0)
    assert decoded is not None
    squared = float((decoded - joint)[:-1].square().sum()) * users / made.dim  # on each coordinate of the sum
    noise = math.sqrt(1 + squared / plain**2) - 1
    return {"noise": noise, "bytes": message.nbytes, "all_bytes": message.nbytes}


def runs() -> Runs:
    """All that there are."""
    lines = RUNS.read_text(encoding="utf-8").splitlines() if RUNS.exists() else []
    return {(run["task"], run["upload"], run["seed"]): run for run in map(json.loads, lines)}


def compute(names: Sequence[str], processes: int, seconds: float) -> None:
    """Train what is missing, in this time; each run is a line as soon as it is there."""
    deadline, there = time.monotonic() + seconds, runs()
    missing = []
    for name in names:
        job = JOBS[name]
        missing += [key for seed in range(job.seeds) for up in job.uploads() if (key := (name, up, seed)) not in there]
        LOADED[name] = job.task.load(job.task.settings)
    with multiprocessing.get_context("fork").Pool(processes) as pool, RUNS.open("a", encoding="utf-8") as file:
        ended = pool.imap_unordered(trained, missing)
        for _ in missing:
            try:
                found = ended.next(deadline - time.monotonic())
            except multiprocessing.TimeoutError:
                print("no more time: give the command again for the rest")
                break
            print(json.dumps(found), file=file, flush=True)
            print(*list(found.values())[:3], f"{found['metric']:.4f}", f"{found['seconds']:g} s", flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write() -> None:
    """The page and its picture, of all tasks that have runs."""
    found = runs()
    tasks = [name for name in JOBS if paired(name, found)[0]]
    sections = [section(name, found) for name in tasks]
    draw(tasks, found)
    PAGE.write_text(HEAD + "\n".join(sections), encoding="utf-8")


def paired(name: str, found: Runs) -> tuple[list[int], dict[str, list[dict[str, Any]]]]:
    """The seeds of which there are all runs, and these runs by upload."""
    uploads = list(JOBS[name].uploads())
    seeds = [seed for seed in range(JOBS[name].seeds) if all((name, upload, seed) in found for upload in uploads)]
    return seeds, {upload: [found[name, upload, seed] for seed in seeds] for upload in uploads}


def difference(runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> tuple[NDArray[np.float64], float]:
    """Of the metric, by seed, and half the width of the 95% interval of its mean."""
    each = np.array([run["metric"] - other["metric"] for run, other in zip(runs, base, strict=True)])
    if len(each) < 2:
        return each, math.inf
    return each, float(stats.t.ppf(0.975, len(each) - 1) * each.std(ddof=1) / math.sqrt(len(each)))


def clip_ratio(runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> NDArray[np.float64]:
    """The clip over that of the other run of the seed, in the geometric mean of the second half of the rounds."""
    logs = np.log([run["clips"] for run in runs]) - np.log([run["clips"] for run in base])
    return np.exp(logs[:, logs.shape[1] // 2 :].mean(axis=1))


def section(name: str, found: Runs) -> str:
    """A task's table, and what is behind it."""
    job, task = JOBS[name], JOBS[name].task
    seeds, groups = paired(name, found)
    (plain, base), *_ = groups.items()
    *_, dropping, shares = groups.values()
    metric, rows = task.metric_name.replace("_", " "), []
    for upload, there in groups.items():
        (each, half), ratio, run = difference(there, base), clip_ratio(there, base), there[0]
        mean = np.mean([run["metric"] for run in there])
        rows.append(
            (
                upload,
                f"{mean:.4f}",
                "" if upload == plain else f"{each.mean():+.4f} +- {half:.4f}",
                "" if upload == plain else f"{ratio.mean():.3f} ({ratio.min():.3f} to {ratio.max():.3f})",
                "" if upload == plain else f"{100 * run['noise']:.2g}%",
                f"{run['bytes'] / 1000:,.1f} kB",
                f"{run['all_bytes'] / 1000:,.1f} kB",
            )
        )
    each, half = difference(shares, dropping)
    head = ("upload", metric, "difference to plain", "clip / plain clip", "more noise", "vector", "all messages")
    settings, epsilon = task.settings, base[0]["epsilon"]
    return f"""## {name}

{table(head, rows)}

{job.about}
{settings.rounds} rounds of {settings.cohort_size} users, {len(seeds)} of {job.seeds} planned seeds.
For outsiders epsilon is {epsilon:.2f}.
Shares of noise are made for {job.least_survivors} survivors. Their difference to plain uploads with the same drop-outs
is {each.mean():+.4f} +- {half:.4f}.
"""


HEAD = """# What encoded uploads cost

Trainings whose users upload in one way or another, beside the plain upload, simulated by `Training(upload=...)`.
Runs of one seed have the same first model and the same cohorts. Intervals are of the mean difference over the seeds,
95%, by Student's t. Clips are compared in the second half of the rounds, in the geometric mean.
A seed counts once all its runs are there; a task without all planned seeds ran out of time. Runs come from two
machines, those of seed 11 of handwriting and of seeds 4 to 9 of so_lr from both: these may be rounded differently.

![Differences of the metric to plain uploads with intervals, and the tracked clips over the rounds](uploads.png)

* *More noise*: on the mean update, beside plain uploads at the same epsilon, from rounding and from shares of noise
  beyond the least number.
* *Vector*: what one user uploads in a round for the sum. *All messages*: with the keys, boxes and shares of a secure
  sum, which grow with the cohort and not with the model.
* *One in ten drops out*: each user who was drawn stays away with chance 0.1. Sums are still divided by the declared
  cohort, so that steps of the model and of the clip are a tenth shorter, and the clip lags behind.

Made by `python studies/uploads.py --write` from the runs in `studies/uploads`.

"""


def draw(tasks: list[str], found: Runs) -> None:
    """A row of two panels for each task: differences, and clips."""
    figure, axes = new_figure(len(tasks), 2, width=10, height=3.1 * len(tasks))
    for row, name in enumerate(tasks):
        _, groups = paired(name, found)
        left, right = axes[2 * row], axes[2 * row + 1]
        (_, base), *others = groups.items()
        left.axvline(0, color="0.6", linewidth=1)
        for place, (_, there) in enumerate(others):
            each, half = difference(there, base)
            colour = PALETTE[place + 1]
            left.plot(each, [place] * len(each), "o", color=colour, alpha=0.25, markersize=4, markeredgewidth=0)
            left.errorbar(each.mean(), place, xerr=half, fmt="o", color=colour, capsize=3)
        left.locator_params(axis="x", nbins=6)
        left.set_yticks(range(len(others)), [textwrap.fill(upload, 30) for upload, _ in others])
        left.set(xlabel=f"{JOBS[name].task.metric_name.replace('_', ' ')} less that of plain uploads", title=name)
        left.set_ylim(len(others) - 0.5, -0.5)
        for place, (upload, there) in enumerate(groups.items()):
            clips = np.exp(np.log([run["clips"] for run in there]).mean(axis=0))
            style = {"linestyle": "--" if "drops" in upload else "-", "color": PALETTE[place] if place else "0.2"}
            right.plot(5 * np.arange(len(clips)), clips, label=textwrap.fill(upload, 36), **style)
        right.set(yscale="log", xlabel="round", ylabel="clip")
        right.legend(fontsize=7, frameon=False, loc="lower right")
        plain_log_labels(right)
    save_figure(figure, PICTURE)


def main() -> None:
    """Train or write, as asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=JOBS, help="this one; all if left out")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=86_400, help="runs that have not ended by then are lost")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.write:
        write()
    else:
        compute([given.task] if given.task else list(JOBS), given.processes, given.seconds)


if __name__ == "__main__":
    main()
