"""What is fuzzed: readers of tables, stores and the paper's files, settings, run directories, models, commands."""

import gzip
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import tff_layouts
import torch
from fuzz.fuzzing import Target
from samples import cross_entropies, linear_float32, small_population
from study_task import seeds, tiny_task

import clipline as cl
from clipline.cli import main
from clipline.cli import study as study_command
from clipline.cli import verify as verify_command
from clipline.cli.train import resolve
from clipline.data.manifest import verify_store
from clipline.data.store import write_store
from clipline.privacy.ledger import Ledger
from clipline.study.report import write_report
from clipline.study.study import Study
from clipline.training.callbacks import Callback
from clipline_paper.data.catalogue import CATALOGUE
from clipline_paper.data.tff_files import read_tff_hdf5, read_tff_sqlite

COLUMNS = {"categories": {"town": ["a", "b"]}, "lengths": {"words": 3}, "missing": 0.0}
CSV = "user,km,age,town\n" + "".join(f"u{n % 4},{n / 3:.3f},{n},{'ab'[n % 2]}\n" for n in range(12))
JSONL = "".join(f'{{"user": "u{n % 4}", "km": {n / 3}, "words": [{n}, 1], "town": "a"}}\n' for n in range(8))


def table(name, content, **options):
    def read(folder):
        people = cl.Population.from_table(folder / name, user="user", **options)
        assert np.isfinite(people.fields["km"]).all() if people.fields.get("km") is not None else True
        assert people.offsets[-1] == people.examples
        write_store(folder / "store", people_rows(people), source="fuzz")
        verify_store(folder / "store")
        return cl.Population.open(folder / "store")

    return Target(name, {name: content}, read)


def people_rows(people):
    ids = np.repeat(people.user_ids, np.diff(people.offsets))
    yield ids, {name: np.asarray(people.fields[name][:]) for name in people.fields if people.fields[name].dtype != "O"}


def tables():
    towns = {"categories": {"town": ["a", "b"]}}
    yield table("rides.csv", CSV.encode(), **towns)
    yield table("rides.tsv", CSV.replace(",", "\t").encode(), **towns)
    yield table("rides.csv.gz", gzip.compress(CSV.encode(), mtime=0), **towns)
    yield table("rides.jsonl", JSONL.encode(), **COLUMNS)
    yield table("rides.jsonl.gz", gzip.compress(JSONL.encode(), mtime=0), **COLUMNS)
    with TemporaryDirectory() as name:
        import pyarrow as pa
        from pyarrow import parquet

        rows = {"user": [f"u{n % 4}" for n in range(12)], "km": np.arange(12) / 3, "words": [[n] for n in range(12)]}
        parquet.write_table(pa.table(rows), Path(name) / "a.parquet")
        yield table("rides.parquet", (Path(name) / "a.parquet").read_bytes())
        np.savez(Path(name) / "a.npz", user=np.arange(12) % 4, km=np.arange(12) / 3, image=np.ones((12, 2, 2)))
        yield table("rides.npz", (Path(name) / "a.npz").read_bytes())
        table_ = cl.Population.from_arrays(np.arange(20) % 5, x=np.arange(20.0), words=[[n] for n in range(20)])
        table_.save(Path(name) / "store")
        files = files_of(Path(name) / "store")

        def read_store(folder):
            people = cl.Population.open(folder)
            people.fingerprint()
            verify_store(folder)
            return str(people)

        yield Target("store", files, read_store)
        tff_layouts.write_original(Path(name), "emnist", "hdf5")
        tff_layouts.write_original(Path(name), "emnist", "sqlite")
        for path in sorted(Path(name).glob("*.h5"))[:1]:
            yield Target("tff.h5", {"a.h5": path.read_bytes()}, original(read_tff_hdf5, "a.h5", ["pixels", "label"]))
        for path in sorted(Path(name).glob("*.sqlite")):
            yield Target(
                "tff.sqlite", {"a.sqlite": path.read_bytes()}, original(sqlite, "a.sqlite", ["pixels", "label"])
            )


