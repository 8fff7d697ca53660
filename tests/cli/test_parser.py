"""Flags that other programs have are answered with ours."""

import click
import pytest

from clipline.cli.parser import app
from clipline.settings import SETTINGS
from clipline.synonyms import SYNONYMS


def commands(group):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield from commands(command) if isinstance(command, click.Group) else [command]


def test_a_flag_that_means_a_setting_has_the_name_of_the_setting_too():
    options = [option for command in commands(app) for option in command.params if isinstance(option, click.Option)]
    short = [(option, flag) for option in options for flag in option.opts if flag.strip("-") in SYNONYMS]
    assert {flag for _, flag in short} == {"--users", "--cohort", "--user"}
    for option, flag in short:
        assert SETTINGS[SYNONYMS[flag.strip("-")]].flag in option.opts, flag


@pytest.mark.parametrize(
    ("command", "flag", "ours"),
    [
        ("train", "--lr", "--client-lr"),
        ("train", "--eps", "--epsilon"),
        ("train", "--max-grad-norm=1", "--clip"),
        ("train", "--noise-mult", "--noise-multiplier"),
        ("plan", "--n-users", "--users"),
        ("tune", "--n-users", "--users"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_one_that_is_meant(clipline, command, flag, ours):
    assert f"No such option '{flag.partition('=')[0]}'. Did you mean '{ours}'?" in clipline.refused(command, flag, "1")


def test_help_calls_the_metric_of_early_stopping_a_metric():
    train = next(command for command in commands(app) if command.name == "train")
    (option,) = (one for one in train.params if "--early-stopping" in one.opts)
    assert option.make_metavar(click.Context(train)) == "METRIC"
