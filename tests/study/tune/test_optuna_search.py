"""Step 1 by Optuna, on made-up runs: what is asked, pruned, resumed and joined."""

import math
from dataclasses import replace

import pytest
from study.tune.made_up import MadeUpTrials, question_of

pytest.importorskip("optuna")
from clipline.study.tune.optuna_search import JOURNAL, search_with_optuna


def accuracy(one):
    """Best at client rate 0.5 and server rate 3; diverged above 30; a tenth lower where rounds were cut."""
    client, server = math.log10(one["client_lr"] / 0.5), math.log10(one["server_lr"] / 3)
    return -math.inf if server > 1 else 0.9 - 0.2 * (client**2 + server**2) - (0.1 if "rounds" in one else 0)


def trials(folder, *, runs=12, lower=False, **options):
    question, study = question_of(folder, search="optuna", runs=runs)
    metric = (lambda one: -accuracy(one)) if lower else accuracy
    return question, MadeUpTrials(question, study, metric, lower, **options)


@pytest.mark.parametrize("lower", [False, True])
def test_the_best_whole_trial_wins_and_poor_ones_are_pruned(tmp_path, lower):
    question, made_up = trials(tmp_path, lower=lower, runs=20)
    found = search_with_optuna(question, made_up, lambda line: None)
    assert len(found.trials) == 20
    whole = [trial for trial in found.trials if not trial.pruned]
    assert 0 < len(whole) < 20
    values = [trial.value for trial in whole]
    assert found.chosen.value == (min(values) if lower else max(values))
    assert math.isfinite(found.chosen.value)
    assert (tmp_path / JOURNAL).is_file()


def test_asked_again_it_makes_no_further_trial(tmp_path):
    question, made_up = trials(tmp_path)
    first = search_with_optuna(question, made_up, lambda line: None)
    question, again = trials(tmp_path)
    second = search_with_optuna(question, again, lambda line: None)
    assert second == first
    assert len(again.made) == 1  # one run is read, to know its metric


def test_trials_of_a_killed_process_are_taken_over(tmp_path):
    question, made_up = trials(tmp_path, die_after=5)
    with pytest.raises(KeyboardInterrupt):
        search_with_optuna(question, made_up, lambda line: None)
    begun = [(one["client_lr"], one["server_lr"]) for one in made_up.made]
    question, again = trials(tmp_path)
    found = search_with_optuna(question, again, lambda line: None)
    assert len(found.trials) == 12
    assert set(begun) <= {(trial.client_lr, trial.server_lr) for trial in found.trials}


def test_another_question_in_the_same_folder_is_another_search(tmp_path):
    question, made_up = trials(tmp_path, runs=4)
    search_with_optuna(question, made_up, lambda line: None)
    question, other = trials(tmp_path, runs=4)
    other.question = replace(question, trial=replace(question.trial, rounds=200))
    search_with_optuna(other.question, other, lambda line: None)
    assert len(other.made) > 1
