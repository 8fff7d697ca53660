import math
from dataclasses import replace

import pytest
from study.tune.made_up import MadeUpTrials, question_of

from clipline.errors import RunError
from clipline.study.record import RunRecord
from clipline.study.tune.recipe import borne, losses_of, raise_noise, search_grid
from clipline.study.tune.trials import Metric

SILENT = str.strip  # takes a line and shows nothing


def hill(client, server, lower=False):
    """A metric that is best, 0.9, at these rates, falls by 0.1 a decade, and diverges where both rates are large."""

    def metric(one):
        if one["client_lr"] * one["server_lr"] > 4:
            return math.inf if lower else -math.inf
        away = abs(math.log10(one["client_lr"] / client)) + abs(math.log10(one["server_lr"] / server))
        return 1 - (0.9 - 0.1 * away) if lower else 0.9 - 0.1 * away

    return metric


@pytest.mark.parametrize("lower", [False, True])
def test_the_search_follows_the_metric_to_its_best_rates(tmp_path, lower):
    question, study = question_of(tmp_path)
    found = search_grid(question, MadeUpTrials(question, study, hill(0.05, 0.1, lower), lower), SILENT)
    assert (found.chosen.client_lr, found.chosen.server_lr) == pytest.approx((0.05, 0.1))
    assert not found.on_edge
    diverged = [trial for trial in found.trials if not math.isfinite(trial.value)]
    assert [(trial.client_lr, trial.server_lr) for trial in diverged] == [pytest.approx((0.5 * 10**0.5, 10**0.5))]


def test_a_search_that_runs_out_of_runs_says_that_it_stands_on_the_edge(tmp_path):
    question, study = question_of(tmp_path, runs=9)
    found = search_grid(question, MadeUpTrials(question, study, hill(0.05, 0.1)), SILENT)
    assert len(found.trials) == 9
    assert found.on_edge
    one, study = question_of(tmp_path, runs=1)
    found = search_grid(one, MadeUpTrials(one, study, hill(0.05, 0.1)), SILENT)
    assert (found.chosen.client_lr, found.chosen.server_lr) == (0.5, 1.0)  # the task's own


def test_where_every_run_diverges_the_search_ends_in_a_sentence(tmp_path):
    question, study = question_of(tmp_path, runs=14)
    made_up = MadeUpTrials(question, study, lambda one: -math.inf)
    with pytest.raises(RunError, match=r"every run of step 1 diverged, down to rates 0\.05 and 0\.1: start from"):
        search_grid(question, made_up, SILENT)


def test_noise_is_raised_at_the_rates_that_were_chosen(tmp_path):
    question, study = question_of(tmp_path)

    def metric(one):
        return hill(0.5, 1.0)(one) * (1 if one.get("noise_multiplier", 0.01) < 0.2 else 0.9)

    made_up = MadeUpTrials(question, study, metric)
    chosen = search_grid(question, made_up, SILENT).chosen
    enough = question.target.enough_noise()
    assert enough == pytest.approx(0.393, abs=0.001)  # what m = 100 needs for epsilon 4 by itself
    found = raise_noise(question, made_up, chosen, enough, SILENT)
    assert borne(found, 0.05, made_up.metric).noise_multiplier == 0.173
    assert {(one["client_lr"], one["server_lr"]) for one in made_up.made[9:]} == {(0.5, 1.0)}
    losses = losses_of(found, made_up.metric)
    assert losses[0.173] == 0
    assert losses[0.3] == pytest.approx(0.1)


def record(outcome, values):
    rounds = {"round": list(range(len(values))), "accuracy": values}
    return RunRecord("id", {}, outcome, rounds, {"accuracy": values[-1]}, None, {})


def test_the_metric_of_a_run_is_the_mean_of_what_was_measured_at_its_end():
    metric = Metric("accuracy", lower_is_better=False, window=4)
    assert metric.of(record("finished", [0.1, 0.2, None, 0.7, None, 0.9])) == pytest.approx(0.8)
    assert metric.of(record("diverged", [0.1, 0.9])) == -math.inf
    assert replace(metric, lower_is_better=True).of(record("diverged", [0.1, 0.9])) == math.inf
