import errno
import math
from dataclasses import replace

import pytest
import torch
from study_task import seeds, tiny_task

from clipline.engine.stacked.probe import CannotStack
from clipline.errors import SettingError
from clipline.study import execution
from clipline.study.directory import StudyDirectory
from clipline.study.execution import Recorder
from clipline.study.study import FailedRunsError, Study


@pytest.fixture
def made(monkeypatch):
    """The seeds of the runs of every group that was begun."""
    groups, real = [], execution.run_group

    def counted(task, loaded, runs, *rest):
        groups.append([run.spec.settings.seed for run in runs])
        return real(task, loaded, runs, *rest)

    monkeypatch.setattr(execution, "run_group", counted)
    return groups


def failing(monkeypatch, *bad):
    """Runs of these seeds fail after a round."""
    real = Recorder.on_round

    def on_round(self, report, state):
        if self._planned.spec.settings.seed in bad:
            raise ValueError("no such luck")
        real(self, report, state)

    monkeypatch.setattr(Recorder, "on_round", on_round)


def test_results_come_in_order_and_are_never_made_twice(tmp_path, made):
    first = Study(tmp_path, tiny_task()).results(seeds(3))
    assert [record.settings["seed"] for record in first] == [0, 1, 2]
    again = Study(tmp_path, tiny_task()).results([*reversed(seeds(3)), *seeds(1)])
    assert [record.settings["seed"] for record in again] == [2, 1, 0, 0]
    assert again[2] == first[0]
    more = [*seeds(4), *seeds(1, quantile=0.9)]  # extended by a seed and a quantile
    Study(tmp_path, tiny_task()).results(more)
    assert made == [[0, 1, 2], [3, 0]]
    assert len(StudyDirectory(tmp_path).ids()) == 5


def test_side_by_side_gives_what_each_run_gives_alone(tmp_path, made):
    specs = [*seeds(2), *seeds(1, quantile=0.9, rounds=4), *seeds(1, noise_multiplier=0.3, clip=0.2)]
    together = Study(tmp_path / "a", tiny_task()).results(specs)
    alone = Study(tmp_path / "b", tiny_task(), side_by_side=1).results(specs)
    assert [len(runs) for runs in made] == [4, 1, 1, 1, 1]
    for one, other in zip(together, alone, strict=True):
        assert one.id == other.id
        assert one.rounds["clip"] == pytest.approx(other.rounds["clip"])
        assert one.rounds["accuracy"] == other.rounds["accuracy"]
        assert one.guarantee == other.guarantee
    alone_too = tiny_task().training(specs[3].settings).run()
    assert together[3].guarantee["epsilon"] == alone_too.guarantee.epsilon
    assert together[3].rounds["fraction_within"] == pytest.approx(
        [report.fraction_within for report in alone_too.reports]
    )


def test_rounds_are_measured_as_the_spec_says(tmp_path):
    (spec,) = seeds(1, rounds=9, evaluate_every=4)
    plain, window = Study(tmp_path, tiny_task()).results([spec, replace(spec, evaluate_last=3)])
    assert [t for t, value in enumerate(plain.rounds["accuracy"]) if value is not None] == [3, 7, 8]
    assert [t for t, value in enumerate(window.rounds["accuracy"]) if value is not None] == [3, 6, 7, 8]
    assert plain.final["accuracy"] == plain.rounds["accuracy"][-1] == window.final["accuracy"]


@pytest.mark.filterwarnings("ignore::clipline.engine.trial_warnings.DivergingRateWarning")
def test_a_diverged_run_is_a_result_and_ends_early(tmp_path):
    lost = seeds(1, clip="none", client_lr=1e30, server_lr=1e30, rounds=40)
    diverged, fine = Study(tmp_path, tiny_task()).results([*lost, *seeds(1)])
    assert (diverged.outcome, fine.outcome) == ("diverged", "finished")
    assert len(diverged.rounds["round"]) < 40
    assert diverged.average("accuracy") == -math.inf
    assert StudyDirectory(tmp_path).check() == []


def test_a_budget_ends_a_run_as_a_result(tmp_path):
    (record,) = Study(tmp_path, tiny_task()).results(seeds(1, noise_multiplier=0.8, max_epsilon=1.2))
    assert record.outcome == "budget"
    assert len(record.rounds["round"]) == record.guarantee["rounds"] == 2  # the third would make it 1.35
    assert record.guarantee["epsilon"] == pytest.approx(1.09, abs=0.01)
    assert record.final["accuracy"] == record.rounds["accuracy"][-1] is not None


