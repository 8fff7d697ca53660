"""Models of `clipline train` are found by the name of the task or by its file."""

import hashlib
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import clipline as cl
from clipline.cli import main
from clipline.errors import RunError, SettingError
from clipline.serve.load import OtherCodeWarning, code_of

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
        flags = ["--data", path / "t.npz", "--user-column", "user", "--workers", 1, "--seed", 914_237_555]
        command("train", "mine.py", *flags, "--no-report", "--out", "run")
    return path


def test_a_run_of_a_file_is_loaded_by_that_file_and_predicts_by_its_function(trained, monkeypatch):
    monkeypatch.chdir(trained)
    saved = cl.load("run", model="mine.py")
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


def test_no_file_is_run_that_is_not_named_wherever_it_lies(tmp_path, monkeypatch):
    harm = "raise AssertionError('this was run')\n"
    (tmp_path / "run").mkdir()
    for name in ("beside.py", "run/task.py"):
        (tmp_path / name).write_text(harm)
    monkeypatch.chdir(tmp_path)
    checksum = hashlib.sha256(harm.encode()).hexdigest()  # whoever wrote the card may have written the file too
    for name in ("beside.py", "run/task.py", "run/../beside.py", str(tmp_path / "beside.py"), "gone.py", "beside.py:x"):
        with pytest.raises(RunError) as error:
            code_of({"name": name, "code": checksum}, None, Path("run"))
        assert str(error.value) == (
            f"the model was defined in the file {name!r}, and no code is run that you have not named: read that file, "
            'then give load(path, model="FILE.py") or --model FILE.py'
        )


def test_a_file_that_has_changed_is_warned_of(trained, tmp_path):
    (tmp_path / "other.py").write_text(TASK + "\n# mended\n")
    with pytest.warns(OtherCodeWarning, match=r"other.py' is not the file that the model was trained with") as caught:
        assert cl.load(trained / "run", model=str(tmp_path / "other.py")).function is not None
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cl.load(trained / "run", model=str(trained / "mine.py"))


def test_a_file_with_a_task_of_its_own_needs_the_model_and_an_unknown_task_is_refused(tmp_path):
    (tmp_path / "task.py").write_text("TASK = 1\n")
    with pytest.raises(SettingError, match="defines TASK, whose model cannot be made without its data"):
        code_of({}, str(tmp_path / "task.py"), tmp_path)
    with pytest.raises(SettingError, match="did you mean 'handwriting'"):
        code_of({"name": "handwritten"}, None, None)


def test_a_model_of_a_task_of_clipline_is_made_with_its_options(tmp_path, monkeypatch):
    monkeypatch.setattr("clipline.tasks.handwriting.TEST_WRITERS", 50)
    flags = ["--rounds", 1, "--cohort-size", 5, "--population-size", 20, "--classes", 3]
    command("train", "handwriting", *flags, "--workers", 1, "--no-report", "--out", tmp_path / "run")
    saved = cl.load(tmp_path / "run")
    assert saved.card["task"] == {"name": "handwriting", "options": {"classes": 3}}
    pixels = np.full((2, 28, 28), 255, np.uint8)
    bias = load_file(tmp_path / "run" / "model.safetensors")["out.bias"]
    predicted = saved.predict({"pixels": pixels, "labels": np.zeros(2, np.uint8)})
    assert predicted.shape == (2, 3)
    assert torch.isfinite(bias).all()
