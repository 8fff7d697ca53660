import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from samples import Observer, small_training

from clipline import EarlyStopping, Evaluate, RunDirectory, SettingError
from clipline.errors import RunError
from clipline.study.report.reading import read_run_directory
from clipline.training.run_directory import CHECKPOINT


def measured(values, every=1):
    """The metric takes these values, one after the other."""
    left = iter(values)
    return Evaluate(lambda model: {"loss": next(left)}, every=every)


def stopped_after(values, rounds=12, every=1, **options):
    stopping = EarlyStopping("loss", **options)
    result = small_training(rounds).run([measured([*values, *[9.0] * 12], every), stopping])
    return result.state.round_index, stopping


@pytest.mark.parametrize(
    ("values", "options", "rounds"),
    [
        ([5, 4, 4.5, 4.2, 1], {"mode": "min", "patience": 2}, 4),  # two without a better one
        ([5, 4, 4.5, 4.2, 1], {"patience": 2}, 4),  # of a loss less is better
        ([1, 2, 3, 2.9, 2.8], {"mode": "max", "patience": 2}, 5),
        ([3, 3, 3], {"mode": "min", "patience": 2, "every": 2}, 6),  # measurements are counted, and not rounds
        ([5, 4.5, 4.0], {"mode": "min", "patience": 2, "min_delta": 1.0}, 3),  # no gain beyond min_delta
        ([float("nan"), float("nan")], {"mode": "min", "patience": 2}, 2),
    ],
)
def test_it_stops_after_so_many_measurements_without_a_better_one(values, options, rounds):
    reached, stopping = stopped_after(values, **options)
    assert reached == rounds
    if values[0] == 5 and rounds == 4:
        assert (stopping.best, stopping.best_round) == (4, 1)


def test_without_a_mode_the_name_of_the_metric_says_which_way_is_better():
    modes = {name: EarlyStopping(name).mode for name in ("err", "rmse", "perplexity", "accuracy", "auc")}
    assert modes == {"err": "min", "rmse": "min", "perplexity": "min", "accuracy": "max", "auc": "max"}


def test_the_result_has_the_last_model_and_the_guarantee_of_all_rounds_planned(tmp_path):
    states = []
    callbacks = [
        Observer(lambda report, state: states.append(state)),
        measured([1, 2, 3]),
        EarlyStopping("loss", mode="min", patience=1),
        RunDirectory(tmp_path / "run"),
    ]
    training = small_training(12)
    result = training.run(callbacks)
    assert (result.stopped, result.state.round_index, result.model_rounds) == ("early", 2, 2)
    assert result.state is states[-1]
    assert result.guarantee == training.planned  # when to stop was decided by what was released
    assert not (tmp_path / "run" / CHECKPOINT).exists()  # it has ended
    with pytest.raises(RunError, match="is a finished run"):
        training.resume(tmp_path / "run")


def test_an_object_can_serve_another_run():
    stopping = EarlyStopping("loss", mode="min", patience=1)
    for _ in range(2):
        assert small_training(5).run([measured([1, 2, 3, 4]), stopping]).state.round_index == 2


def test_what_cannot_be_compared_is_told():
    with pytest.raises(SettingError, match="metric='lass' of EarlyStopping must be one that is measured, and those"):
        small_training(3).run([measured([1, 2, 3]), EarlyStopping("lass", mode="min")])
    with pytest.raises(SettingError, match="one that is measured, and nothing is: add Evaluate"):
        small_training(2).run([EarlyStopping("loss", mode="min")])
    with pytest.raises(SettingError, match="mode='best' must be one of min, max"):
        EarlyStopping("loss", mode="best")
    with pytest.raises(SettingError, match="patience=0 must be a whole number at least 1"):
        EarlyStopping("loss", mode="min", patience=0)


