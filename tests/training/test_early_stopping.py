import pytest
from samples import Observer, small_training

from clipline import EarlyStopping, Evaluate, RunDirectory, SettingError
from clipline.errors import RunError
from clipline.training.storage.run_directory import CHECKPOINT


def measured(values, every=1):
    """The metric takes these values, one after the other."""
    left = iter(values)
    return Evaluate(lambda model: {"loss": next(left)}, every=every)


def stopped_after(values, rounds=12, every=1, **options):
    stopping = EarlyStopping("loss", **options)
    result = small_training(rounds).run([measured([*values, *[9.0] * 12], every), stopping])
    return result.state.round_index, stopping


def test_it_stops_after_so_many_measurements_without_a_better_one():
    rounds, stopping = stopped_after([5, 4, 4.5, 4.2, 1], mode="min", patience=2)
    assert (rounds, stopping.best, stopping.best_round) == (4, 4, 1)


def test_higher_is_better_where_asked():
    rounds, stopping = stopped_after([1, 2, 3, 2.9, 2.8], mode="max", patience=2)
    assert (rounds, stopping.best) == (5, 3)


def test_without_a_mode_the_name_of_the_metric_says_which_way_is_better():
    assert stopped_after([5, 4, 4.5, 4.2, 1], patience=2)[0] == 4  # a loss
    modes = {name: EarlyStopping(name).mode for name in ("err", "rmse", "perplexity", "accuracy", "auc")}
    assert modes == {"err": "min", "rmse": "min", "perplexity": "min", "accuracy": "max", "auc": "max"}


def test_patience_counts_measurements_and_not_rounds():
    assert stopped_after([3, 3, 3], every=2, mode="min", patience=2)[0] == 6


def test_a_gain_up_to_min_delta_and_nan_are_no_gain():
    assert stopped_after([5, 4.5, 4.0], mode="min", patience=2, min_delta=1.0)[0] == 3
    assert stopped_after([float("nan"), float("nan")], mode="min", patience=2)[0] == 2


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
    with pytest.raises(
        SettingError, match="metric='lass' of EarlyStopping must be one that is measured, and those are"
    ):
        small_training(3).run([measured([1, 2, 3]), EarlyStopping("lass", mode="min")])
    with pytest.warns(UserWarning, match="had nothing to compare: add Evaluate"):
        small_training(2).run([EarlyStopping("loss", mode="min")])
    with pytest.raises(SettingError, match="mode='best' must be one of min, max"):
        EarlyStopping("loss", mode="best")
    with pytest.raises(SettingError, match="patience=0 must be a whole number at least 1"):
        EarlyStopping("loss", mode="min", patience=0)
