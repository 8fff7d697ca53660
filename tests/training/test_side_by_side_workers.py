"""Runs side by side share out their users among processes: each is still what it would be alone."""

import multiprocessing
import os
from functools import partial

import pytest
from samples import LOCAL, Observer, cross_entropies
from worker_runs import HERE, TOLERANCE, distance, nothing_is_left, training, users_of

from clipline import FixedClip, LocalSGD, QuantileClip, SettingError, run_together
from clipline.engine.workers.torchrun import TorchrunBackend
from clipline.random.streams import Streams

pytestmark = [
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork"),
    pytest.mark.filterwarnings("ignore::clipline.engine.workers.forked.ManyWorkersWarning"),
]
VARIANTS = [
    {"seed": 1},
    {"seed": 2, "rounds": 1, "local": LocalSGD(0.05, LOCAL.batch_size, LOCAL.epochs, LOCAL.max_examples)},
    {"seed": 3, "rounds": 6, "cohort_size": 7, "noise_multiplier": 0.0, "clip": FixedClip(0.2)},
    {"seed": 4, "rounds": 2, "clip": QuantileClip(0.9, 0.01), "sampling": "fixed"},
]


def together(workers, variants=VARIANTS, observe=None):
    runs = [training(**one, workers=workers) for one in variants]
    return run_together(runs, None if observe is None else observers(runs, observe))


def observers(runs, observe):
    """For each run a callback that calls `observe(number, report, state)` after every round."""
    return [[Observer(partial(observe, number))] for number in range(len(runs))]


@pytest.mark.parametrize("workers", [2, 3])
def test_each_of_many_runs_is_what_it_would_be_alone_with_any_number_of_workers(workers):
    children = []
    results = together(workers, observe=lambda *_: children.append(len(multiprocessing.active_children())))
    assert set(children) == {workers - 1}
    for variant, ours in zip(VARIANTS, results, strict=True):
        alone = training(**variant, engine="one-by-one").run()
        assert distance(ours, alone) <= TOLERANCE
        assert len(ours.reports) == variant.get("rounds", 4)
        for mine, theirs in zip(ours.reports, alone.reports, strict=True):
            assert (mine.clip, mine.fraction_within) == (theirs.clip, theirs.fraction_within)
        assert (ours.stopped, ours.guarantee, ours.state.ledger) == (
            alone.stopped, alone.guarantee, alone.state.ledger)  # fmt: skip
    assert nothing_is_left()


def test_cohorts_may_be_empty():
    variants = [{"seed": seed, "cohort_size": 1, "rounds": 8, "noise_multiplier": 0.05} for seed in (1, 2)]
    runs = [training(**one) for one in variants]
    sizes = set(zip(*([len(users) for users in users_of(run)] for run in runs), strict=True))
    assert (0, 0) in sizes  # everybody's
    assert any(0 in pair and pair != (0, 0) for pair in sizes)  # and one run's alone
    for ours, run in zip(together(3, variants), runs, strict=True):
        assert distance(ours, run.run()) <= TOLERANCE


def test_every_process_trains_users_and_the_noise_of_a_round_is_drawn_once_and_here(monkeypatch, tmp_path):
    noise = Streams.noise

    def noted(path, line):
        with (tmp_path / path).open("a") as file:
            file.write(f"{os.getpid()} {line}\n")

    def drawn(self, round_index):
        noted("noise", f"{self.seed} {round_index}")
        return noise(self, round_index)

    def loss(model, batch):
        noted("steps", "")
        return cross_entropies(model, batch)

    monkeypatch.setattr(Streams, "noise", drawn)
    variants = [{"seed": seed, "rounds": 2, "loss": loss} for seed in (1, 2)]
    together(3, variants)
    lines = sorted((tmp_path / "noise").read_text().splitlines())
    assert lines == [f"{HERE} {seed} {t}" for seed in (1, 2) for t in (0, 1)]
    assert len({line.split()[0] for line in (tmp_path / "steps").read_text().splitlines()}) == 3


@pytest.mark.parametrize(("workers", "most"), [((1, 3), 3), ((2, 1), 2), ((1, 1), 1)])
def test_there_are_as_many_processes_as_any_training_has_workers(workers, most):
    seen = []
    runs = [training(seed=seed, workers=size, rounds=1) for seed, size in enumerate(workers)]
    run_together(runs, observers(runs, lambda *_: seen.append(len(multiprocessing.active_children()) + 1)))
    assert seen == [most, most]


def test_runs_side_by_side_are_not_for_torchrun():
    runs = [training(seed=1), training(seed=2)]
    runs[1].backend = TorchrunBackend.__new__(TorchrunBackend)
    with pytest.raises(SettingError, match=r"workers='torchrun' must be a number where runs train side by side"):
        run_together(runs)