def sqlite(path, fields):
    return read_tff_sqlite(path, "all_train", fields=fields)


def original(read, name, fields):
    def run(folder):
        chunks = read(folder / name, fields=fields)
        write_store(folder / "store", map(CATALOGUE["emnist"].convert, chunks), source="fuzz")

    return run


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


SETTINGS = b"""task = "handwriting"
rounds = 3
cohort_size = 20
client_lr = 0.1
epsilon = 4.0
quantile = 0.5
clip_start = 0.1
sampling = "poisson"
server = "sgd"
evaluate_every = 1
delta = 1e-5
seed = 3
client_lr_schedule = "warmup:10,cosine"
"""


def settings(folder):
    _, found = resolve(None, folder / "settings.toml", {})
    found.controller(), found.privacy(), found.server_optimiser(), found.correlation(), found.local("mean")
    return found.to_toml()


class StopAt(Callback):
    """Ends a run so that it can be resumed."""

    stop_requested = False

    def on_round(self, report, state):
        self.stop_requested = state.round_index >= 6


def training():
    return cl.Training(
        linear_float32(), cross_entropies, small_population(), rounds=8, cohort_size=12, local=cl.LocalSGD(lr=0.1),
        privacy=cl.Privacy(epsilon=8.0, population_size=60), seed=1 << 60,
    )  # fmt: skip


def resume(folder):
    return str(training().resume(folder).guarantee)


def verified(folder):
    verify_command.verify(folder, None, None, None, False)
    verify_command.verify(folder, None, None, None, True)


def reported(folder):
    text = write_report([folder], folder / "page.html").read_text(encoding="utf-8")
    assert "\x1b" not in text
    assert "\x00" not in text


def loaded(folder):
    saved = cl.load(folder, linear_float32)
    saved.predict({"x": np.ones((2, 6), np.float32)})
    return str(saved)


def checked_study(folder):
    study_command.check(folder)
    Study(folder, tiny_task()).directory.check()


def runs():
    with TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stopped, whole, study = (Path(name) / one for one in ("stopped", "whole", "study"))
        training().run([StopAt(), cl.RunDirectory(stopped)])
        training().run([cl.RunDirectory(whole)])
        texts = ("settings.toml", "ledger.jsonl", "metrics.jsonl", "model.safetensors")
        yield Target("verify", files_of(whole), verified, texts, 3)
        yield Target("report", files_of(whole), reported, texts, 5)
        yield Target("resume", files_of(stopped), resume, slow=10)
        yield Target("model", {"model.safetensors": (whole / "model.safetensors").read_bytes()}, loaded)
        yield Target("ledger", {"ledger.jsonl": (whole / "ledger.jsonl").read_bytes()}, lambda folder: str(
            Ledger.read(folder / "ledger.jsonl", unfinished=True)
        ))  # fmt: skip
        made = Study(study, tiny_task())
        made.results(seeds(2))
        yield Target(
            "study", {one: data for one, data in files_of(study).items() if not one.startswith(".")}, checked_study
        )
        yield Target("report of a study", files_of(study), reported, slow=5)


PLAN = (
    b"plan\n--users\n1000\n--cohort\n50\n--rounds\n20\n--epsilon\n4\n--parameters\n1000\n--delta\n1e-5\n"
    b"--sampling\npoisson\n--relation\nzero-out\n"
)


def command(folder):
    """The words of a command line, one a line, as `clipline` would be given them; what it prints is looked at."""
    words = (folder / "words.txt").read_bytes().decode("utf-8", "surrogateescape").replace("\0", "").splitlines()
    with mock.patch.object(sys, "argv", ["clipline", *(words if words[:1] == ["plan"] else ["plan", *words])]):
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    assert code in (None, 0, 2), code


def targets():
    """All of them; takes some seconds."""
    torch.set_num_threads(1)
    sys.setrecursionlimit(1000)
    return [
        *tables(),
        Target("settings", {"settings.toml": SETTINGS}, settings),
        *runs(),
        Target("command", {"words.txt": PLAN}, command),
    ]
