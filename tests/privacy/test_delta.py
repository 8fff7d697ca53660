import warnings

import pytest

from clipline.privacy.delta import LargeDeltaWarning, default_delta, warn_of_delta


def test_the_default_is_the_papers_and_below_one_over_n_for_every_number_of_users():
    assert default_delta(10**6) == pytest.approx(10**-6.6, rel=1e-12)
    assert default_delta(9) == pytest.approx(9**-1.1, rel=1e-12)
    assert [default_delta(users) for users in (1, 2, 8)] == [0.1] * 3  # 8^-1.1 is 0.1015, which would be refused
    assert all(default_delta(users) < 1 / users for users in (1, 2, 8, 9, 10, 500, 10**12))


def test_only_a_delta_above_one_over_n_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_delta(0.002, 500)
    with pytest.warns(LargeDeltaWarning, match="publish all that one user has"):
        warn_of_delta(0.0021, 500)
