"""Models of `clipline train` are found by the name of the task or by its file."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import clipline as cl
from clipline.cli import main
from clipline.errors import RunError, SettingError
from clipline.serve.rebuild import code_of

TASK = """
import torch
from torch import nn

SETTINGS = {"rounds": 2, "cohort_size": 10, "client_lr": 0.1, "noise_multiplier": 0.8}


def model():
    return nn.Linear(3, 2)


def predict(model, batch):
    return model(batch["x"]).argmax(dim=1)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])
"""


def command(*words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["clipline", *map(str, words)])
        main()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a task's file and the run of it."""
    path = tmp_path_factory.mktemp("own")
    (path / "mine.py").write_text(TASK)
    rng = np.random.default_rng(0)
    np.savez(path / "t.npz", user=np.repeat(np.arange(40), 3), x=rng.normal(size=(120, 3)), y=np.ones(120, np.int64))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        flags = [
            "--data",
            path / "t.npz",
            "--user-column",
            "user",
            "--workers",
            1,
            "--seed",
            914_237_555,
            "--no-report",
        ]
        command("train", "mine.py", *flags, "--out", "run")
    return path


def test_a_run_of_a_file_is_loaded_by_that_file_and_predicts_by_its_function(trained, monkeypatch):
    monkeypatch.chdir(trained)
    saved = cl.load("run")
    tensors = load_file("run/model.safetensors")
    x = np.random.default_rng(1).normal(size=(9, 3)).astype(np.float32)
    best = (x @ tensors["weight"].numpy().T + tensors["bias"].numpy()).argmax(axis=1)
    assert saved.predict({"x": x}).tolist() == best.tolist()
    assert saved.guarantee.rounds == 2


def test_neither_seed_nor_place_of_the_data_is_stored_with_the_model(trained):
    stored = (trained / "run" / "model.safetensors").read_bytes()
    assert b"914237555" not in stored
    assert str(trained).encode() not in stored
    assert b"user_column" not in stored


def test_a_file_that_is_gone_or_changed_or_in_the_folder_is_not_run_unless_named(trained, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=r"defined in 'mine.py', and there is no such file here: give load"):
        cl.load(trained / "run")
    (tmp_path / "mine.py").write_text(TASK + "\nraise AssertionError\n")
    with pytest.raises(RunError, match="that file has changed since: give load"):
        cl.load(trained / "run")
    (tmp_path / "mine.py").write_text(TASK)
    code = json.loads(json.dumps(cl.load(trained / "run").card["task"]))
    with pytest.raises(RunError, match="a file inside the folder that is loaded"):
        code_of(code, None, tmp_path)
    elsewhere = tmp_path / "other.py"
    elsewhere.write_text(TASK + "\n# mended\n")
    assert cl.load(trained / "run", model=str(elsewhere)).function is not None


def test_a_link_out_of_the_folder_is_a_file_inside_it(tmp_path, monkeypatch):
    harm = "raise AssertionError('this was run')\n"
    (tmp_path / "run").mkdir()
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "task.py").write_text(harm)
    (tmp_path / "run" / "task.py").symlink_to(tmp_path / "beside" / "task.py")
    (tmp_path / "run" / "linked").symlink_to(tmp_path / "beside")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    checksum = hashlib.sha256(harm.encode()).hexdigest()
    for name in ("run/task.py", "run/linked/task.py", "beside/../run/task.py", str(tmp_path / "run" / "task.py")):
        for folder in ("run", tmp_path / "run"):
            with pytest.raises(RunError, match="a file inside the folder that is loaded"):
                code_of({"name": name, "code": checksum}, None, Path(folder))
    with pytest.raises(RunError, match="a file inside the folder that is loaded"):
        code_of({"name": "link/task.py", "code": checksum}, None, Path("link"))


def test_a_file_with_a_task_of_its_own_needs_the_model(tmp_path):
    (tmp_path / "task.py").write_text("TASK = 1\n")
    with pytest.raises(SettingError, match="defines TASK, whose model cannot be made without its data"):
        code_of({}, str(tmp_path / "task.py"), tmp_path)


def test_a_model_of_a_task_of_clipline_is_made_with_its_options(tmp_path):
    flags = ["--rounds", 1, "--cohort-size", 5, "--population-size", 20, "--classes", 3]
    command("train", "handwriting", *flags, "--workers", 1, "--no-report", "--out", tmp_path / "run")
    saved = cl.load(tmp_path / "run")
    assert saved.card["task"] == {"name": "handwriting", "options": {"classes": 3}}
    pixels = np.full((2, 28, 28), 255, np.uint8)
    bias = load_file(tmp_path / "run" / "model.safetensors")["out.bias"]
    predicted = saved.predict({"pixels": pixels, "labels": np.zeros(2, np.uint8)})
    assert predicted.shape == (2, 3)
    assert torch.isfinite(bias).all()


def test_an_unknown_task_is_refused_with_the_nearest():
    with pytest.raises(SettingError, match="did you mean 'handwriting'"):
        code_of({"name": "handwritten"}, None, None)