def test_a_run_that_fails_stops_no_other_and_is_named(tmp_path, monkeypatch, capsys):
    from clipline.study.study import StudyProgress

    failing(monkeypatch, 2)
    study = Study(tmp_path, tiny_task(), progress=StudyProgress())
    with pytest.raises(FailedRunsError, match="1 of the runs failed and the others are kept") as error:
        study.results(seeds(5))
    bad = study.planned(seeds(3)[2]).id
    said = f"run {bad} (study_task, quantile 0.5, noise 0, rates 0.5 and the server's own, seed 2): ValueError: no such"
    assert said in str(error.value)
    assert f"run {bad} " in capsys.readouterr().err
    directory = StudyDirectory(tmp_path)
    assert len(directory.ids()) == 4
    assert list(directory.failures()) == [bad]
    assert directory.claimed() == set()
    monkeypatch.undo()
    assert len(Study(tmp_path, tiny_task()).results(seeds(5))) == 5
    assert directory.failures() == {}


def test_an_error_of_the_whole_group_costs_no_run(tmp_path, monkeypatch):
    """As too little memory does, which a smaller group may have."""
    real, sizes = execution.run_together, []

    def run_together(trainings, *rest, **others):
        sizes.append(len(trainings))
        if len(trainings) > 2:
            raise torch.OutOfMemoryError("too many at once")
        return real(trainings, *rest, **others)

    monkeypatch.setattr(execution, "run_together", run_together)
    assert len(Study(tmp_path, tiny_task()).results(seeds(4))) == 4
    assert sizes == [4, 2, 2]


def test_a_model_that_cannot_be_stacked_runs_one_after_the_other(tmp_path, monkeypatch):
    def run_together(*args, **others):
        raise CannotStack("not this one")

    monkeypatch.setattr(execution, "run_together", run_together)
    assert len(Study(tmp_path, tiny_task()).results(seeds(2))) == 2


def test_ctrl_c_keeps_what_is_done(tmp_path, monkeypatch):
    real = Recorder.on_round

    def on_round(self, report, state):
        if self._planned.spec.settings.seed == 1:
            raise KeyboardInterrupt
        real(self, report, state)

    monkeypatch.setattr(Recorder, "on_round", on_round)
    study = Study(tmp_path, tiny_task(), side_by_side=1)
    with pytest.raises(KeyboardInterrupt):
        study.results(seeds(3))
    assert study.directory.ids() == [study.planned(seeds(1)[0]).id]
    assert study.directory.claimed() == set()


@pytest.mark.parametrize("together", [True, False])
def test_true_quantiles_are_those_of_the_updates(tmp_path, together):
    """Of round 0, by hand: train every user of the cohort alone and sort the norms."""
    specs = [replace(spec, unprivate_quantiles=True) for spec in seeds(3, noise_multiplier=0.5)]
    records = Study(tmp_path, tiny_task(), side_by_side=None if together else 1).results(specs)
    for spec, record in zip(specs, records, strict=True):
        training = tiny_task().training(spec.settings)
        cohort = training.algorithm.sampler.draw(training.problem.runs[0].streams.sampling(0))
        rows = training.one_by_one.block(training.init().params, cohort.users, 0).dense(training.dim)
        norms = sorted(rows.double().norm(dim=1).tolist())
        for quantile in (0.1, 0.3, 0.5, 0.7, 0.9):
            expected = norms[math.ceil(round(quantile * len(norms), 9)) - 1]
            column = record.rounds[f"unprivate_quantile_{quantile:g}"]
            assert column[0] == pytest.approx(expected, rel=1e-5)
            assert len(column) == 6
        assert not record.guarantee["private"]
        assert record.guarantee["in_words"].startswith("not private: true quantiles")


def test_watching_the_norms_changes_no_number(tmp_path):
    (spec,) = seeds(1)
    watched, plain = Study(tmp_path, tiny_task()).results([replace(spec, unprivate_quantiles=True), spec])
    assert watched.rounds["clip"] == plain.rounds["clip"]
    assert "unprivate_quantile_0.5" not in plain.rounds


def test_a_spec_of_another_task_is_refused(tmp_path):
    from clipline.study.record import RunSpec
    from clipline.tasks import task_named

    with pytest.raises(SettingError, match="the task of this study"):
        Study(tmp_path, tiny_task()).results([RunSpec(replace(task_named("handwriting").settings, seed=0))])


def test_threads_are_given_back(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        Study(tmp_path, tiny_task()).results(seeds(1))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_full_disk_ends_a_study_at_once_and_trains_nothing_again(tmp_path, monkeypatch):
    study, writes = Study(tmp_path, tiny_task()), []

    def full(path, text):
        writes.append(path)
        raise OSError(errno.ENOSPC, "No space left on device")

    study.directory.note_asked([])
    monkeypatch.setattr(study.directory, "note_asked", lambda ids: None)
    monkeypatch.setattr(study.directory, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        study.results(seeds(4))
    assert len(writes) == len(set(writes))  # nothing was tried twice
