"""Flags that other programs have are answered with ours."""

import pytest


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
    code, _, err = clipline(command, flag, "1")
    assert code == 2
    assert f"No such option '{flag.partition('=')[0]}'. Did you mean '{ours}'?" in err
