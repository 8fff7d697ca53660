"""Flags that other programs have are answered with ours."""

import click
import pytest
from click.shell_completion import ShellComplete

import clipline as cl
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --server-lr -1", "--server-lr -1.0 must be"),
        ("plan --users 10 --cohort 20 --rounds 3 --epsilon 1", "--cohort 20 must be"),  # as it was typed
        ("plan --cohort-size=x --users 10 --epsilon 1", "--cohort-size 'x' must be"),
        ("train handwritting", "TASK 'handwritting' must be"),
        ("train --config bad.toml --rounds 3", "server_lr=-1.0 must be"),  # a file has keys
    ],
)
def test_an_error_names_the_flag_as_it_was_typed(clipline, tmp_path, words, said):
    (tmp_path / "bad.toml").write_text("server_lr = -1.0\n")
    code, _, err = clipline(*words.split())
    assert (code, err.startswith(f"error: {said}")) == (2, True), err


def test_from_python_an_error_names_the_keyword():
    with pytest.raises(cl.SettingError, match=r"^quantile=2\.0 must be"):
        cl.QuantileClip(quantile=2.0)


def test_a_shell_completes_flags_and_their_values():
    def completed(*words):
        found = ShellComplete(app, {}, "clipline", "_CLIPLINE_COMPLETE").get_completions([*words[:-1]], words[-1])
        return [one.value for one in found]

    assert "--server-lr" in completed("train", "--server")
    assert completed("train", "--sampling", "po") == ["poisson"]
