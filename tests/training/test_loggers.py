import sys

import pytest
import torch
from samples import Gone, GoneAfter, Observer, StopAfter, small_training

from clipline import Evaluate, Log, SettingError, TensorBoard


def training(rounds=4, noise_multiplier=0.5, **changes):
    return small_training(rounds, noise_multiplier=noise_multiplier, server=None, **changes)


def accuracy():
    return Evaluate(lambda model: {"accuracy": float(torch.isfinite(model.weight).all())}, every=2)


@pytest.fixture
def events():
    """TensorBoard's own reader: step -> (time, value) by name."""
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )

    def read(path):
        accumulator = reader.EventAccumulator(str(path))
        accumulator.Reload()
        return {name: {e.step: (e.wall_time, e.value) for e in accumulator.Scalars(name)}
                for name in accumulator.Tags()["scalars"]}  # fmt: skip

    return read


def test_tensorboard_reads_what_the_rounds_released(tmp_path, events):
    result = training().run([accuracy(), TensorBoard(tmp_path)])
    found = events(tmp_path)
    assert set(found) == {"clip", "fraction_within", "epsilon", "accuracy"}
    assert {step: value for step, (_, value) in found["accuracy"].items()} == {2: 1.0, 4: 1.0}
    for report in result.reports:
        step = report.round_index + 1
        assert found["clip"][step][1] == pytest.approx(report.clip, rel=1e-6)
        assert found["fraction_within"][step][1] == pytest.approx(report.fraction_within, rel=1e-6)
        assert found["epsilon"][step][1] == pytest.approx(report.guarantee.epsilon, rel=1e-6)


def test_no_time_of_a_round_is_told_unless_asked_for(tmp_path, events):
    training().run([TensorBoard(tmp_path / "private")])
    training().run([TensorBoard(tmp_path / "timed", unprivate_timing=True)])
    assert len({time for time, _ in events(tmp_path / "private")["clip"].values()}) == 1
    assert len({time for time, _ in events(tmp_path / "timed")["clip"].values()}) == 4


def test_what_is_not_finite_is_left_out(tmp_path, events):
    training(noise_multiplier=0).run([TensorBoard(tmp_path)])
    assert set(events(tmp_path)) == {"clip", "fraction_within"}


def test_after_a_resume_steps_that_are_run_again_count_once(tmp_path, events):
    kept = []
    training().run([TensorBoard(tmp_path), Observer(lambda report, state: kept.append(state)), StopAfter(2)])
    training().run([TensorBoard(tmp_path)], state=kept[0])  # from the first round on, though two were run
    assert sorted(events(tmp_path)["clip"]) == [1, 2, 3, 4]


def test_without_the_package_the_way_out_is_told(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SettingError, match=r"pip install 'clipline\[tensorboard\]'"):
        TensorBoard(tmp_path)


# Any function ---------------------------------------------------------------------------------------------------------


def test_a_function_is_given_what_the_rounds_released_and_nothing_else():
    rows = []
    result = training().run([accuracy(), Log(rows.append)])
    assert [row["round"] for row in rows] == [0, 1, 2, 3] == result.history()["round"]
    released = {"round", "clip", "fraction_within", "epsilon", "delta"}
    assert [set(row) - released for row in rows] == [set(), {"accuracy", "last/accuracy"}] * 2
    for row, report in zip(rows, result.reports, strict=True):
        assert (row["clip"], row["fraction_within"]) == (report.clip, report.fraction_within)
        assert (row["epsilon"], row["delta"]) == (report.guarantee.epsilon, report.guarantee.delta)


def test_a_function_can_tell_the_time_of_a_round_only_if_asked_for():
    rows, timed, lengths = [], [], []
    look = Observer(lambda report, state: lengths.append((len(rows), len(timed))))
    training().run([Log(rows.append), Log(timed.append, unprivate_timing=True), look])
    assert lengths == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert len(rows) == 4  # all at once, at the end
    assert all(row["unprivate_seconds"] > 0 for row in timed)


def test_what_was_kept_is_handed_over_where_the_run_fails():
    rows = []
    with pytest.raises(Gone):
        training().run([Log(rows.append), GoneAfter(3)])
    assert [row["round"] for row in rows] == [0, 1, 2]


def test_epsilon_is_left_out_where_there_is_none_and_what_is_no_function_refused():
    rows = []
    training(noise_multiplier=0).run([Log(rows.append)])
    assert set(rows[0]) == {"round", "clip", "fraction_within", "delta"}
    with pytest.raises(SettingError, match="function='wandb' must be a function of a dict"):
        Log("wandb")


def test_a_function_that_reads_what_a_row_does_not_have_is_told_how_to_read_it():
    trained = training(rounds=250, noise_multiplier=4.0)
    with pytest.raises(SettingError, match=r"KeyError: 'epsilon'.*round 0 has round, clip, fraction_within; .*row.get"):
        trained.run([Log(lambda row: row["epsilon"])])


def test_a_key_error_of_the_functions_own_is_raised_as_it_is():
    def fails(row):
        raise KeyError("clip")

    with pytest.raises(KeyError, match="clip"):
        training().run([Log(fails)])
