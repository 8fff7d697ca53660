"""Step 1 by Optuna, on made-up runs: what is asked, pruned, resumed and joined."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from clipline.study.runs.directory import StudyDirectory
from clipline.study.runs.study import Study
from clipline.study.tune.question import Question
from clipline.study.tune.recipe import Metric, Trials
from clipline.study.tune.scale import Target
from clipline.tasks import task_named

pytest.importorskip("optuna")
from clipline.study.tune.optuna_search import JOURNAL, search_with_optuna

RECORD = SimpleNamespace(id="run")


@dataclass
class MadeUp(Trials):
    """Trials whose metric is a function of the rates, best at the task's client rate and three times its server rate.

    After a quarter of the rounds it is a tenth lower. `made` are the runs that were asked for.
    """

    question: Question
    study: Study
    lower: bool = False
    made: list = field(default_factory=list)
    die_after: float = math.inf
    _metric: Metric | None = None

    def run(self, settings):
        if len(self.made) >= self.die_after:
            raise KeyboardInterrupt
        self._metric = Metric("error" if self.lower else "accuracy", self.lower, 10)
        values = []
        for one in settings:
            self.made.append(one)
            client, server = math.log10(one["client_lr"] / 0.5), math.log10(one["server_lr"] / 3)
            score = 0.9 - 0.2 * (client**2 + server**2) - (0.1 if "rounds" in one else 0)
            score = -math.inf if server > 1 else score  # diverged
            values.append((-score if self.lower else score, RECORD))
        return values


def trials(folder, *, runs=12, lower=False, **options):
    task = task_named("handwriting")
    trial = task.settings.overridden({"cohort_size": 100, "noise_multiplier": 0.01, "seed": 0}, "the test")
    target = Target(4.0, None, 1_000_000, trial.rounds, 100)
    question = Question(task=task, trial=trial, target=target, search="optuna", runs=runs)
    return question, MadeUp(question, Study(StudyDirectory(folder), task), lower, **options)


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
    longer = question.trial.overridden({"rounds": 200}, "the test")
    other.question = Question(task=question.task, trial=longer, target=question.target, search="optuna", runs=4)
    search_with_optuna(other.question, other, lambda line: None)
    assert len(other.made) > 1
