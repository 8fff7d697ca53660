"""Does the untuned normalised server hold on small tasks of users' own, against the best of today's server's grid?

Peer: SGD with momentum at the server, untuned (rate 1) and at nine pairs of client and server rates.

python benchmarks/untuned_examples.py run [--processes 15] [--parts starts,recommender] [--seeds 10] [--seconds 600]
python benchmarks/untuned_examples.py table                             # what docs/howto/noise.md shows

Tasks are the examples of the repository and of docs/howto/own_data.md, with their data, models and own client rates r.
A job is a part of one task and one seed; its runs train side by side, on one core. A run is a line of `--out`, by
default results/untuned/examples.jsonl; what is there already is not run again. `lora` needs the extra `adapters`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import recording
import torch
from noise_table import interval, paired
from torch import nn

import clipline as cl
from clipline.federated.clip_controllers import ClipState
from clipline.federated.mechanism import Release

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results" / "untuned" / "examples.jsonl", HERE.parent / "docs" / "howto" / "noise.md"
SERVER_RATES, CLIENT_FACTORS = (0.3, 1.0, 3.0), (1 / 3, 1.0, 3.0)
FAR, STARTS = (0.1, 10.0), (0.001, 0.1, 1000.0)  # client rates as factors of r; starts of the clip
Measure = Callable[[nn.Module], float]


class Example(NamedTuple):
    """One task: what it trains on, how a model is made anew, and what is measured of it."""

    training: dict[str, Any]  # arguments of the example's own training
    model: Callable[[], nn.Module]
    measure: Measure


class _Caught(Exception):
    pass


def caught(source: str) -> dict[str, Any]:
    """What a script has made up to its training's `run`, and the arguments of that training as `made`."""
    made: dict[str, Any] = {}

    class Catching(cl.Training):
        def __init__(self, model: Any, loss: Any, population: Any, **options: Any) -> None:
            made.update(options, model=model, loss=loss, population=population)

        def run(self, *_: Any, **__: Any) -> Any:
            raise _Caught

        @property
        def engine(self) -> str:
            return ""

    scope: dict[str, Any] = {"__name__": "example"}
    own = cl.Training
    cl.__dict__["Training"] = Catching
    try:
        exec(compile(source, "example", "exec"), scope)
    except _Caught:
        pass
    finally:
        cl.__dict__["Training"] = own
    return {**scope, "made": made}


def _script(name: str) -> dict[str, Any]:
    return caught((HERE.parent / "examples" / f"{name}.py").read_text(encoding="utf-8"))


def _mean(test: cl.Population, of: Callable[..., torch.Tensor]) -> Measure:
    """The mean over the examples of users who do not train."""
    batch = {name: torch.as_tensor(np.asarray(field)) for name, field in test.fields.items()}
    batch = {name: field.float() if field.is_floating_point() else field for name, field in batch.items()}
    return lambda model: float(of(model, batch).double().mean())


def _again(model: nn.Module) -> Callable[[], nn.Module]:
    """The same model with other first weights."""

    def made() -> nn.Module:
        other = copy.deepcopy(model)
        for part in other.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        return other

    return made


