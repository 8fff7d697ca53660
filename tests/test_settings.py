"""Each setting is declared once, in clipline.settings: flags, TOML keys, keyword arguments, help and checks follow."""

import dataclasses
import sys
import typing

import pytest
from samples import SOURCE

from clipline import FastParts, LocalAdam, LocalSGD, QuantileClip, ServerNormalised, ServerSGD, SettingError
from clipline.cli import main
from clipline.cli.train import command
from clipline.federated.mechanism import BandedNoise
from clipline.privacy.relations import Relation
from clipline.settings import GROUPS, SETTINGS, Settings, check, keywords_for
from clipline.tasks.handwriting import CHARACTERS, TASK
from clipline.tasks.train_settings import TrainSettings, settings_from
from clipline.training.options import Compute, Privacy

TAKERS = (Privacy, Compute, FastParts, LocalSGD, LocalAdam, QuantileClip, ServerNormalised, ServerSGD, BandedNoise)
# As ServerAdam's: who changes them writes Python.
OF_ADAM = {"betas", "eps"}
# What belongs to the model and its loss is written in Python beside them, not in a file of settings.
OF_THE_MODEL = {"reduction", "row_fields"}
# Switches of fast parts are for who looks for a mistake, in Python.
SWITCHES = {"fast", *(field.name for field in dataclasses.fields(FastParts))}
# A library takes a GPU and other cores only if told so, and noise from a seed only if it is given one.
OTHER_DEFAULTS = {"device": "cpu", "workers": 1, "noise_source": None}
OUTSIDE = {
    "rounds": 0, "classes": 1, "augment": 3, "group_count": 5, "padding_in_loss": 3,
    "client_lr": -1.5, "batch_size": 0, "client_epochs": 0, "max_examples": 0, "client_optimiser": "sdg",
    "client_momentum": 1.0, "client_weight_decay": -0.5, "client_clip_norm": -0.5, "client_proximal": -0.5,
    "client_lr_schedule": "cosines",
    "server": "rmsprop", "server_lr": -1.5, "server_momentum": 1.5, "server_lr_schedule": "step:5",
    "clip": "quantil", "quantile": 1.5, "clip_start": 1e-40, "clip_lr": -0.5, "clip_rule": "cubic",
    "clamp_fraction": 3, "fixed_clip": 1e-40,
    "epsilon": -1.5, "noise_multiplier": -1.5, "delta": 1.5, "population_size": 0, "cohort_size": 0,
    "sampling": "shuffle", "relation": "neighbours", "count_stddev": -1.5, "max_epsilon": -1.5, "noise_source": "dice",
    "noise": "loud", "bands": 0,
    "test_users": 1, "evaluate_on": "train", "evaluate_every": 0, "early_stopping": "",
    "device": 7, "engine": "diesel", "precision": "float8", "workers": 0,
    "compiled_steps": "often",
    "seed": -1, "unprivate_timing": 3, "average": "maybe",
    "data": "", "user_column": "", "task": "",
}  # fmt: skip


def keyword_of(taker):
    """Field name -> setting of a class that takes settings."""
    return {field.name: field.metadata.get("setting") for field in dataclasses.fields(taker)}


def sentence_of(call):
    with pytest.raises(SettingError) as refused:
        call()
    return str(refused.value)


def test_toml_keys_are_the_declared_names():
    assert [field.name for field in dataclasses.fields(TrainSettings)] == list(SETTINGS)
    assert OUTSIDE.keys() == SETTINGS.keys()  # what follows leaves none out


def test_flags_are_the_declared_names_with_their_help_and_group():
    flags = {option.name: option for option in command.params if option.name in SETTINGS}
    assert [name for name in SETTINGS if name != "task"] == [name for name in flags if name != "task"]
    own = {option.name for option in command.params} - SETTINGS.keys()
    assert own == {"config", "help_all", "model", "out", "resume", "as_json", "tensorboard", "no_report"}
    for name, option in flags.items():
        if name != "task":
            declared = SETTINGS[name]
            flags_of = [declared.flag, *(["--users"] if name == "population_size" else [])]
            assert (option.opts, option.help, option.group) == (flags_of, declared.help, declared.group)
            assert declared.help
            assert declared.group in GROUPS
            assert option.default is None  # a file or the task may set it


