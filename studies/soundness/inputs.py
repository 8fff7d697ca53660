"""Rows 10, 13 and 14: a user's value in a message, offsets that fall, and commands that end in a traceback."""

from __future__ import annotations

import json
import sqlite3
import tempfile
import traceback
from collections.abc import Callable
from contextlib import chdir
from functools import partial
from pathlib import Path

import h5py
import numpy as np
from attack import Attack, Measure, Value, classified, clips, cross_entropies, population_of, private_sum, training_of
from commands import Answer, clipline_command, write_posts
from torch import nn

from clipline import LocalSGD, Population, Training

LABEL = 7777777  # of one user, where there are three classes


def of_bad_label(engine: str) -> tuple[Training, list[str]]:
    """A training in which one user has a label that does not exist, and all users, that one last."""
    users = classified({**{f"u{number:02}": 5 for number in range(20)}, "z": 2})
    users["z"]["y"][0] = LABEL
    local = LocalSGD(0.1, 5)
    return training_of(nn.Linear(8, 3), cross_entropies, users, local, cohort_size=21, engine=engine), list(users)


def bad_label(engine: str) -> Value:
    """A run with that user."""
    training, _ = of_bad_label(engine)
    try:
        training.run()
    except Exception as error:  # whatever it is, it is seen
        told = "with" if str(LABEL) in "".join(traceback.format_exception(error)) else "without"
        return f"aborts in round 0, {told} the label in the message"
    return "trains"


def added() -> Value:
    """What that user adds to the sum."""
    training, users = of_bad_label("one-by-one")
    try:
        return clips(private_sum(training, users), private_sum(training, users[:-1]))
    except Exception as error:  # as above
        return f"aborts: {type(error).__name__}"


def falling_offsets() -> Value:
    """A stored population whose third user begins before the second ends."""
    users = classified({f"u{number:02}": 5 for number in range(20)})
    with tempfile.TemporaryDirectory() as place, chdir(place):
        population_of(users).save("store")
        offsets = np.load("store/offsets.npy")
        offsets[2] = offsets[3] + 4
        np.save("store/offsets.npy", offsets)
        opened = Population.open("store")
        training = training_of(nn.Linear(8, 3), cross_entropies, opened, LocalSGD(0.1, 5), cohort_size=20)
        training.run()
        owners = np.zeros(opened.examples, int)
        for user in range(len(opened)):
            owners[opened.offsets[user] : opened.offsets[user + 1]] += 1
        return f"trains, {int((owners > 1).sum())} rows belong to two users"


# As the command line does it: a refusal is one sentence, anything else a traceback.
LIBRARY = """
import sys, torch, numpy as np
from clipline import LocalSGD, Population, Privacy, Training
from clipline.errors import CliplineError
def train(model):
    people = Population.from_arrays(np.repeat(np.arange(8), 4), x=np.ones((32, 6), np.float32), y=np.zeros(32, int))
    loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    privacy = Privacy(noise_multiplier=0)
    Training(model, loss, people, rounds=1, cohort_size=4, local=LocalSGD(0.1), seed=0, privacy=privacy).run()
try:
    {}
except CliplineError as error:
    print(f"error: {{error}}", file=sys.stderr)
    sys.exit(2)
"""


def told(prepare: Callable[[Path], Answer]) -> Value:
    """What a command says, in a folder of its own."""
    with tempfile.TemporaryDirectory() as place:
        return str(prepare(Path(place)))


def plan(folder: Path) -> Answer:
    """A plan that needs no epsilon at all."""
    given = "--population-size 1000 --cohort-size 5 --rounds 1 --noise-multiplier 100 --delta 0.5"
    return clipline_command(folder, "plan", *given.split())


def digits(folder: Path, key: str) -> Answer:
    """A number of 25 digits in a file of settings."""
    (folder / "run.toml").write_text(f"{key} = {10**24}\n")
    given = "--population-size 100 --cohort-size 10 --rounds 1 --noise-multiplier 0.1 --workers 1 --out run"
    return clipline_command(folder, "train", "--config", "run.toml", *given.split())


def hdf5(folder: Path, kind: str) -> Answer:
    """TFF's layout with a field that is none."""
    with h5py.File(folder / "posts.h5", "w") as root:
        client = root.create_group("examples/a")
        client.create_dataset("label", data=np.zeros(2, np.int64))
        if kind == "shape":
            client.create_dataset("pixels", shape=(2**44, 28, 28), dtype="f4", chunks=(1, 28, 28))
        elif kind == "group":
            client.create_group("pixels")
        else:
            client.create_dataset("pixels", data=np.zeros((2, 28, 28), [("a", "f4"), ("b", "i4")]))
    return clipline_command(
        folder, "data", "prepare", "emnist", "--from", "posts.h5", "--to", "store", "--split", "train"
    )


