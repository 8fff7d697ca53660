"""Step 1 by Optuna (the extra `search`): its samplers and pruners choose, our study runs and keeps.

Trials are stored in `optuna.journal` in the directory of the tuning, a file that several machines may share: each that
gives the same command joins the search. A trial whose process was killed is taken over by the next one that comes, and
a run that has ended is read and not repeated.

A trial is first run for a quarter of its rounds. The pruner compares it there with the others, and what it keeps is run
whole: pruning saves three quarters of a run where a pair of rates is poor and costs one quarter where it is good.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .question import Question
from .trials import STEP, Rates, Tell, Trial, Trials, check_learnt

if TYPE_CHECKING:
    import optuna

JOURNAL = "optuna.journal"
_SIDE = 4  # half decades to each side of the task's rates
_STARTUP = 5  # trials that are never pruned, and drawn at random
_AT_ONCE = 4  # trials asked for together, which run side by side
_RUNG = 4  # a trial is compared after this part of its rounds
_DIVERGED = 1e30


def search_with_optuna(question: Question, trials: Trials, tell: Tell) -> Rates:
    """`question.runs` trials in all, whoever made them; the best that was run whole."""
    search = _Search(question, trials)
    while batch := search.next_batch():
        search.settle(batch)
        finished, best = search.finished(), search.best()
        shown = "none whole yet" if best is None else trials.metric.words(best)
        tell(f"  {len(finished)} trials, {sum(trial.pruned for trial in finished)} pruned: {shown}")
    search.learn_metric()
    chosen = search.best()
    assert chosen is not None, "the first trials are not pruned"
    check_learnt(chosen)
    return Rates(tuple(search.finished()), chosen)


class _Search:
    def __init__(self, question: Question, trials: Trials) -> None:
        import optuna

        self.optuna: Any = optuna
        self.states = optuna.trial.TrialState
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # progress is told once, by us
        self.question, self.trials = question, trials
        self.directory = trials.study.directory
        # A study has its direction before the first run tells which metric it is: ours is always "larger is better".
        whole = trials.study.planned(trials.spec({}))
        self.directory.path.mkdir(parents=True, exist_ok=True)
        backend = self.optuna.storages.journal.JournalFileBackend(str(self.directory.path / JOURNAL))
        self.study: optuna.Study = self.optuna.create_study(
            storage=self.optuna.storages.JournalStorage(backend),
            study_name=whole.id,  # another question is another study in the same file
            load_if_exists=True,
            direction="maximize",
            sampler=_sampler(self.optuna, question.sampler),
            pruner=_pruner(self.optuna, question.pruner),
        )

    def next_batch(self) -> list[Any]:
        """Trials to run now: what a killed process left, else new ones; none once enough have ended."""
        ended = self._in_state(self.states.COMPLETE, self.states.PRUNED)
        left = [trial for trial in self._in_state(self.states.RUNNING) if "client_lr" in trial.params]
        orphans = [trial for trial in left if not self._claimed(trial.params)]
        if orphans:
            return [self.optuna.Trial(self.study, trial._trial_id) for trial in orphans[:_AT_ONCE]]
        if len(ended) + len(left) >= self.question.runs:
            # Others are at the rest: wait for them as for any run of the study.
            return [self.optuna.Trial(self.study, trial._trial_id) for trial in left]
        count = min(_AT_ONCE, self.question.runs - len(ended) - len(left))
        return [self.study.ask(self._ranges()) for _ in range(count)]

    def settle(self, batch: list[Any]) -> None:
        """Run these: a quarter each, then those that the pruner keeps. Tell Optuna what came of them."""
        kept = batch
        if self.question.pruner != "none" and self.question.trial.rounds >= 2 * _RUNG:
            rounds = self.question.trial.rounds // _RUNG
            for trial, made in zip(batch, self._run(batch, rounds=rounds), strict=True):
                _unless_told(trial.report, self._larger_is_better(made.value), rounds)
                _unless_told(trial.set_user_attr, "rung", made.run)
            for trial in [trial for trial in batch if trial.should_prune()]:
                _unless_told(self.study.tell, trial, state=self.states.PRUNED)
            open_still = {trial.number for trial in self._in_state(self.states.RUNNING)}
            kept = [trial for trial in batch if trial.number in open_still]  # whose result Optuna does not have yet
        for trial, made in zip(kept, self._run(kept), strict=True):
            _unless_told(trial.set_user_attr, "run", made.run)
            _unless_told(self.study.tell, trial, self._larger_is_better(made.value))

    def learn_metric(self) -> None:
        """Read one run again where all had ended before: only then is it known which way the metric goes."""
        self._run([trial for trial in self._in_state(self.states.COMPLETE) if "run" in trial.user_attrs][:1])

    def finished(self) -> list[Trial]:
        """All trials that have ended, by whomever."""
        found, metric, least = [], self.trials.metric, self.question.noise_multiplier
        for trial in self._in_state(self.states.COMPLETE, self.states.PRUNED):
            pruned = trial.state == self.states.PRUNED
            value = next(iter(trial.intermediate_values.values()), -math.inf) if pruned else trial.value
            value = metric.worst if value is None or value <= -_DIVERGED else -metric.sign * value
            run = trial.user_attrs.get("rung" if pruned else "run", "")
            found.append(Trial(trial.params["client_lr"], trial.params["server_lr"], least, value, run, pruned))
        return found

    def best(self) -> Trial | None:
        """The best trial that was run whole; of equals the first."""
        sign = self.trials.metric.sign
        return min((one for one in self.finished() if not one.pruned), key=lambda one: sign * one.value, default=None)

    def _ranges(self) -> dict[str, Any]:
        spread, trial = STEP**_SIDE, self.question.trial
        scale = self.optuna.distributions.FloatDistribution
        return {
            name: scale(rate / spread, min(rate * spread, 1e30), log=True)
            for name, rate in (("client_lr", trial.client_lr), ("server_lr", trial.server_rate))
        }

    def _run(self, batch: list[Any], **changes: int) -> list[Trial]:
        return self.trials.run([{**trial.params, **changes} for trial in batch]) if batch else []

    def _larger_is_better(self, value: float) -> float:
        """Finite, as samplers need it: a run that diverged is far below all others."""
        signed = -self.trials.metric.sign * value
        return signed if math.isfinite(signed) else -_DIVERGED

    def _in_state(self, *states: Any) -> list[Any]:
        return [trial for trial in self.study.get_trials(deepcopy=False) if trial.state in states]

    def _claimed(self, params: dict[str, float]) -> bool:
        """Whether a living process is making this trial now."""
        rounds = self.question.trial.rounds
        specs = [self.trials.spec({**params, "rounds": count}) for count in (rounds // _RUNG or 1, rounds)]
        claimed = self.directory.claimed()
        return any(self.trials.study.planned(spec).id in claimed for spec in specs)


def _unless_told(act: Callable[..., object], *arguments: Any, **options: Any) -> None:
    """Do it unless another process has told this trial meanwhile: its run is the same one, with the same value."""
    try:
        act(*arguments, **options)
    except (RuntimeError, ValueError):
        return


def _sampler(optuna: Any, name: str) -> Any:
    options: dict[str, dict[str, Any]] = {
        "TPESampler": {"n_startup_trials": _STARTUP, "constant_liar": True},
        "QMCSampler": {"warn_independent_sampling": False},  # the first trials have nothing to follow
    }
    kind = {"tpe": "TPESampler", "qmc": "QMCSampler", "random": "RandomSampler", "gp": "GPSampler"}[name]
    with warnings.catch_warnings():  # that Optuna may yet change what these take
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Unseeded: machines that join must not all ask for the same trials. What was asked is in the journal.
        return getattr(optuna.samplers, kind)(**options.get(kind, {}))


def _pruner(optuna: Any, name: str) -> Any:
    of = optuna.pruners
    kinds = {"median": of.MedianPruner(n_startup_trials=_STARTUP), "halving": of.SuccessiveHalvingPruner()}
    return kinds.get(name) or of.NopPruner()
