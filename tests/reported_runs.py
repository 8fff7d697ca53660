"""Run directories and study directories written by hand, as training and studies leave them."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from clipline import __version__
from clipline.study.record import RunRecord, identity_of
from clipline.training.run_files import guarantee_json
from clipline.trust.verify import verify

RESOLVED = """
# What it is about:
# facts.task = 'rides'
# facts.data = 'own'
# facts.measured_on = 'users outside the training population'

# Resolved when the run began:
# noise_multiplier = {z}
# delta_noise_multiplier = {delta_z!r}
# count_stddev = 5.0
# delta = 1e-05
# relation = '{relation}'
# planned = 'something'

# Where it ran:
# clipline = '0.1.0'
# torch = '2.13.0'
# machine = 'Linux x86_64, 2 cores'
"""


def write_run(
    path: Path, *, rounds=20, planned=20, z=1.0, clip='"quantile"', relation="add-or-remove", seed=2**61, **more
):
    """A run of `rounds` rounds without sampling; `more` are settings as TOML text. It has not ended: see `end_run`."""
    path.mkdir(parents=True)
    settings = {
        "task": '"rides"', "rounds": planned, "clip": clip, "quantile": 0.5, "cohort_size": 100,
        "population_size": 100, "noise_source": '"seed"', "seed": seed, **more,
    }  # fmt: skip
    delta_z = (z**-2 - 0.1**2) ** -0.5 if z else 0.0  # Theorem 1, with noise of 5 users on the count
    text = "".join(f"{name} = {value}\n" for name, value in settings.items())
    (path / "settings.toml").write_text(text + RESOLVED.format(z=z, delta_z=delta_z, relation=relation))
    (path / "metrics.jsonl").touch()
    (path / "ledger.jsonl").touch()
    add_rounds(path, 0, rounds, z=z)
    return path


def add_rounds(path: Path, start: int, stop: int, z=1.0, best=1.0, **columns):
    """Rounds as a training would append them: accuracy every fifth round."""
    with (path / "metrics.jsonl").open("a") as metrics, (path / "ledger.jsonl").open("a") as ledger:
        for t in range(start, stop):
            ledger.write(json.dumps({"version": 1, "round": t, "sampling": "none", "noise_multiplier": z}) + "\n")
            line = {
                "round": t, "clip": 0.1 * 1.1**t, "fraction_within": min(0.5, 0.03 * t), "delta": 1e-5,
                "epsilon": 0.5 * (t + 1) ** 0.5 if z else None, **columns,
            }  # fmt: skip
            metrics.write(json.dumps(line | ({"accuracy": best * (1 - 0.9 ** (t + 1))} if t % 5 == 4 else {})) + "\n")


def end_run(path: Path, stopped="finished"):
    """As a finished run: with a model, whose card says what the ledger comes to."""
    (path / "model.safetensors").touch()
    found = verify(path)
    guarantee = guarantee_json(found.guarantee) | {"text": str(found.guarantee)}
    resolved = {
        name: found.files.notes[name] for name in ("noise_multiplier", "delta_noise_multiplier", "count_stddev")
    }
    card = {
        "clipline": __version__,
        "stopped": stopped,
        "rounds": len(found.files.rounds),
        "guarantee": guarantee,
        "settings": {name: found.files.settings[name] for name in ("rounds", "cohort_size")},
        "resolved": resolved,
    }
    metadata = {"card": json.dumps(card), "guarantee": guarantee["text"]}
    save_file({"x": np.zeros(1)}, path / "model.safetensors", metadata)


def write_record(
    folder: Path, number: int, *, quantile=0.5, z=0.03, server_lr=1.0, seed=0, rounds=300, outcome="finished",
    task="emnist_cr", **columns,
) -> Path:  # fmt: skip
    """One run of a study; gives its file."""
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    (folder / "study.json").write_text('{"format": 1, "experiments": {}, "asked": []}')
    measured = [0.9 * (1 - 0.99**t) - z + 0.01 * quantile if t % 10 == 9 else None for t in range(rounds)]
    metrics = {name: column for name, column in columns.items() if not name.startswith("unprivate_")}
    columns = columns if metrics else {"accuracy": measured, **columns}
    settings = {
        "clip": "quantile", "quantile": quantile, "noise_multiplier": z, "server_lr": server_lr, "seed": seed,
        "rounds": rounds, "cohort_size": 100, "noise_source": "seed", "sampling": "poisson",
    }  # fmt: skip
    identity = {"task": task, "number": number, "unprivate_data_checksum": "generated", "settings": settings}
    record = RunRecord(
        identity_of(identity), identity, outcome,
        {
            "round": list(range(rounds)),
            "clip": [quantile + 0.1 + 0.01 * (t % 7) for t in range(rounds)],
            "fraction_within": [quantile + 0.001 * (t % 11) for t in range(rounds)], **columns,
        },
        {name: columns[name][-1] for name in metrics or ["accuracy"]},
        {
            "in_words": "not private: no noise was added" if z == 0 else f"(epsilon {3 / z:g}, delta 1e-04)-DP",
            "epsilon": None if z == 0 else 3 / z, "delta": 1e-4, "relation": "add-or-remove", "sampling": "poisson",
            "accountant": "privacy loss", "rounds": rounds, "population_size": 3400, "cohort_size": 100,
            "noise_multiplier": z, "delta_noise_multiplier": z, "count_stddev": 5.0,
        },
        {"machine": "Linux", "torch": "2.13.0", "unprivate_seconds": 12.0},
    )  # fmt: skip
    file = folder / "runs" / f"{record.id}.json"
    file.write_text(record.to_json())
    return file
