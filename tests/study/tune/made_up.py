"""Trials without training: the metric is a function of rates and noise."""

import math

from clipline.study.directory import StudyDirectory
from clipline.study.study import Study
from clipline.study.tune.question import Question, Target
from clipline.study.tune.trials import Metric, Trial, Trials
from clipline.tasks import task_named


class MadeUpTrials(Trials):
    """`metric(settings)` is what a run with these settings gives. `made` are the runs that were asked for."""

    def __init__(self, question, study, metric, lower=False, die_after=math.inf):
        super().__init__(question, study)
        self.value, self.lower, self.die_after, self.made = metric, lower, die_after, []

    def run(self, settings):
        if len(self.made) >= self.die_after:
            raise KeyboardInterrupt
        self.metric = Metric("error" if self.lower else "accuracy", self.lower)
        self.made += settings
        return [
            Trial(one["client_lr"], one["server_lr"], one.get("noise_multiplier", 0.01), self.value(one), f"run {one}")
            for one in settings
        ]


def question_of(folder, **options):
    """A question on the task handwriting, whose rates are 0.5 and 1.0, and its study."""
    task = task_named("handwriting")
    trial = task.settings.overridden({"cohort_size": 100, "noise_multiplier": 0.01, "seed": 0}, "the test")
    target = Target(4.0, None, 1_000_000, trial.rounds, 100)
    return Question(task=task, trial=trial, target=target, **options), Study(StudyDirectory(folder), task)