def own_data() -> Example:
    """Late rides, of docs/howto/own_data.md."""
    text = (HERE.parent / "docs" / "howto" / "own_data.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    table = blocks[0].replace("import pyarrow.parquet\n", "")
    table = re.sub(r"pyarrow\.parquet\.write_table.*", "", table)
    people = 'import clipline as cl\npeople = cl.Population.from_dataframe(rides, user="rider")\n'
    split = "train, test = people.split(test=0.1, seed=0)\n"
    training = next(block for block in blocks if "training = cl.Training(" in block)
    at = caught(table + people + split + training)
    measure = _mean(at["test"], at["accuracy"])
    return Example(at["made"], lambda: nn.Linear(4, 2), measure)


def households() -> Example:
    """examples/first_run.py."""
    at = _script("first_run")
    measure = lambda model: at["squared_error"](model)["squared error"]  # noqa: E731
    return Example(at["made"], _again(at["model"]), measure)


def text() -> Example:
    """examples/text_classification.py."""
    at = _script("text_classification")
    return Example(at["made"], lambda: nn.Linear(at["BUCKETS"], 3),
                   _mean(at["test"], at["accuracy"]))  # fmt: skip


def recommender() -> Example:
    """examples/recommender.py."""
    at = _script("recommender")
    error = _mean(at["test"], at["square"])
    return Example(at["made"], at["Films"], lambda model: error(model) ** 0.5)


def regression() -> Example:
    """examples/table_regression.py."""
    at = _script("table_regression")
    error = _mean(at["test"], at["square"])
    return Example(at["made"], at["Minutes"],
                   lambda model: 20 * error(model) ** 0.5)  # fmt: skip


def images() -> Example:
    """examples/example_level_images.py."""
    at = _script("example_level_images")

    def accuracy(model: nn.Module) -> float:
        return float((model(at["test_images"]).argmax(dim=1) == at["test_labels"]).double().mean())

    return Example(at["made"], _again(at["model"]), accuracy)


def lora() -> Example:
    """examples/adapters.py."""
    at = _script("adapters")
    perplexity = cl.Perplexity(at["others"])
    return Example(at["made"],
                   lambda: at["get_peft_model"](copy.deepcopy(at["base"]), at["lora"]),
                   lambda model: perplexity(model)["perplexity"])  # fmt: skip


EXAMPLES = {"own_data": own_data, "first_run": households, "text": text, "recommender": recommender,
            "regression": regression, "images": images, "lora": lora}  # fmt: skip


# ---------------------------------------------------------------- a faster search for the clip


@dataclass(frozen=True)
class SearchState(ClipState):
    """The clip, on which side of the quantile all fractions were so far, and whether one was on the other."""

    side: int = 0
    found: bool = False


@dataclass(frozen=True)
class SearchingClip(cl.QuantileClip):
    """Steps of 2.0 and a fraction clamped to [0, 1] until the fraction first crosses the quantile; then as usual."""

    def init(self) -> SearchState:
        """The start, with nothing seen."""
        return SearchState(self.start)

    def update(self, state: ClipState, release: Release) -> SearchState:
        """A long step or a usual one."""
        assert isinstance(state, SearchState)
        assert release.fraction_within is not None
        side = 1 if release.fraction_within > self.quantile else -1
        if state.found or state.side * side < 0:
            usual = super().update(state, release)
            return SearchState(usual.clip, usual.round_index, side, True)
        error = min(max(release.fraction_within, 0.0), 1.0) - self.quantile
        return SearchState(state.clip * math.exp(-2.0 * error), state.round_index + 1, side)


# ---------------------------------------------------------------- runs


PARTS = {
    "starts": ("text", "first_run", "regression"),  # the start of the clip, with and without the faster search
    "recommender": ("recommender",),  # why it does worse: the grid, longer trainings, other lengths
    "grid": ("own_data", "text", "first_run", "regression", "images"),
    "far": ("own_data", "text", "first_run", "regression", "recommender", "images"),
    "lora": ("lora",),  # the grid
}


def ways(part: str, rate: float, rounds: int, example_level: bool) -> dict[str, dict[str, Any]]:
    """Name to the arguments in which a training differs from the example's own."""
    today = {"server": cl.ServerSGD(momentum=0.0) if example_level else cl.ServerSGD()}
    now = {"server": cl.ServerNormalised()}
    banded = now if example_level else {**now, "noise": cl.BandedNoise()}  # refused where n is declared for examples
    found: dict[str, dict[str, Any]] = {}
    if part == "starts":
        for start in STARTS:
            for search, clip in (("", cl.QuantileClip(start=start)), (" search", SearchingClip(start=start))):
                found[f"start {start:g}{search}"] = {**now, "clip": clip}
                found[f"start {start:g} banded{search}"] = {**banded, "clip": clip}
                found[f"start {start:g} today{search}"] = {**today, "clip": clip}
        return found
    if part == "far":
        for factor in FAR:
            found[f"now {factor:g} r"] = {**now, "rate": factor * rate}
            found[f"today {factor:g} r"] = {**today, "rate": factor * rate}
        return found
    found = {"today": today, "now": now, "now banded": banded}
    for client in CLIENT_FACTORS:
        for server in SERVER_RATES:
            found[f"grid {client:.3g} {server:g}"] = {"server": cl.ServerSGD(server), "rate": client * rate}
    if part == "recommender":
        for longer in (2, 4):  # at the same epsilon
            for name, changes in (("today", today), ("now", now), ("now banded", banded)):
                found[f"{name} {longer} T"] = {**changes, "rounds": longer * rounds}
        for factor in (0.5, 2.0, 4.0):  # not to choose the rate by, but to see what it lacks
            found[f"now {factor:g} a"] = {"server": cl.ServerNormalised(factor * 0.37 / math.sqrt(rounds))}
    return found


LOWER = ("first_run", "recommender", "regression", "lora")  # tasks where a lower number is better


@cache
def example(name: str) -> Example:
    """The task, made once in a process."""
    return EXAMPLES[name]()


def runs(part: str, name: str, seed: int, done: set[str]) -> list[str]:
    """Every way of the part that is not done yet, of one seed and side by side: a line of JSON each."""
    at = example(name)
    own = {key: value for key, value in at.training.items() if key not in ("model", "seed", "server")}
    local, people = own.pop("local"), own["population"]
    own["compute"] = cl.Compute(device="cpu", workers=1)
    asked = ways(part, local.lr, own["rounds"], people.example_level)
    found = [(way, changes) for way, changes in asked.items() if f"{name} {way} {seed}" not in done]
    trainings = []
    for _, changes in found:
        options = {**own, **changes}
        torch.manual_seed(seed)
        rate, loss, population = options.pop("rate", local.lr), options.pop("loss"), options.pop("population")
        trainings.append(
            cl.Training(at.model(), loss, population, local=replace(local, lr=rate), seed=1000 + seed, **options)
        )
    lines = []
    for (way, _), made, result in zip(found, trainings, cl.run_together(trainings), strict=True):
        with torch.no_grad():
            values = {"last": at.measure(result.last), "returned": at.measure(result.model)}
            if result.averaged is not None:
                values["averaged"] = at.measure(result.averaged)
        about = {"key": f"{name} {way} {seed}", "task": name, "way": way, "seed": seed, "rate": made.local.lr}
        of = {"bands": getattr(made.noise, "bands", 1), "noise_norm": made.noise_norm, "clip": result.reports[-1].clip}
        lines.append(json.dumps({**about, **values, **of}))
    return lines


def work(wanted: argparse.Namespace) -> None:
    """Take one job after the other off the list that all processes share: all seeds of a part before the next part."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for part in wanted.parts.split(","):
        for seed in range(wanted.seeds):
            for name in PARTS[part]:
                if recording.time_is_up():
                    return
                if not recording.take(wanted.out, f"{part} {name} {seed}"):
                    continue
                done = {json.loads(line)["key"] for line in recording.lines_of(wanted.out)}
                begun, spent = time.monotonic(), time.process_time()
                try:
                    lines = runs(part, name, seed, done)
                except Exception as error:  # the other jobs go on
                    print(f"{part} {name} {seed} failed: {type(error).__name__}: {error}", flush=True)
                    continue
                recording.append(wanted.out, lines)
                print(f"{part} {name} {seed}: {len(lines)} runs, {time.process_time() - spent:.0f} s of one core, "
                      f"{time.monotonic() - begun:.0f} s", flush=True)  # fmt: skip


# ---------------------------------------------------------------- tables


def tables(out: Path) -> str:
    """All tasks against SGD and its grid; what each client rate and each start of the clip reached; 95% intervals."""
    found: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for one in map(json.loads, recording.lines_of(out)):
        found.setdefault((one["task"], one["way"]), {})[one["seed"]] = one

    def values(task: str, way: str, which: str = "returned") -> dict[int, float]:
        return {seed: one[which] for seed, one in found.get((task, way), {}).items()}

    def mean(of: dict[int, float]) -> str:
        return f"{np.mean(list(of.values())):.4g} ({len(of)})" if of else ""

    def gain(a: dict[int, float], b: dict[int, float]) -> str:
        return "{:+.3g} ({:+.3g} to {:+.3g})".format(*interval(paired(a, b))) if a.keys() & b.keys() else ""

    first, second = [], []
    for task in EXAMPLES:
        grid = {way: values(task, way) for of, way in found if of == task and way.startswith("grid")}
        if not grid:
            continue
        best = (min if task in LOWER else max)(grid, key=lambda way: np.mean(list(grid[way].values())))
        today, now = values(task, "today"), values(task, "now")
        first.append([task, mean(today), f"{mean(grid[best])}: {best[5:]}",
                      mean(values(task, "now", "last")), mean(now),
                      mean(values(task, "now banded", "last")), mean(values(task, "now banded")),
                      gain(today, now), gain(grid[best], now)])  # fmt: skip
    for task, way in found:
        if not way.startswith("grid") and way not in ("today", "now", "now banded"):
            usual = values(task, way.removesuffix(" search"))
            search = gain(usual, values(task, way)) if way.endswith(" search") else ""
            second.append([task, way, mean(values(task, way, "last")), mean(values(task, way)), search])
    head = ("task (seeds)", "today", "best of the grid: client, server rate", "now, last", "now", "banded, last",
            "banded", "now - today", "now - best")  # fmt: skip
    return f"{recording.table(head, first)}\n\n" + recording.table(
        ("task", "way (seeds)", "last", "returned", "search - without"), second
    )


def main() -> None:
    """Run or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "work", "table"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1e9)
    wanted = parser.parse_args()
    if wanted.what == "work":
        work(wanted)
    elif wanted.what == "table":
        print(tables(wanted.out))
    else:
        recording.in_processes(wanted.processes, wanted.seconds, wanted.out)


if __name__ == "__main__":
    main()