def null_counts(folder: Path) -> Answer:
    """TFF's SQLite with clients whose number of examples is NULL."""
    base = sqlite3.connect(folder / "emnist_all.sqlite")
    base.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
    base.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
    base.execute("INSERT INTO client_metadata VALUES ('a', 'all_train', NULL)")
    base.commit()
    base.close()
    given = ["--from", "emnist_all.sqlite", "--to", "store", "--split", "train"]
    return clipline_command(folder, "data", "prepare", "emnist", *given)


def table(folder: Path, name: str, text: str) -> Answer:
    """A table of one's own."""
    (folder / name).write_text(text)
    return clipline_command(folder, "data", "prepare", "table", "--from", name, "--to", "store", "--user-column", "u")


def manifest(folder: Path, text: str) -> Answer:
    """A store with this manifest."""
    population_of(classified({"a": 2, "b": 2})).save(folder / "store")
    (folder / "store" / "population.json").write_text(text)
    return clipline_command(folder, program=LIBRARY.format('Population.open("store")'))


def module(folder: Path, made: str) -> Answer:
    """A model of the library."""
    return clipline_command(folder, program=LIBRARY.format(f"train({made})"))


def emoji(folder: Path) -> Answer:
    """A run whose data lie in a folder with an emoji, and its settings read again."""
    write_posts(folder / "posts 🙂", dict.fromkeys("ABCD", 2))
    given = [
        "--data",
        "posts 🙂",
        "--cohort-size",
        2,
        "--rounds",
        1,
        "--noise-multiplier",
        1,
        "--clip",
        1,
        "--workers",
        1,
    ]
    first = clipline_command(folder, "train", "so_lr", *given, "--out", "run")
    if first.code:
        return first
    return clipline_command(folder, "train", "--config", "run/settings.toml", "--out", "again")


COMMANDS: dict[str, tuple[str, Callable[[Path], Answer]]] = {
    "plan": ("`plan` with noise multiplier 100 and delta 0.5", plan),
    "digits": ("`max_examples` of 25 digits in TOML", partial(digits, key="max_examples")),
    "digits clip": ("`clip_start` of 25 digits in TOML", partial(digits, key="clip_start")),
    "hdf5 shape": ("HDF5 with an absurd shape", partial(hdf5, kind="shape")),
    "hdf5 group": ("HDF5 with a group as a field", partial(hdf5, kind="group")),
    "hdf5 compound": ("HDF5 with a compound field", partial(hdf5, kind="compound")),
    "sqlite": ("SQLite with NULL counts", null_counts),
    "csv": ("CSV with a column twice", partial(table, name="t.csv", text="u,x,x\na,1,2\nb,3,4\n")),
    "jsonl": (
        "JSONL nested a thousand deep",
        partial(table, name="t.jsonl", text='{"u": "a", "x": ' + "[" * 1000 + "1" + "]" * 1000 + "}\n"),
    ),
    "manifest list": ("manifest `[]`", partial(manifest, text="[]")),
    "manifest null": ("manifest `null`", partial(manifest, text="null")),
    "manifest fields": (
        "manifest with a number as fields",
        partial(manifest, text=json.dumps({"version": 1, "fields": 3, "user_ids": False})),
    ),
    "weight norm": (
        "`torch.nn.utils.weight_norm`",
        partial(module, made="torch.nn.utils.weight_norm(torch.nn.Linear(6, 3))"),
    ),
    "lazy": ("`torch.nn.LazyLinear`", partial(module, made="torch.nn.LazyLinear(3)")),
    "emoji": ("settings of a run with an emoji in its path", emoji),
}
FINE = ("plan", "emoji")  # there is nothing wrong with what they ask for

ATTACKS = [
    Attack(
        "10",
        "A bad label",
        "21 users are all sampled, and one has a label that no class has. The message is searched with all its causes.",
        [
            Measure("one by one", "run with one bad label, one by one", "trains", lambda: bad_label("one-by-one")),
            Measure("stacked", "the same, stacked", "trains", lambda: bad_label("stacked")),
            Measure("added", "what that user adds to the sum, clips", "0", added),
        ],
    ),
    Attack(
        "13",
        "Offsets of an opened store",
        "`Population.open` reads a store whose file of offsets was altered so that they fall once. Then a "
        "round is trained.",
        [Measure("falling", "offsets that fall", "refused", falling_offsets)],
    ),
    Attack(
        "14",
        "Tracebacks",
        "Each command runs as a process of its own. The cell has the last line of what it said.",
        [
            Measure(key, what, "exit 0" if key in FINE else "exit 0 or 2, a sentence", partial(told, prepare))
            for key, (what, prepare) in COMMANDS.items()
        ],
    ),
]
