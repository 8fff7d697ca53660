"""Which way a metric is better, by its name or by what is said of it."""

import pytest

from clipline.metric_direction import better_facts, lower_is_better


@pytest.mark.parametrize(
    "name", ["loss", "test_loss", "err", "val-err", "error", "meanAbsoluteError", "mae", "MSE", "rmse2", "perplexity"]
)
def test_losses_and_errors_are_better_when_lower(name):
    assert lower_is_better(name)


@pytest.mark.parametrize("name", ["accuracy", "recall_at_5", "auc", "f1", "share_preferred", "maestro", "transferred"])
def test_everything_else_is_better_when_higher(name):
    assert not lower_is_better(name)


def test_what_is_said_goes_before_the_name():
    said = better_facts({"gap": "lower", "width": "lower", "errors_found": "higher"})
    assert said == {"lower_is_better": "gap, width", "higher_is_better": "errors_found"}
    assert [name for name in ("gap", "width", "errors_found", "loss") if not lower_is_better(name, said)] == [
        "errors_found"
    ]