@pytest.mark.parametrize("kept_by", ["early stopping", "evaluation"])
def test_the_best_model_can_be_had_with_its_metrics_at_the_cost_of_all_rounds_planned(kept_by, tmp_path):
    states, values = [], iter([3.0, 1.0, 2.0, 4.0, 5.0, 6.0])
    evaluate = Evaluate(lambda model: {"loss": next(values)}, every=1, keep_best=kept_by == "evaluation")
    stopping = EarlyStopping("loss", patience=2, restore_best=kept_by == "early stopping")
    training = small_training(6)
    watch, directory = Observer(lambda report, state: states.append(state)), RunDirectory(tmp_path / "run")
    result = training.run([watch, evaluate, stopping, directory])
    assert (result.stopped, result.state.round_index, result.model_rounds) == ("early", 4, 2)
    assert result.metrics == {"loss": 1.0}
    assert torch.equal(result.model.weight, training.model_at(states[1]).weight)
    assert result.state is states[3]
    assert (result.best.best, result.best.best_rounds, result.best.last, result.best.last_rounds) == (1.0, 2, 4.0, 4)
    assert result.guarantee == training.planned
    with safe_open(tmp_path / "run" / "model.safetensors", "numpy") as file:
        card = json.loads(file.metadata()["card"])
    assert (card["stopped"], card["model_rounds"], card["rounds"]) == ("early", 2, 4)
    run = read_run_directory(tmp_path / "run")
    assert (run.state, run.promise.rounds, run.best.best_rounds) == ("early", 6, 2)


def test_keep_best_takes_the_metric_it_names():
    def rounds(keep_best):
        values = iter([(1.0, 0.5), (2.0, 0.9), (3.0, 0.1)])
        both = lambda model: dict(zip(("loss", "score"), next(values), strict=True))  # noqa: E731
        return small_training(3).run([Evaluate(both, every=1, keep_best=keep_best)]).model_rounds

    assert rounds(True) == 2  # the first that is no loss
    assert rounds("loss") == 1
    with pytest.raises(SettingError, match=r"keep_best='scores' must be one .* loss, score: did you mean 'score'"):
        rounds("scores")


def hits(model, batch):
    return (model(batch["x"]).argmax(dim=1) == batch["y"]).float()


def test_a_metric_that_nothing_measures_is_refused_before_the_first_round(tmp_path):
    training = small_training(2)
    others = replace(training.population, user_ids=np.arange(len(training.population)) + 10_000)
    for asking in ([Evaluate(others, hits), EarlyStopping("hit")], [Evaluate(others, hits, keep_best="hit")]):
        with pytest.raises(SettingError, match=r"='hit'.* those are hits: did you mean 'hits'"):
            training.run([RunDirectory(tmp_path / "run"), *asking])
        assert not (tmp_path / "run").exists()


def test_a_metric_of_the_rarer_of_two_evaluations_can_be_followed():
    rare = iter([0.5, 0.9, 0.1])
    often = Evaluate(lambda model: {"often": 1.0}, every=2)
    result = small_training(9).run([often, Evaluate(lambda model: {"rare": next(rare)}, every=3, keep_best="rare")])
    assert (result.model_rounds, result.metrics["rare"]) == (6, 0.9)
    rare = iter([0.5, 0.4, 0.1])
    followed = Evaluate(lambda model: {"rare": next(rare)}, every=3)
    assert small_training(12).run([often, followed, EarlyStopping("rare", patience=1)]).state.round_index == 6


def test_keep_best_goes_by_the_facts_and_the_metric_of_the_run_directory(tmp_path):
    values = iter([(0.1, 0.9), (0.9, 0.2), (0.2, 0.3)])
    evaluate = Evaluate(lambda model: dict(zip(("score", "gap"), next(values), strict=True)), every=1, keep_best=True)
    directory = RunDirectory(tmp_path / "run", metric="gap", facts={"lower_is_better": "gap"})
    result = small_training(3).run([directory, evaluate])
    assert (result.model_rounds, result.metrics["gap"], result.best.best) == (2, 0.2, 0.2)


def test_the_findings_are_those_of_the_model_that_was_kept(tmp_path):
    values = iter([0.7, 0.9, 0.9, 0.9, 0.58, 0.5])
    evaluate = Evaluate(lambda model: {"accuracy": next(values), "baseline": 0.6}, every=1, keep_best=True)
    result = small_training(6).run([evaluate, RunDirectory(tmp_path / "run")])
    assert (result.model_rounds, result.findings) == (2, ())
    assert read_run_directory(tmp_path / "run").findings == []


def test_what_is_neither_a_choice_nor_a_name_is_refused():
    with pytest.raises(SettingError, match=r"keep_best=0\.5 must be True, False or the name of a metric"):
        Evaluate(lambda model: {"loss": 0.0}, keep_best=0.5)
    with pytest.raises(SettingError, match="restore_best=1 must be True or False"):
        EarlyStopping("loss", restore_best=1)
