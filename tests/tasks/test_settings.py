import math
import tomllib

import pytest

from clipline import FixedClip, QuantileClip, SettingError
from clipline.tasks.handwriting import TASK
from clipline.tasks.settings import read_toml

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


def test_epsilon_and_noise_replace_each_other_but_never_stand_together():
    noisy = BASE.overridden({"noise_multiplier": 1.0}, "here")
    assert (noisy.epsilon, noisy.noise_multiplier) == (None, 1.0)
    assert noisy.overridden({"epsilon": 2.0}, "here").noise_multiplier is None
    with pytest.raises(SettingError, match="drop one of them"):
        BASE.overridden({"epsilon": 2.0, "noise_multiplier": 1.0}, "here")


def test_the_number_of_generated_users_is_a_setting_and_so_declared():
    assert BASE.declared_size == BASE.users == 40_000
    assert BASE.overridden({"population_size": 50_000}, "here").declared_size == 50_000
    assert BASE.overridden({"sampling": "fixed"}, "here").declared_size is None  # drawn from those who are there
    few = BASE.overridden({"users": 10, "population_size": 1000}, "here")  # the cohort of 300 is of the declared ones
    assert (few.users, few.declared_size, few.users_private) == (10, 1000, False)
    assert tomllib.loads(few.to_toml())["users"] == 10


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantlie": 0.3}, "here has the unknown key 'quantlie': did you mean 'quantile'?"),
        ({"clamp_fraction": 1}, "clamp_fraction=1 must be true or false"),
        ({"clip": True}, "clip=True"),
        ({"server": "rmsprop"}, "server='rmsprop' must be one of sgd, adam, yogi"),
        ({"fixed_clip": 0}, "fixed_clip=0"),
        ({"fixed_clip": 1e-310}, "fixed_clip=1e-310 must be a finite number at least 1e-30"),
        ({"clip": 5e-324}, "clip=5e-324 must be a finite number at least 1e-30"),
        ({"unprivate_timing": 1}, "unprivate_timing=1 must be true or false"),
        ({"clip_rule": "cubic"}, "clip_rule='cubic'"),
        ({"clip_start": 0.0}, "clip_start=0.0"),
        ({"users": 10}, "cohort="),
        (
            {"population_size": 299},
            "cohort=300 must be at most the population, 299 users: lower the cohort or raise pop",
        ),
        ({"population_size": 0}, "population_size=0 must be a whole number at least 1"),
        ({"population_size": 900, "sampling": "fixed"}, "population_size=900 must be left out where sampling='fixed'"),
    ],
)
def test_bad_settings_are_refused_on_construction(changes, words):
    with pytest.raises(SettingError) as error:
        BASE.overridden(changes, "here")
    assert words in str(error.value)
