"""Folders that were damaged, or written by somebody who means harm: a sentence each, and no code is run."""

import copy
import json
import os
import pickle
import struct

import numpy as np
import pytest
import torch
from safetensors import safe_open
from samples import small_training
from torch import nn

import clipline as cl
from clipline.errors import CliplineError, ModuleError, RunError, SettingError
from clipline.serve.load import code_of
from clipline.training.durable import save_tensors
from clipline.training.model_card import CARD_KEY, MODEL

ODD = [None, [], {}, -1, 10**400, 1e308, True, "x", "\x1b[31m", "9" * 5000, [["x"]]]


def linear():
    return nn.Linear(6, 3, bias=False)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The bytes, the tensors and the card of a good file."""
    folder = small_training(1).run().save(tmp_path_factory.mktemp("saved") / "model")
    with safe_open(folder / MODEL, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        card = json.loads(file.metadata()[CARD_KEY])
    card["columns"] = {"scale": {"x": [0.0, 2.0]}, "lengths": {"t": 3}}
    return (folder / MODEL).read_bytes(), tensors, card


def with_card(path, tensors, text):
    save_tensors(tensors, path / MODEL, {CARD_KEY: text})
    return path


def leaves(part, where=()):
    """The way to every entry, down to the innermost."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
        yield (*where, key)
        yield from leaves(value, (*where, key))


def changed(card, where, value):
    card = copy.deepcopy(card)
    part = card
    for key in where[:-1]:
        part = part[key]
    if value is KeyError:
        del part[where[-1]]
    else:
        part[where[-1]] = value
    return json.dumps(card)


@pytest.mark.filterwarnings("ignore:the model given prints other layers")
def test_every_entry_of_a_card_may_be_missing_or_odd(stored, tmp_path):
    _, tensors, card = stored
    used = {name: card[name] for name in ("guarantee", "metrics", "model", "fields", "columns")}
    assert cl.load(with_card(tmp_path, tensors, json.dumps(card)), linear).guarantee.rounds == 1
    said = []
    for where in leaves(used):
        for value in [*ODD, KeyError]:
            try:
                saved = cl.load(with_card(tmp_path, tensors, changed(card, where, value)), linear)
                assert "epsilon" in str(saved)
                saved.predict({"x": np.ones((2, 6))})
            except CliplineError as error:  # and nothing else
                said.append(str(error))
    assert len(said) > 150  # most oddities are noticed, too
    assert all(len(sentence) < 900 and "\x1b" not in sentence for sentence in said)


@pytest.mark.parametrize("text", ["[]", "null", "3", "", "{", "NaN", "[" * 100_000, "9" * 5000, '{"guarantee": []}'])
def test_a_card_that_is_no_card_is_refused(stored, tmp_path, text):
    with pytest.raises(RunError, match="has a damaged card"):
        cl.load(with_card(tmp_path, stored[1], text), linear)


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("guarantee", "epsilon"), -1, r"epsilon=-1 must be a finite number at least 0"),
        (("guarantee", "epsilon"), 1e300, "epsilon=1e.300 must be a finite number at least 0 and at most 1e.100"),
        (("guarantee", "delta"), 2, "delta=2 must be a finite number above 0 and below 1"),
        (("guarantee", "sampler"), "magic", "sampler='magic' must be one of none, poisson"),
        (("guarantee", "rounds"), KeyError, "has a damaged card .*rounds"),
        (("fields", "x", "dtype"), "O", "field 'x' holds no numbers"),
        (("fields", "x", "shape"), [-1], "field 'x' holds no numbers"),
        (("columns", "scale"), {"x": [0, 0]}, "what divides above 0"),
        (("columns", "lengths", "t"), 10**400, "a number of too many digits"),
    ],
)
def test_the_first_odd_entry_is_named(stored, tmp_path, where, value, words):
    with pytest.raises(RunError, match=words):
        cl.load(with_card(tmp_path, stored[1], changed(stored[2], where, value)), linear)


def test_files_that_are_cut_short_or_no_safetensors_are_refused_and_pickles_not_loaded(stored, tmp_path):
    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    good, header = stored[0], b'{"weight":{"dtype":"F32","shape":[9999999999999,9],"data_offsets":[0,8]}}'
    bad = [good[:cut] for cut in (0, 7, 8, 300, len(good) - 1)]
    bad += [struct.pack("<Q", len(header)) + header + bytes(8), struct.pack("<Q", 1 << 63), pickle.dumps(Harm())]
    torch.save({"model": Harm()}, tmp_path / "torch")
    for data in [*bad, (tmp_path / "torch").read_bytes()]:
        (tmp_path / MODEL).write_bytes(data)
        with pytest.raises(RunError, match="cannot be read as a saved model"):
            cl.load(tmp_path, linear)
    assert not (tmp_path / "harm").exists()


def test_paths_that_are_no_folder_of_a_model_are_refused(stored, tmp_path):
    (tmp_path / "file").write_bytes(stored[0])
    (tmp_path / "folder" / MODEL).mkdir(parents=True)
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / MODEL).symlink_to(tmp_path / "loop" / MODEL)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / MODEL)
    for path in ("none", "file", "folder", "loop", "pipe", "a\0b", "a" * 5000):
        with pytest.raises(RunError, match=r"must be a folder with model\.safetensors, and has none"):
            cl.load(tmp_path / path, linear)
    for path in (None, 3, ""):
        with pytest.raises(SettingError, match="must be the path of a folder"):
            cl.load(path, linear)


def test_what_is_given_with_a_folder_is_checked_too(stored, tmp_path):
    folder = with_card(tmp_path, stored[1], json.dumps(stored[2]))
    with pytest.raises(ModuleError, match="model needs arguments to be made"):
        cl.load(folder, nn.Linear)
    with pytest.raises(SettingError, match="predict=3 must be a function"):
        cl.load(folder, linear, predict=3)
    for device in ("nonsense", 3.5):
        with pytest.raises(SettingError, match="device="):
            cl.load(folder, linear, device=device)


def test_a_run_of_a_paper_task_is_loaded_without_its_data(tmp_path):
    model = code_of({"name": "emnist_cr", "options": {}}, None, tmp_path).make()
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_206_590  # as the original's
    with pytest.raises(RunError, match="no code is run that you have not named"):
        code_of({"name": "a" * 5000 + ".py"}, None, tmp_path)
