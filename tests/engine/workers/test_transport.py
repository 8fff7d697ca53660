"""Workers of one machine share memory: only signals and the cohort are sent."""

import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest
import torch
from samples import flat_training, summed
from tagged_posts import TAGS, Tags, loss, posts
from worker_runs import TOLERANCE, alone, distance, nothing_is_left, training, users_of

from clipline import LocalSGD

pytestmark = [
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork"),
    pytest.mark.filterwarnings("ignore::clipline.engine.workers.forked.ManyWorkersWarning"),
]


def test_parameters_and_sums_do_not_travel_between_workers(monkeypatch, tmp_path):
    send = Connection.send_bytes

    def counted(self, message):
        with (tmp_path / str(os.getpid())).open("a") as file:
            file.write(f"{len(message)}\n")
        return send(self, message)

    monkeypatch.setattr(Connection, "send_bytes", counted)
    run = training(workers=3)
    assert distance(run.run(), alone()) <= TOLERANCE
    sent = [int(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert len(list(tmp_path.iterdir())) == 3
    assert max(sent) <= 60 * 8 < run.problem.model.dim * 8  # the users of a round, and requests
    assert nothing_is_left()


@pytest.mark.parametrize("workers", [2, 3])
def test_a_sum_holds_nothing_of_the_round_before(workers):
    run = training(workers=workers, noise_multiplier=0, rounds=3)
    params, cohorts, totals = run.init().params, users_of(run), []
    with run.backend.running():
        for t in (0, 1, 0):
            totals.append(summed(run, params, cohorts[t], t, 0.1))
    assert torch.equal(totals[0], totals[2])
    assert not torch.equal(totals[0], totals[1])


@pytest.mark.parametrize("workers", [2, 3])
def test_rows_add_up_to_the_same_with_any_number_of_workers(workers):
    def run(workers):
        torch.manual_seed(0)
        settings = {"rounds": 4, "cohort_size": 4, "local": LocalSGD(0.2, batch_size=4), "noise_multiplier": 0.1}
        rows = {"tags.weight": "words"}
        made = flat_training(Tags().double(), loss, posts(), **settings, workers=workers, row_fields=rows, seed=1,
                        engine="one-by-one")  # fmt: skip
        return made.run()

    one, many = run(1), run(workers)
    assert distance(many, one) <= TOLERANCE
    assert one.state.params.shape == (1 + 12 * TAGS + TAGS,)
    assert [report.clip for report in one.reports] == [report.clip for report in many.reports]