@pytest.mark.parametrize("taker", TAKERS)
def test_keyword_arguments_are_declared_with_their_defaults_and_types(taker):
    hints = typing.get_type_hints(Settings)
    for field in dataclasses.fields(taker):
        name = field.metadata.get("setting")
        if name is None:
            assert field.name in OF_THE_MODEL | SWITCHES | OF_ADAM
            continue
        if (taker, name) == (ServerSGD, "server_lr"):  # the setting is for all servers, and has none for all
            assert (field.default, ServerSGD(**keywords_for(ServerSGD, TASK.settings)).lr) == (1.0, 1.0)
            continue
        assert name == field.name or name.endswith(f"_{field.name}")  # client_lr is the lr of a client
        expected = OTHER_DEFAULTS[name] if name in OTHER_DEFAULTS else SETTINGS[name].default
        assert field.default == expected
        optional = type(None) in typing.get_args(hints[name]) or name == "noise_source"
        assert optional == ("None" in str(field.type))


@pytest.mark.parametrize("name", [name for name in OUTSIDE if name != "task"])
def test_a_value_outside_its_limit_gets_the_same_sentence_from_a_file_a_flag_and_a_keyword(
    name, tmp_path, monkeypatch, capsys
):
    value = OUTSIDE[name]
    sentence = sentence_of(lambda: check(name, value))
    assert sentence.startswith(f"{name}={value!r} must be ")
    takers = [(taker, field) for taker in TAKERS for field, of in keyword_of(taker).items() if of == name]
    for taker, field in takers:
        usual = keywords_for(taker, TASK.settings)
        assert sentence_of(lambda: taker(**{**usual, field: value})) == sentence  # noqa: B023
    monkeypatch.chdir(tmp_path)
    text = f'"{value}"' if isinstance(value, str) else value
    (tmp_path / "c.toml").write_text(f"{name} = {text}\n")
    runs = [["--config", "c.toml"]]
    if SETTINGS[name].kind is not bool and name != "device":  # their flags cannot say such a thing
        runs.append([SETTINGS[name].flag, str(value)])
    for arguments in runs:
        monkeypatch.setattr(sys, "argv", ["clipline", "train", "so_lr", *arguments, "--out", "run"])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        said = sentence if arguments[0] == "--config" else sentence.replace(f"{name}=", f"{SETTINGS[name].flag} ", 1)
        said = said if said is sentence else said.replace("cohort_size", "--cohort-size")
        assert (stop.value.code, out, err) == (2, "", f"error: {said}\n")


def test_epsilon_or_noise_multiplier_is_decided_in_one_place():
    both = sentence_of(lambda: Privacy(epsilon=2.0, noise_multiplier=1.0))
    assert sentence_of(lambda: TASK.settings.overridden({"epsilon": 2.0, "noise_multiplier": 1.0}, "here")) == both
    assert sentence_of(lambda: dataclasses.replace(TASK.settings, epsilon=2.0, noise_multiplier=1.0)) == both
    none = sentence_of(Privacy)
    assert sentence_of(lambda: dataclasses.replace(TASK.settings, epsilon=None)) == none
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert ("one follows" in text) == (path == SOURCE / "training" / "options.py")


def test_choices_are_those_that_there_are():
    assert SETTINGS["relation"].choices == tuple(relation.value for relation in Relation)
    from clipline.engine.choose import ENGINES
    from clipline.engine.core.precision import PRECISIONS

    assert (SETTINGS["engine"].choices, SETTINGS["precision"].choices) == (ENGINES, PRECISIONS)
    assert SETTINGS["classes"].limits["at_most"] == len(CHARACTERS)


def test_what_has_no_default_has_to_be_given():
    given = {"task": "mine", "rounds": 3, "client_lr": 0.1, "epsilon": 2.0}
    with pytest.raises(SettingError, match=r"^cohort_size is missing: give --cohort-size, or cohort_size in mine\.py$"):
        settings_from(given, "mine.py")
    complete = settings_from({**given, "cohort_size": 5}, "mine.py")
    assert (complete.server_rate, complete.clip, complete.population_size) == (1.0, "quantile", None)
    with pytest.raises(SettingError, match="classes=3 must be left out"):
        settings_from({**given, "cohort_size": 5, "classes": 3}, "mine.py", without=["classes"])


def test_compute_is_resolved_to_what_is_there(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("clipline.engine.workers.forked.usable_cores", lambda: 8)
    auto = Compute(device="auto", workers=None)
    assert auto.resolved(parameters=10**7, cohort_size=100) == Compute(torch.device("cpu"), workers=8)
    assert auto.resolved(parameters=10**7, cohort_size=3).workers == 3  # no more than users come
    assert Compute().resolved(10**7, 100) == Compute(torch.device("cpu"))
    with pytest.raises(SettingError, match="device='cuda' must be present, and torch finds no CUDA device here"):
        Compute(device="cuda").resolved(10, 10)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert auto.resolved(parameters=10**7, cohort_size=100) == Compute(torch.device("cuda"), workers=1)
    assert auto.resolved(parameters=5994, cohort_size=100) == Compute(torch.device("cpu"), workers=1)
