"""Rows 5, 7 and 11: run directories: other data on resume, two at once, and what their files tell of time."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path

import numpy as np
from attack import Attack, Measure, Value, area
from commands import Answer, begun, clipline_command, ended, write_posts
from safetensors.numpy import load_file

from clipline.tasks import task_named
from clipline.tasks.train_settings import read_toml

# A machine that goes down when the first round has been written, its checkpoint too, which a thread writes.
CRASHING = """
import os, sys
from clipline.training.run_directory import RunDirectory
write = RunDirectory.on_round
def write_and_crash(self, *given):
    write(self, *given)
    if hasattr(self, "_checkpoints"):
        self._checkpoints.flush()
    os._exit(9)
RunDirectory.on_round = write_and_crash
from clipline.cli import main
sys.argv = ["clipline", *sys.argv[1:]]
main()
"""
POSTS = dict.fromkeys("ABCD", 3)
NOISE, CLIP = 1.0, 1.0


@cache
def corrected() -> tuple[Answer, float | None]:
    """A run of two rounds that crashed after one is resumed twice, once with one user's posts corrected.

    Gives what became of the second, and how far the two models lie apart, over what two fresh noises would do.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_posts(folder / "posts", POSTS)
        (folder / "run.toml").write_text("evaluate_every = 1\nserver_momentum = 0.0\n")
        flags = ["--data", "posts", "--cohort-size", 4, "--rounds", 2, "--noise-multiplier", NOISE, "--clip", CLIP]
        rest = ["--seed", 7, "--workers", 1, "--config", "run.toml", "--out", "run"]
        crashed = clipline_command(folder, "train", "so_lr", *flags, *rest, program=CRASHING)
        if crashed.code != 9:
            return crashed, None
        shutil.copytree(folder / "run", folder / "again")
        first = clipline_command(folder, "train", "--resume", "run", "--json")
        if first.code:  # else every refusal would look like the one that is wanted
            raise RuntimeError(f"a crashed run cannot be resumed as it was: {first.last}")
        train = folder / "posts" / "train"
        tags = np.load(train / "field.tags.npy")
        tags[0] = (tags[0] + 1) % 500
        _rewritten(train, tags)
        second = clipline_command(folder, "train", "--resume", "again", "--json")
        if second.code:
            return second, None
        models = [load_file(folder / run / "model.safetensors") for run in ("run", "again")]
        apart = math.sqrt(sum(float(np.square(models[0][key] - models[1][key]).sum()) for key in models[0]))
        dim = sum(value.size for value in models[0].values())
        server_lr = read_toml(folder / "run" / "settings.toml")["server_lr"]
        return second, apart * 4 / (server_lr * NOISE * CLIP * math.sqrt(2 * dim))


def _rewritten(store: Path, tags: np.ndarray) -> None:
    """The store prepared again from corrected data: its manifest is right."""
    from clipline.data.manifest import sha256

    np.save(store / "field.tags.npy", tags)
    manifest = json.loads((store / "population.json").read_text())
    manifest["sha256"]["field.tags.npy"] = sha256(store / "field.tags.npy")
    (store / "population.json").write_text(json.dumps(manifest))


def resumed() -> Value:
    """Whether the run goes on, and what it is charged."""
    answer, _ = corrected()
    return f"refused: {answer.last}" if answer.code else f"goes on, {json.loads(answer.out)['rounds']} rounds charged"


def noise_left() -> Value:
    """The two releases against each other."""
    answer, share = corrected()
    return f"refused: {answer.last}" if share is None else share


@cache
def together() -> tuple[list[Answer], int]:
    """Two processes resume one killed run; gives what became of them and how many rounds were left."""
    rounds = 50
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        flags = [
            "--population-size",
            200,
            "--cohort-size",
            10,
            "--rounds",
            rounds,
            "--noise-multiplier",
            1,
            "--clip",
            1,
        ]
        killed = begun(folder, "train", *flags, "--noise-source", "system", "--workers", 1, "--out", "run")
        metrics, until = folder / "run" / "metrics.jsonl", time.monotonic() + 60
        while killed.poll() is None and time.monotonic() < until:
            if metrics.exists() and metrics.read_text().count("\n") >= 5:
                break
            time.sleep(0.02)
        killed.kill()
        ended(killed)
        done = metrics.read_text().count("\n")
        both = [begun(folder, "train", "--resume", "run", "--workers", 1, "--json") for _ in range(2)]
        return [ended(one) for one in both], rounds - done


def finished() -> Value:
    """How many finish."""
    answers, _ = together()
    failed = [answer for answer in answers if answer.code]
    return f"{len(answers) - len(failed)}" + (f", the other refused: {failed[0].last}" if len(failed) == 1 else "")


def released_twice() -> Value:
    """Rounds that both released and each charged once."""
    answers, left = together()
    return left if all(answer.code == 0 for answer in answers) else 0


def seconds_stored() -> Value:
    """The area under the ROC curve of a round's seconds, for whether a user of a thousand posts was sampled."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_posts(folder / "posts", {"heavy": 1000, **{f"u{number}": 2 for number in range(9)}})
        (folder / "run.toml").write_text("client_epochs = 12\nevaluate_every = 100\n")
        flags = ["--data", "posts", "--cohort-size", 5, "--rounds", 24, "--noise-multiplier", 1, "--clip", 1]
        rest = ["--seed", 7, "--workers", 1, "--config", "run.toml", "--out", "run", "--json"]
        answer = clipline_command(folder, "train", "so_lr", *flags, *rest)
        if answer.code:
            return str(answer)
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        timed = [name for name in lines[0] if "seconds" in name]
        if not timed and "seconds" not in answer.out:
            return "not stored"
        settings = task_named("so_lr").settings.overridden(
            {**read_toml(folder / "run" / "settings.toml"), "data": str(folder / "posts")}, "the attack"
        )
        training = task_named("so_lr").training(settings)
        sampler, streams = training.algorithm.sampler, training.problem.runs[0].streams
        came = [0 in sampler.draw(streams.sampling(line["round"])).users for line in lines]
        seconds = [line[timed[0]] for line in lines]
        return area(*([s for s, here in zip(seconds, came, strict=True) if here is there] for there in (True, False)))


ATTACKS = [
    Attack(
        "5",
        "Resume on changed data",
        "`clipline train so_lr` with noise from the seed is killed after the first of two rounds. The run "
        "directory is resumed as it was. A copy of it is resumed after one tag of one user was corrected, "
        "and the store's checksums with it.",
        [
            Measure("resumed", "resume after a correction", "refused", resumed),
            Measure("noise", "distance of the two models over that of two fresh noises", "1, or refused", noise_left),
        ],
    ),
    Attack(
        "7",
        "Two processes on one run directory",
        "`clipline train` on drawn handwriting, with noise from the system, is killed after five or more of"
        " 50 rounds. Then two processes resume it at once.",
        [
            Measure("finished", "processes of two that finish", "1", finished),
            Measure("twice", "rounds released twice and charged once", "0", released_twice),
        ],
    ),
    Attack(
        "11",
        "Seconds of a round",
        "`clipline train so_lr` trains 24 rounds of 10 users, of whom half are sampled. One of them has a "
        "thousand posts. The figure is the area under the ROC curve of the seconds in metrics.jsonl, for "
        "whether that user was sampled.",
        [
            Measure(
                "auc", "area under the ROC curve for a heavy user, as stored by default", "not stored", seconds_stored
            )
        ],
    ),
]
