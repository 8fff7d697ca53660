"""Which backend a number of workers means."""

import multiprocessing
import warnings

import pytest
from samples import LOCAL, cross_entropy, linear_model, one_by_one
from worker_runs import POPULATION, training

from clipline import SettingError
from clipline.engine.choose import choose_backend
from clipline.engine.workers.forked import ForkedBackend, ManyWorkersWarning, usable_cores
from clipline.engine.workers.single import SingleProcess
from clipline.privacy.events import PoissonSampling
from clipline.random.streams import Streams

needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")


def chosen(workers):
    trainer = one_by_one(linear_model(), cross_entropy, POPULATION, LOCAL, Streams(0))
    return choose_backend(workers, trainer, trainer.problem, PoissonSampling(0.5))


def test_one_worker_is_this_process():
    backend = chosen(1)
    assert isinstance(backend, SingleProcess)
    assert backend.size == 1


@needs_fork
@pytest.mark.filterwarnings("ignore::clipline.engine.workers.forked.ManyWorkersWarning")
def test_several_workers_are_processes_of_this_machine():
    backend = chosen(3)
    assert isinstance(backend, ForkedBackend)
    assert backend.size == 3
    assert not multiprocessing.active_children()  # none before a run begins


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "many", 10**6])
def test_a_number_of_workers_that_makes_no_sense_is_refused(workers):
    with pytest.raises(SettingError, match="workers="):
        training(workers=workers)


def test_torchrun_is_refused_where_it_started_nothing():
    with pytest.raises(SettingError, match=r"workers='torchrun' must be a number .*: start with torchrun"):
        training(workers="torchrun")
    with pytest.raises(SettingError, match=r"call run\(\)"):
        training().serve()


@needs_fork
def test_more_workers_than_cores_are_warned_of():
    with pytest.warns(ManyWorkersWarning, match=f"is above the {usable_cores()} cores"):
        training(workers=usable_cores() + 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_as_many_workers_as_cores_are_not_warned_of(workers, monkeypatch):
    monkeypatch.setattr("clipline.engine.workers.forked.usable_cores", lambda: 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen(workers)
