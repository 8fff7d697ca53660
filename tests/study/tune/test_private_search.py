import json
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from clipline.errors import RunError
from clipline.privacy.accountant import account
from clipline.privacy.events import GaussianEvent, PoissonSampling
from clipline.privacy.ledger import Ledger
from clipline.privacy.relations import Relation
from clipline.privacy.selection import TruncatedNegativeBinomial, account_search
from clipline.study.tune.private_search import draw_candidates, draw_runs, price_search
from clipline.study.tune.question import Target, Unreachable, scale_up

TERMS = {"delta": 1e-6, "relation": Relation.ADD_OR_REMOVE}


def of_one_run(cohort, z, *, users, rounds):
    return Ledger().add(GaussianEvent(PoissonSampling(cohort / users), z), rounds)


def test_nine_runs_charged_in_full_are_one_training_of_nine_times_the_rounds():
    price = price_search(Target(4.0, 1e-6, 1_000_000, 50, 100), 0.1, 9)
    assert price.method == "composition"  # a user takes part once in a hundred runs: the cheaper way
    assert price.noise_multiplier == pytest.approx(0.1 * price.cohort_size / 100)
    ledger = of_one_run(price.cohort_size, price.noise_multiplier, users=1_000_000, rounds=9 * 50)
    assert price.guarantee.epsilon == pytest.approx(account(ledger, **TERMS).epsilon)
    assert price.guarantee.epsilon <= 4
    less = of_one_run(price.cohort_size - 1, 0.1 * (price.cohort_size - 1) / 100, users=1_000_000, rounds=9 * 50)
    assert account(less, **TERMS).epsilon > 4
    # Looking for rates costs users: a training whose rates are known has a smaller cohort.
    assert price.cohort_size > scale_up(Target(4.0, 1e-6, 1_000_000, 50, 100), 0.1).cohort_size
    assert price.one_run.epsilon < price.guarantee.epsilon


def test_the_best_of_a_random_number_of_runs_is_taken_where_that_is_cheaper():
    target = Target(8.0, 1e-6, 2_000, 50, 100)
    price = price_search(target, 1.0, 25)
    assert price.method == "selection"
    ledger = of_one_run(price.cohort_size, price.noise_multiplier, users=2_000, rounds=50)
    law = TruncatedNegativeBinomial.with_mean(25)
    assert price.guarantee.epsilon == pytest.approx(account_search(ledger, law, **TERMS).epsilon)
    in_full = of_one_run(price.cohort_size, price.noise_multiplier, users=2_000, rounds=25 * 50)
    assert price.one_run.epsilon < price.guarantee.epsilon <= 8 < account(in_full, **TERMS).epsilon


def test_too_few_users_are_refused_with_what_would_do():
    target = Target(4.0, 1e-6, 1_000, 50, 100)
    with pytest.raises(Unreachable) as caught:
        price_search(target, 0.1, 9)
    found = {one.change.split(" ")[0]: one.change.split(" ")[1] for one in caught.value.alternatives}
    assert price_search(target, float(found["--noise-multiplier"]), 9).guarantee.epsilon <= 4
    loose = Target(float(found["--epsilon"]), 1e-6, 1_000, 50, 100)
    assert price_search(loose, 0.1, 9).cohort_size <= 1_000


def test_every_candidate_is_run_once_where_all_are_charged(tmp_path):
    runs = draw_runs(tmp_path, 9, "composition", "a run")
    assert [number for number, _ in runs] == list(range(9))
    assert len({seed for _, seed in runs}) == 9
    assert 2**200 < max(seed for _, seed in runs) < 2**256  # fails once in 2^500
    assert draw_runs(tmp_path, 9, "composition", "a run") == runs  # kept
    assert stat.S_IMODE((tmp_path / "drawn.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700  # records of runs hold seeds too


def test_the_number_of_runs_is_geometric_where_the_best_is_selected():
    drawn = [draw_candidates(4, "selection") for _ in range(2000)]
    counts = [len(numbers) for numbers in drawn]
    # Mean 4 and standard deviation sqrt(12): that of 2000 is 0.077. Five of them fail once in a million times.
    assert abs(np.mean(counts) - 4) < 5 * 0.0775
    assert counts.count(1) / 2000 == pytest.approx(0.25, abs=5 * 0.0097)
    assert {number for numbers in drawn for number in numbers} == {0, 1, 2, 3}


def test_a_second_search_in_the_same_folder_is_refused(tmp_path):
    draw_runs(tmp_path, 9, "composition", "a run")
    with pytest.raises(RunError, match="costs as much again"):
        draw_runs(tmp_path, 25, "composition", "a run")
    with pytest.raises(RunError, match="asked otherwise"):  # the same seeds with another cohort or noise
        draw_runs(tmp_path, 9, "composition", "another run")
    assert json.loads((tmp_path / "drawn.json").read_text(encoding="utf-8"))["asked"]["candidates"] == 9


def test_what_was_drawn_is_not_drawn_again_where_the_file_is_damaged(tmp_path):
    for damage in ("", "[]", '{"asked": {}}', '{"asked": {}, "runs": [3]}'):
        (tmp_path / "drawn.json").write_text(damage, encoding="utf-8")
        with pytest.raises(RunError, match="damaged"):
            draw_runs(tmp_path, 9, "composition", "a run")


def test_two_processes_that_begin_a_search_at_once_have_the_same_runs(tmp_path):
    # Threads stand for processes: a claim keeps out another object too. Without it each would draw its own runs, and
    # more than are charged would be made.
    gate = threading.Barrier(8)

    def draw(_):
        gate.wait()
        return draw_runs(tmp_path, 9, "composition", "a run")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(draw, range(8)))
    assert all(runs == found[0] for runs in found)
