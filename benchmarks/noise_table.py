"""How accurate is an untuned training at the same epsilon, before and after the normalised server and banded noise?

Peer: the paper's server (SGD with momentum) with independent noise, untuned and as the best of a grid.

python benchmarks/noise_table.py prepare --shared ../shared/data        # once: three data sets, into .stores/noise
python benchmarks/noise_table.py run [--device cuda] [--processes 8] [--tasks H,E] [--seconds 300]
python benchmarks/noise_table.py table                                  # docs/howto/noise.md's table and picture

A run is a line of `--out`, by default results/untuned/noise.jsonl; what is there already is not run again. Seeds are
paired: the same seed has the same cohort stream and the same first weights in every column.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import recording
import torch
import torch.nn.functional as F
from torch import nn

HERE = Path(__file__).resolve().parent
RESULTS, STORES = HERE / "results" / "untuned" / "noise.jsonl", HERE / ".stores" / "noise"
PAGE, PICTURE = HERE.parent / "docs" / "howto" / "noise.md", HERE.parent / "docs" / "images" / "noise.png"
ROUNDS, SEEDS = 150, 10
WORDS, TAGS = 300, 30
EPSILONS = (1.0, 2.0, 4.0, 8.0)
CLIENT_RATES, SERVER_RATES = (0.03, 0.1, 0.3, 1.0), (0.3, 1.0, 3.0)
NEWCOMER = {"C": 0.0316, "L": 316.0}  # client rates: those of the paper; elsewhere 0.1


class Job(NamedTuple):
    """Runs that differ in their seed alone."""

    task: str
    epsilon: float
    way: str  # of WAYS, or "grid"
    client_rate: float
    server_rate: float = 1.0

    def key(self, seed: int) -> str:
        """The name of one run."""
        return json.dumps([*self, seed])


class Loaded(NamedTuple):
    """A task's users, and how a model is made, trained and measured."""

    population: Any
    model: Callable[[int], nn.Module]  # of a seed
    loss: Callable[[nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]
    measure: Callable[[nn.Module], float]
    batch_size: int
    reduction: str = "mean"
    row_fields: Mapping[str, Any] | None = None
    precision: str = "float32"  # on a GPU


COHORTS = {"H": 100, "M": 300, "E": 150, "V": 150, "S": 150, "C": 300, "L": 150}
TITLES = {
    "H": "handwriting, 10,000 writers, 100 a round",
    "M": "README's main job, 40,000 writers, 300 a round",
    "E": "EMNIST, 10,000 users, perceptron, 150 a round",
    "V": "EMNIST, 10,000 users, CNN, 150 a round",
    "S": "tags (CiteULike), 150 a round; recall at 5",
    "C": "EMNIST-CR's model, 1.2M parameters, bf16, 20,000 drawn writers of 20 images, 300 a round",
    "L": "SO-LR's model, 5M parameters, CiteULike, 150 a round; recall at 5",
}
SAME_SERVER = ("before", "grid")


# ---------------------------------------------------------------- data


def prepare(shared: Path, to: Path) -> None:
    """Users of EMNIST images and of CiteULike articles, small enough to travel."""
    to.mkdir(parents=True, exist_ok=True)
    raw = np.load(shared / "emnist" / "emnist62_byclass.npz")
    rng = np.random.default_rng(0)
    labels = raw["train_y"].astype(np.int64)
    order = np.argsort(labels + rng.normal(0, 10, len(labels)), kind="stable")  # users have characters of their own
    sizes = rng.lognormal(np.log(8), 0.7, 10_000)
    ends = np.round(np.cumsum(sizes) / sizes.sum() * len(order)).astype(np.int64)
    np.savez_compressed(
        to / "emnist.npz",
        offsets=np.concatenate([[0], ends]),
        x=_pooled(raw["train_x"])[order], y=labels[order].astype(np.uint8),
        test_x=_pooled(raw["test_x"]), test_y=raw["test_y"],
    )  # fmt: skip
    raw = np.load(shared / "stackoverflow_lr" / "citeulike_t.npz")
    articles = len(raw["item_is_test"])
    words = np.zeros((articles, WORDS), np.uint8)
    common = np.argsort(-np.bincount(raw["bow_indices"]))[:WORDS]
    place = np.full(20_000, -1)
    place[common] = np.arange(WORDS)
    rows = np.repeat(np.arange(articles), np.diff(raw["bow_indptr"]))
    column = place[raw["bow_indices"]]
    words[rows[column >= 0], column[column >= 0]] = raw["bow_counts"][column >= 0]
    tags = np.zeros((articles, TAGS), np.uint8)
    rows = np.repeat(np.arange(articles), np.diff(raw["tag_indptr"]))
    tags[rows[raw["tag_indices"] < TAGS], raw["tag_indices"][raw["tag_indices"] < TAGS]] = 1
    useful = tags.any(axis=1) & words.any(axis=1)
    owner = np.repeat(np.arange(len(raw["user_indptr"]) - 1), np.diff(raw["user_indptr"]))
    item = raw["user_items"].astype(np.int64)
    kept = useful[item] & ~raw["item_is_test"][item].astype(bool)
    test = np.flatnonzero(useful & raw["item_is_test"].astype(bool))
    np.savez_compressed(
        to / "tags.npz", owner=owner[kept], item=item[kept], words=words, tags=tags, test=test,
    )  # fmt: skip
    sys.path.append(str(HERE.parent / "studies" / "data"))
    import convert_texts

    splits, _ = convert_texts.articles(shared / "stackoverflow_lr", 0)
    chunks = [*splits["train"], *((np.full(len(owner), -1), fields) for owner, fields in splits["test"])]
    owner = np.concatenate([owner for owner, _ in chunks])
    fields = {name: np.concatenate([fields[name] for _, fields in chunks]) for name in chunks[0][1]}
    whole = np.concatenate([np.ascontiguousarray(field).view(np.uint8) for field in fields.values()], axis=1)
    _, first, item = np.unique(whole.view(f"V{whole.shape[1]}").ravel(), return_index=True, return_inverse=True)
    np.savez_compressed(
        to / "articles.npz", owner=owner[owner >= 0], item=item[owner >= 0], test=np.unique(item[owner < 0]),
        **{name: field[first] for name, field in fields.items()},
    )  # fmt: skip


def _pooled(images: np.ndarray) -> np.ndarray:
    """(n, 28, 28) uint8 -> (n, 14, 14): means of 2 x 2 pixels."""
    return images.reshape(len(images), 14, 2, 14, 2).mean(axis=(2, 4)).round().astype(np.uint8)


class TaggedArticles(nn.Module):
    """Logistic regression on the logarithm of word counts: 9,030 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tags = nn.Linear(WORDS, TAGS)
        nn.init.zeros_(self.tags.weight)
        nn.init.zeros_(self.tags.bias)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """(batch, WORDS) counts -> (batch, TAGS) logits."""
        return self.tags(F.normalize(torch.log1p(words.to(self.tags.weight.dtype)), dim=1))


class Images(nn.Module):
    """14 x 14 bytes to 62 characters: a perceptron (8,350 parameters) or a small network of convolutions."""

    def __init__(self, convolutions: bool) -> None:
        super().__init__()
        self.convolutions = convolutions
        if convolutions:
            self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, stride=2), nn.Conv2d(8, 16, 3, stride=2)
            self.out = nn.Linear(16 * 2 * 2, 62)
        else:
            self.hidden, self.out = nn.Linear(196, 32), nn.Linear(32, 62)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 14, 14) -> (batch, 62) logits."""
        x = x.to(self.out.weight.dtype) / 255
        if self.convolutions:
            return self.out(F.relu(self.conv2(F.relu(self.conv1(x.unsqueeze(1))))).flatten(1))
        return self.out(F.relu(self.hidden(x.flatten(1))))


def tags_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """(batch,): cross-entropy summed over tags."""
    logits = model(batch["words"])
    return F.binary_cross_entropy_with_logits(logits, batch["tags"].to(logits.dtype), reduction="none").sum(dim=1)


def image_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """(batch,): cross-entropy."""
    return F.cross_entropy(model(batch["x"]), batch["y"].long(), reduction="none")


def where(model: nn.Module) -> torch.device:
    """The device of its parameters."""
    return next(model.parameters()).device


def seeded(make: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """The first weights of a seed."""

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return make()

    return made


@cache
def loaded(task: str, stores: Path) -> Loaded:
    """The task's data in this process."""
    import clipline as cl
    from clipline.tasks import initialised

    def accuracy(x: torch.Tensor, y: torch.Tensor) -> Callable[[nn.Module], float]:
        def right(model: nn.Module) -> float:
            parts = x.to(where(model)).split(4000)  # not all at once: the network of 1.2M parameters is large inside
            return float((torch.cat([model(part).argmax(dim=1) for part in parts]).cpu() == y).double().mean())

        return right

    if task in ("E", "V"):
        data = np.load(stores / "emnist.npz")
        owner = np.repeat(np.arange(len(data["offsets"]) - 1), np.diff(data["offsets"]))
        people = cl.Population.from_arrays(owner, x=data["x"], y=data["y"])
        test = accuracy(torch.from_numpy(data["test_x"]), torch.from_numpy(data["test_y"].astype(np.int64)))
        return Loaded(people, seeded(lambda: Images(task == "V")), image_loss, test, 16)
    if task == "S":
        data = np.load(stores / "tags.npz")
        words, tags, item = data["words"], data["tags"], data["item"]
        people = cl.Population.from_arrays(data["owner"], words=words[item], tags=tags[item])
        x, y = torch.from_numpy(words[data["test"]]), torch.from_numpy(tags[data["test"]]).double()

        def recall(model: nn.Module) -> float:
            best = model(x.to(where(model))).topk(5, dim=1).indices.cpu()
            return float(y.gather(1, best).sum() / y.sum())

        return Loaded(people, seeded(TaggedArticles), tags_loss, recall, 16)
    if task in ("H", "M"):
        users = 10_000 if task == "H" else 40_000
        own = cl.task_named("handwriting")
        at = own.load(replace(own.settings, population_size=users))
        return Loaded(at.population, at.make, at.loss, lambda model: float(at.evaluate(model)["accuracy"]), 20)
    if task == "C":
        from clipline.tasks.handwriting import writers_population
        from clipline_paper.tasks import emnist_cr

        people = replace(writers_population(0, 20_000, 62, mean_examples=20), user_ids=np.arange(20_000))
        test = writers_population(10_000_000, 200, 62, mean_examples=20)  # others
        pixels, labels = torch.from_numpy(test.fields["pixels"]), torch.from_numpy(test.fields["labels"]).long()
        make = partial(initialised, emnist_cr.CharacterNet)
        return Loaded(people, make, emnist_cr.loss, accuracy(pixels, labels), 20, precision="bf16")
    from clipline_paper.tasks import so_lr

    data = np.load(stores / "articles.npz")
    item, held = data["item"], torch.from_numpy(data["test"])
    fields = {name: data[name] for name in ("words", "weights", "tags")}
    people = cl.Population.from_arrays(data["owner"], **{name: field[item] for name, field in fields.items()})
    words, weights, tags = (torch.from_numpy(field)[held] for field in fields.values())

    def recall_at_5(model: nn.Module) -> float:
        scores = model(words.to(where(model)), weights.to(where(model))).cpu()
        true = so_lr.multi_hot(tags, scores)
        return float(true.gather(1, scores.topk(5, dim=1).indices).sum() / true.sum())

    make = partial(initialised, so_lr.TagRegression)
    return Loaded(people, make, so_lr.loss, recall_at_5, 100, reduction="sum", row_fields={"tags.weight": "words"})


# ---------------------------------------------------------------- runs


def training(job: Job, seed: int, task: Loaded, device: str) -> Any:
    """One training of the job."""
    import clipline as cl

    more: dict[str, Any] = {}
    if job.way in SAME_SERVER:
        more = {"server": cl.ServerSGD(job.server_rate), "noise": cl.IndependentNoise()}
    else:
        noise = cl.IndependentNoise() if job.way == "normalised" else cl.BandedNoise()
        more = {"server": cl.ServerNormalised(), "noise": noise}
    return cl.Training(
        task.model(seed), task.loss, task.population,
        rounds=ROUNDS, cohort_size=COHORTS[job.task],
        local=cl.LocalSGD(lr=job.client_rate, batch_size=task.batch_size, reduction=task.reduction),
        privacy=cl.Privacy(epsilon=job.epsilon, population_size=len(task.population)),
        compute=cl.Compute(device=device, workers=1, precision=task.precision if device == "cuda" else "float32",
                           row_fields=task.row_fields or {},
                           fast=cl.FastParts(compiled_steps="never")),
        seed=1000 + seed, **more,
    )  # fmt: skip


def lines(job: Job, seeds: list[int], task: Loaded, device: str) -> Iterator[str]:
    """Run these seeds side by side; a line of JSON each."""
    import clipline as cl

    trainings = [training(job, seed, task, device) for seed in seeds]
    for seed, made, result in zip(seeds, trainings, cl.run_together(trainings), strict=True):
        models = {"last": getattr(result, "last", result.model), "averaged": getattr(result, "averaged", None)}
        with torch.no_grad():
            values = {name: task.measure(model) for name, model in models.items() if model is not None}
        about = {"bands": getattr(made.noise, "bands", 1), "z": made.noise_multiplier, "noise_norm": made.noise_norm}
        yield json.dumps(
            {"key": job.key(seed), **job._asdict(), "seed": seed, **values, **about, "clip": result.reports[-1].clip}
        )


def jobs(tasks: list[str]) -> list[Job]:
    """All that the table needs, the most important first."""

    def job(task: str, epsilon: float, way: str) -> Job:
        return Job(task, epsilon, way, NEWCOMER.get(task, 0.1), 1.78 if task == "L" else 1.0)

    def grid(task: str, epsilon: float) -> list[Job]:
        own = NEWCOMER.get(task)
        clients = CLIENT_RATES if own is None else (own / 3, own, 3 * own)
        return [Job(task, epsilon, "grid", client, server) for client in clients for server in SERVER_RATES]

    found = [job(task, 4.0, way) for task in tasks for way in ("before", "now", "normalised")]
    found += [job(task, epsilon, way) for epsilon in EPSILONS for task in tasks for way in ("before", "now")
              if task not in NEWCOMER]  # fmt: skip
    found += [one for task in tasks for one in grid(task, 4.0)]
    found += [
        one for epsilon in EPSILONS for task in tasks if task not in ("M", *NEWCOMER) for one in grid(task, epsilon)
    ]
    return list(dict.fromkeys(found))


def work(wanted: argparse.Namespace) -> None:
    """Take one job after the other off the list that all processes share."""
    torch.set_num_threads(1)
    for job in jobs(wanted.tasks.split(",")):
        if recording.time_is_up():
            return
        done = {json.loads(line)["key"] for line in recording.lines_of(wanted.out)}
        seeds = [seed for seed in range(wanted.seeds) if job.key(seed) not in done]
        if not seeds or not recording.take(wanted.out, job.key(-1)):
            continue
        begun = time.time()
        try:
            recording.append(wanted.out, list(lines(job, seeds, loaded(job.task, wanted.stores), wanted.device)))
            print(f"{job}: {time.time() - begun:.1f} s", flush=True)
        except Exception as error:  # the other jobs go on
            print(f"{job} failed: {type(error).__name__}: {error}", flush=True)


# ---------------------------------------------------------------- table and picture


def interval(differences: np.ndarray) -> tuple[float, float, float]:
    """Mean and 95% interval of paired differences, by Student's t."""
    from scipy.stats import t

    mean, n = differences.mean(), len(differences)
    half = t.ppf(0.975, n - 1) * differences.std(ddof=1) / np.sqrt(n) if n > 1 else np.nan
    return float(mean), float(mean - half), float(mean + half)


class Records:
    """All runs, by task, epsilon and way."""

    def __init__(self, path: Path) -> None:
        self.rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def values(
        self, task: str, epsilon: float, way: str, which: str = "last", rates: tuple[float, float] | None = None
    ) -> dict[int, float]:
        """By seed."""
        return {
            row["seed"]: row[which]
            for row in self.rows
            if (row["task"], row["epsilon"], row["way"]) == (task, epsilon, way)
            and (rates is None or (row["client_rate"], row["server_rate"]) == rates)
        }

    def best_of_grid(self, task: str, epsilon: float) -> tuple[tuple[float, float], dict[int, float]] | None:
        """The rates with the best mean, chosen by the very numbers that are shown: it flatters the grid."""
        rates = sorted(
            {(r["client_rate"], r["server_rate"]) for r in self.rows if r["way"] == "grid" and r["task"] == task}
        )
        found = [(pair, self.values(task, epsilon, "grid", rates=pair)) for pair in rates]
        whole = len(found) >= 3 * len(SERVER_RATES) and all(values for _, values in found)  # a part of it has no best
        return max(found, key=lambda one: np.mean(list(one[1].values()))) if whole else None


def paired(a: dict[int, float], b: dict[int, float]) -> np.ndarray:
    """B - a for the seeds that both have."""
    return np.array([b[seed] - a[seed] for seed in sorted(a.keys() & b.keys())])


def written(records: Records) -> str:
    """The two tables."""

    def mean(values: dict[int, float]) -> str:
        return f"{np.mean(list(values.values())):.3f}" if values else ""

    def gain(a: dict[int, float], b: dict[int, float]) -> str:
        return "{:+.3f} ({:+.3f} to {:+.3f})".format(*interval(paired(a, b))) if a and b else ""

    tasks = [task for task in TITLES if any(row["task"] == task for row in records.rows)]
    first, second = [], []
    for task in tasks:
        old, now = records.values(task, 4.0, "before"), records.values(task, 4.0, "now", "averaged")
        grid = records.best_of_grid(task, 4.0)
        first.append([
            TITLES[task], mean(old), f"{mean(grid[1])} ({grid[0][0]:g}, {grid[0][1]:g})" if grid else "",
            mean(records.values(task, 4.0, "normalised")), mean(records.values(task, 4.0, "now")),
            f"**{mean(now)}**" if now else "",
            gain(old, now), gain(grid[1], now) if grid else "",
        ])  # fmt: skip
        for epsilon in EPSILONS:
            old, now = records.values(task, epsilon, "before"), records.values(task, epsilon, "now", "averaged")
            grid, rows = (
                records.best_of_grid(task, epsilon),
                [r for r in records.rows if (r["task"], r["epsilon"], r["way"]) == (task, epsilon, "now")],
            )
            if old and now:
                second.append([
                    TITLES[task].split(",")[0] if task != "V" else "EMNIST CNN", f"{epsilon:g}", rows[0]["bands"],
                    mean(old), mean(grid[1]) if grid else "",
                    f"**{mean(now)}**", gain(old, now), gain(grid[1], now) if grid else "",
                ])  # fmt: skip
    head = (
        "epsilon 4",
        "newcomer before",
        "best of the grid before (client, server rate)",
        "normalised server",
        "and banded noise",
        "and the average: newcomer now",
        "now - newcomer before",
        "now - best of the grid",
    )
    then = (
        "task",
        "epsilon",
        "bands",
        "newcomer before",
        "best of the grid before",
        "newcomer now",
        "now - newcomer before",
        "now - best of the grid",
    )
    return recording.table(head, first) + "\n\n" + recording.table(then, second)


def draw(records: Records, to: Path) -> None:
    """Accuracy against epsilon, before and now."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = [
        t
        for t in TITLES
        if sum(bool(records.values(t, e, "before") and records.values(t, e, "now")) for e in EPSILONS) > 1
    ]
    figure, axes = plt.subplots(1, len(tasks), figsize=(3.1 * len(tasks), 3.3), squeeze=False)
    looks = (
        ("newcomer before", "#555555", "o", "--", lambda t, e: records.values(t, e, "before")),
        ("best of a grid before", "#E69F00", "s", "-.", lambda t, e: (records.best_of_grid(t, e) or (0, {}))[1]),
        ("newcomer now", "#0072B2", "D", "-", lambda t, e: records.values(t, e, "now", "averaged")),
    )
    for axis, task in zip(axes[0], tasks, strict=True):
        for name, colour, marker, line, of in looks:
            at = [(e, np.array(list(found.values()))) for e in EPSILONS if (found := of(task, e))]
            if at:
                error = [interval(v)[2] - v.mean() for _, v in at]
                axis.errorbar(
                    [e for e, _ in at],
                    [v.mean() for _, v in at],
                    error,
                    label=name,
                    color=colour,
                    marker=marker,
                    linestyle=line,
                    markersize=5,
                    capsize=2,
                )
        axis.set_xscale("log", base=2)
        axis.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
        axis.minorticks_off()
        axis.set_title(
            TITLES[task].split(", ")[0] + {"H": ", 10,000", "V": ", CNN", "E": ", perceptron"}.get(task, ""), fontsize=9
        )
        axis.set_xlabel("epsilon")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("accuracy (tags: recall at 5)")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(to, dpi=130)


def table(wanted: argparse.Namespace) -> None:
    """Print the tables, draw the picture, and put both into the page if it has a place for them."""
    records = Records(wanted.out)
    text = written(records)
    print(text)
    draw(records, PICTURE)
    mark = re.compile(r"(<!-- table -->\n).*?(<!-- end of table -->)", re.S)
    if PAGE.is_file() and mark.search(page := PAGE.read_text(encoding="utf-8")):
        PAGE.write_text(mark.sub(lambda found: found[1] + "\n" + text + "\n\n" + found[2], page), encoding="utf-8")


def main() -> None:
    """Prepare, run or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run", "work", "table"))
    parser.add_argument("--shared", type=Path, default=HERE.parent.parent / "shared" / "data")
    parser.add_argument("--stores", type=Path, default=STORES)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--tasks", default="H,E,S,V,M")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--seconds", type=float, default=1e9)
    wanted = parser.parse_args()
    if wanted.what == "prepare":
        prepare(wanted.shared, wanted.stores)
    elif wanted.what == "table":
        table(wanted)
    elif wanted.what == "work":
        work(wanted)
    else:
        recording.in_processes(wanted.processes, wanted.seconds, wanted.out)


if __name__ == "__main__":
    main()
