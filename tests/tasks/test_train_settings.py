import math
import tomllib
from dataclasses import fields, replace

import pytest

from clipline import FixedClip, LocalAdam, LocalSGD, QuantileClip, ServerNormalised, ServerSGD, ServerYogi, SettingError
from clipline.tasks import task_named
from clipline.tasks.handwriting import TASK
from clipline.tasks.train_settings import TrainSettings, read_toml

BASE = TASK.settings


def test_what_is_written_reads_back_equal(tmp_path):
    settings = BASE.overridden({"clip": 0.3, "delta": 1e-6, "clamp_fraction": True, "max_examples": 50}, "here")
    (tmp_path / "s.toml").write_text(settings.to_toml())
    assert BASE.overridden(read_toml(tmp_path / "s.toml"), "the file") == settings
    assert "noise_multiplier" not in tomllib.loads(settings.to_toml())  # None is left out


@pytest.mark.parametrize(
    ("clip", "controller"),
    [
        ("quantile", QuantileClip(0.5, BASE.clip_start, 0.2)),
        ("fixed", FixedClip(BASE.fixed_clip)),
        ("none", FixedClip(math.inf)),
        (0.25, FixedClip(0.25)),
    ],
)
def test_the_clip_names_a_controller(clip, controller):
    assert BASE.overridden({"clip": clip}, "here").controller() == controller


def test_optimisers_of_users_and_server_follow_from_the_settings(tmp_path):
    chosen = {"client_lr": 0.1, "client_clip_norm": 2.0, "client_lr_schedule": "cosine", "server_lr_schedule": "linear"}
    adam = BASE.overridden({**chosen, "client_optimiser": "adam", "server": "yogi"}, "here")
    (tmp_path / "s.toml").write_text(adam.to_toml())
    read = BASE.overridden(read_toml(tmp_path / "s.toml"), "the file")
    more = {"clip_norm": 2.0, "lr_schedule": "cosine", "batch_size": BASE.batch_size, "reduction": "sum"}
    assert read.local("sum") == LocalAdam(0.1, **more)
    assert read.server_optimiser() == ServerYogi(0.01, lr_schedule="linear")  # its own rate
    sgd = BASE.overridden({**chosen, "client_momentum": 0.9, "client_proximal": 0.1}, "here")
    assert sgd.local("sum") == LocalSGD(0.1, **more, momentum=0.9, proximal=0.1)
    assert BASE.local().plain_sgd


def test_epsilon_and_noise_replace_each_other_but_never_stand_together():
    noisy = BASE.overridden({"noise_multiplier": 1.0}, "here")
    assert (noisy.epsilon, noisy.noise_multiplier) == (None, 1.0)
    assert noisy.overridden({"epsilon": 2.0}, "here").noise_multiplier is None
    with pytest.raises(SettingError, match="drop one of them"):
        BASE.overridden({"epsilon": 2.0, "noise_multiplier": 1.0}, "here")


def test_the_number_of_generated_users_is_a_setting_and_so_declared():
    assert BASE.declared_size == BASE.drawn_users() == BASE.population_size == 40_000
    assert BASE.overridden({"population_size": 50_000}, "here").declared_size == 50_000
    fixed = BASE.overridden({"sampling": "fixed"}, "here")
    assert (fixed.drawn_users(), fixed.declared_size) == (40_000, None)  # a cohort of those who are there
    with pytest.raises(SettingError, match="population_size=None must be given where users are generated"):
        replace(BASE, population_size=None).drawn_users()


def test_the_server_is_normalised_unless_a_rate_or_another_server_is_given():
    base = replace(BASE, server=None, server_lr=None)
    assert isinstance(base.server_optimiser(), ServerNormalised)
    assert replace(base, server_lr=0.5).server_optimiser() == ServerSGD(0.5)
    assert base.overridden({"server": "sgd"}, "flags").server_optimiser() == ServerSGD(1.0)
    kept = [task_named(name).settings for name in ("handwriting", "emnist_cr")]
    assert [type(one.server_optimiser()) for one in kept] == [ServerSGD, ServerSGD]
    changed = kept[1].overridden({"server": "normalised"}, "flags")
    assert isinstance(changed.server_optimiser(), ServerNormalised)


def test_another_server_brings_its_own_rate():
    base = BASE.overridden({"server": "sgd", "server_lr": 0.3}, "here")
    rates = [base.overridden({"server": name}, "here").server_optimiser().lr for name in ("sgd", "adam", "normalised")]
    assert rates == [0.3, 0.01, None]
    assert base.overridden({"server": "yogi", "server_lr": 0.2}, "here").server_optimiser().lr == 0.2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantlie": 0.3}, "here has the unknown key 'quantlie': did you mean 'quantile'?"),
        ({"server": "normalised", "server_lr": 0.5}, "server_lr=0.5 must be left out where server='normalised', which"),
        (
            {"population_size": 299},
            "cohort_size=300 must be at most the population, 299 users: lower the cohort or dec",
        ),
        ({"clip": "fixed", "fixed_clip": None}, "fixed_clip=None must be given where clip='fixed'"),
        ({"noise_multiplier": 0, "max_epsilon": 4.0}, "max_epsilon=4.0 must be left out where there is no noise"),
        ({"epsilon": None}, "epsilon=None and noise_multiplier=None, but one of them must be set"),
        (
            {"client_optimiser": "adam", "client_momentum": 0.9},
            "client_momentum=0.9 must be left out where client_opti",
        ),
    ],
)
def test_bad_settings_are_refused_on_construction(changes, words):
    with pytest.raises(SettingError) as error:
        BASE.overridden(changes, "here")
    assert words in str(error.value)


@pytest.mark.parametrize(
    "name", ["emoji \U0001f600 ü\u2028\x85", "quote \" and '", "new\nline\r", "back\\slash \t\x07\x7f\0"]
)
def test_any_text_is_written_as_toml_and_reads_back(name, tmp_path):
    settings = replace(BASE, data=name)
    (tmp_path / "s.toml").write_text(settings.to_toml(), encoding="utf-8", newline="")
    assert read_toml(tmp_path / "s.toml")["data"] == name


def test_text_that_utf8_does_not_have_is_refused():
    with pytest.raises(SettingError, match=r"data=.* must be text in UTF-8, as settings are stored so: rename"):
        replace(BASE, data="half \udcff")


@pytest.mark.parametrize(
    "content",
    ["rounds = " + "1" * 5000, "rounds = " + "[" * 100_000, "rounds = = 3", b"# \xff", "\0", 'data = "\\ud800"'],
)
def test_a_file_that_is_no_toml_is_refused(content, tmp_path):
    (tmp_path / "s.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingError, match="cannot be read as TOML"):
        read_toml(tmp_path / "s.toml")


@pytest.fixture(scope="module")
def loaded():
    return TASK.load(BASE.overridden({"population_size": 60, "cohort_size": 6}, "here"))


@pytest.mark.parametrize("name", [field.name for field in fields(TrainSettings) if field.name not in ("task", "data")])
def test_a_number_of_many_digits_is_refused_by_its_name_before_anything_is_trained(name, loaded):
    for digits in (25, 400) if name != "seed" else (400,):  # a seed may be a key of 256 bits
        changes = {"population_size": 60, "cohort_size": 6, "noise_multiplier": 0.2, name: 10 ** (digits - 1)}
        if name == "epsilon":
            del changes["noise_multiplier"]
        with pytest.raises(SettingError, match=rf"^{name}="):
            TASK.training(BASE.overridden(changes, "here"), None if name == "classes" else loaded)
