"""Guarantees that are told with rounds: which, that they are exact, and that no more is accounted than is told."""

from __future__ import annotations

import json
import math
import pickle

import pytest
from samples import LOCAL, StopAfter, cross_entropies, flat_training, linear_model, small_population

from clipline import Callback, Evaluate, Log, RunDirectory
from clipline.privacy import Ledger, Relation, account
from clipline.training import training as module
from clipline.training.result import round_json


def training(rounds, **changes):
    settings = {"cohort_size": 20, "local": LOCAL, "noise_multiplier": 4.0, "seed": 1, "rounds": rounds, **changes}
    return flat_training(linear_model(), cross_entropies, small_population(), **settings)


def exact(trained, rounds):
    """Accounted by itself, from an empty ledger."""
    ledger = Ledger().add(trained.algorithm.event, rounds)
    return account(ledger, delta=trained.delta, relation=Relation.named(trained.relation)).epsilon


class Reader(Callback):
    """Reads what a round has at hand."""

    def __init__(self):
        self.told = {}

    def on_round(self, report, state):
        if report.accounted:
            self.told[state.round_index] = report.guarantee.epsilon


@pytest.fixture
def accounted(monkeypatch):
    """The numbers of rounds that were accounted, as often as they were."""
    seen, account_really = [], module.account

    def noted(ledger, **terms):
        seen.append(ledger.rounds)
        return account_really(ledger, **terms)

    monkeypatch.setattr(module, "account", noted)
    return seen


@pytest.mark.parametrize(
    ("rounds", "told"),
    [(3, [1, 2, 3]), (199, list(range(1, 200))), (200, list(range(2, 201, 2))), (355, [*range(3, 355, 3), 355])],
)
def test_short_runs_tell_the_guarantee_of_every_round_and_long_ones_after_each_hundredth_part(rounds, told, accounted):
    trained, reader = training(rounds), Reader()
    accounted.clear()
    trained.run([reader])
    assert list(reader.told) == told
    assert sorted(set(accounted)) == told
    assert len(accounted) <= len(told) + 1  # the last once more, for the result
    for number in told[:: len(told) // 3]:
        assert reader.told[number] == pytest.approx(exact(trained, number), rel=1e-12)


def test_a_round_that_is_measured_has_its_guarantee_in_the_file_and_the_others_have_none(tmp_path):
    trained, logged = training(207), []
    trained.run([Evaluate(lambda model: {"size": 1.0}, every=5), RunDirectory(tmp_path / "run"), Log(logged.append)])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(logged) == 207
    for number, (line, row) in enumerate(zip(lines, logged, strict=True), start=1):
        measured = number % 5 == 0 or number == 207
        assert ("size" in line) == measured
        assert ("epsilon" in line) == ("epsilon" in row) == ("delta" in line) == (measured or number % 2 == 0)
    assert lines[4]["epsilon"] == pytest.approx(exact(trained, 5), rel=1e-12)
    assert lines[-1]["epsilon"] == pytest.approx(exact(trained, 207), rel=1e-12)
    assert lines[1]["epsilon"] < lines[3]["epsilon"] < lines[5]["epsilon"]


def test_whoever_asks_is_told_the_guarantee_of_any_round():
    trained = training(210)
    result = trained.run()
    report = result.reports[100]  # the 101st round
    assert not report.accounted
    assert "epsilon" not in round_json(report)
    assert report.guarantee.rounds == 101
    assert report.guarantee.epsilon == pytest.approx(exact(trained, 101), rel=1e-12)
    assert pickle.loads(pickle.dumps(report)).guarantee == report.guarantee
    assert result.guarantee.epsilon == pytest.approx(exact(trained, 210), rel=1e-12)


def test_a_run_that_the_budget_ends_tells_the_guarantee_of_its_last_round_and_of_none_after_it(accounted):
    limit = exact(training(400), 250)
    trained, reader = training(400, max_epsilon=limit * (1 + 1e-9)), Reader()
    accounted.clear()
    result = trained.run([reader])
    assert (result.stopped, result.state.round_index) == ("budget", 250)
    assert list(reader.told) == [*range(4, 250, 4), 250]
    assert max(reader.told.values()) == reader.told[250] <= limit * (1 + 1e-9)
    assert max(accounted) == 250


def test_a_resumed_run_tells_what_one_without_a_break_tells():
    whole, first, second = Reader(), Reader(), Reader()
    training(240).run([whole])
    begun = training(240).run([first, StopAfter(101)])
    assert begun.state.round_index == 101
    training(240).run([second], state=begun.state)
    assert first.told | second.told == whole.told


def test_a_run_that_is_stopped_has_epsilon_and_metrics_of_its_last_round_on_record(tmp_path):
    trained = training(300)
    evaluate = Evaluate(lambda model: {"size": 2.0}, every=50)
    result = trained.run([evaluate, RunDirectory(tmp_path / "run"), StopAfter(77)])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (len(lines), lines[-1]["round"], lines[-1]["size"]) == (77, 76, 2.0)
    assert lines[-1]["epsilon"] == result.guarantee.epsilon == pytest.approx(exact(trained, 77), rel=1e-12)
    assert "epsilon" not in lines[-2]
    assert "size" not in lines[-2]
    assert result.history()["epsilon"][-2:] == [None, result.guarantee.epsilon]
    assert result.reports[-1].metrics == result.metrics == {"size": 2.0}


def test_without_noise_the_files_say_that_there_is_no_epsilon(tmp_path):
    training(200, noise_multiplier=0.0).run([RunDirectory(tmp_path / "run")])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epsilon"] for line in lines if "epsilon" in line] == [None] * 100
    assert not any(math.isfinite(line.get("epsilon") or math.inf) for line in lines)
