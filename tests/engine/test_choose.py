import multiprocessing
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine.stacked.models import Recurrent
from samples import cross_entropies, flat_training, one_by_one, small_population
from torch import nn

from clipline import LocalSGD, Population, SettingError
from clipline.engine import choose
from clipline.engine.choose import SMALL_MODEL, SMALL_WORK, choose_backend, choose_trainer, work_of_a_step
from clipline.engine.core.one_by_one import OneByOne
from clipline.engine.core.problem import SlowEngineWarning
from clipline.engine.stacked.probe import CannotStack
from clipline.engine.stacked.trainer import Stacked
from clipline.engine.workers.forked import ForkedBackend, ManyWorkersWarning, usable_cores
from clipline.engine.workers.single import SingleProcess
from clipline.privacy.events import PoissonSampling
from clipline.random.streams import Streams


def plain(model=None):
    return one_by_one(model or nn.Linear(6, 3), cross_entropies, small_population(), LocalSGD(0.1), Streams(0))


@torch.no_grad()  # as a test function is called, which may train a model of its own
def test_a_stack_is_chosen_where_gradients_are_off():
    assert isinstance(choose_trainer("stacked", plain(), 10), Stacked)


def test_engines_by_name():
    engine = plain()
    assert choose_trainer("one-by-one", engine, 10) is engine
    assert isinstance(choose_trainer("auto", engine, 10), Stacked)  # a small model gains from it on a processor core
    large = plain(nn.Sequential(nn.Linear(6, SMALL_MODEL // 6), nn.Linear(SMALL_MODEL // 6, 3)))
    assert choose_trainer("auto", large, 10) is large
    stacked = choose_trainer("stacked", engine, 10)
    assert isinstance(stacked, Stacked)
    assert stacked.problem is engine.problem
    assert stacked.in_words == "stacked, up to 96 users at a time, step by step"


def test_auto_counts_the_work_of_a_step_and_not_what_is_trained_alone():
    def adapted(width):
        base = nn.Sequential(nn.Embedding(8, width), nn.Flatten(), nn.Linear(4 * width, 3))
        return base.requires_grad_(False).append(nn.Linear(3, 3))

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["t"].long()), batch["y"], reduction="none")

    population = Population.from_arrays(
        np.repeat([0, 1], 2), t=np.zeros((4, 4), np.uint8), y=np.zeros(4, np.int64), x=np.zeros((4, 99), np.float32)
    )

    def trained(width):
        return one_by_one(adapted(width), loss, population, LocalSGD(0.1, batch_size=50), Streams(0))

    small = trained(2)
    assert work_of_a_step(small.problem) == 50 * 4 * (16 + 24 + 3 + 12)  # batch x tokens x all parameters
    assert isinstance(choose_trainer("auto", small, 2), Stacked)
    assert small.in_words == "one by one"
    large = trained(-(-SMALL_WORK // (50 * 4 * 20)))
    assert large.problem.model.dim == small.problem.model.dim == 12
    assert choose_trainer("auto", large, 2) is large
    assert "keeps a core busy (2.7e+08 tokens times parameters)" in large.in_words
    assert isinstance(choose_trainer("stacked", small, 2), Stacked)


def test_a_model_that_cannot_be_stacked_is_refused_where_stacking_was_asked_for():
    recurrent = nn.Sequential(nn.Linear(6, 16), Recurrent())
    engine = plain(recurrent)
    assert choose_trainer("auto", engine, 10) is engine
    assert engine.in_words.startswith("one by one: the model or its loss cannot run for many users at once (")
    with pytest.raises(CannotStack):
        choose_trainer("stacked", engine, 10)


def test_on_a_gpu_auto_stacks_and_where_it_cannot_says_so(monkeypatch):
    on_gpu = SimpleNamespace(
        problem=SimpleNamespace(device=torch.device("cuda"), model=SimpleNamespace(personal_shapes={}))
    )

    def stacked(plain, cohort_size, varying):
        return SimpleNamespace(given=(plain, cohort_size), rounds_by_company="")

    monkeypatch.setattr(choose, "Stacked", stacked)
    assert choose_trainer("auto", on_gpu, 10).given == (on_gpu, 10)
    assert choose_trainer("one-by-one", on_gpu, 10) is on_gpu

    def refuse(plain, cohort_size, varying):
        raise CannotStack("no version of lstm")

    monkeypatch.setattr(choose, "Stacked", refuse)
    with pytest.warns(SlowEngineWarning, match="no version of lstm; users train one by one"):
        assert choose_trainer("auto", on_gpu, 10) is on_gpu
    with pytest.raises(CannotStack):
        choose_trainer("stacked", on_gpu, 10)


def training(model=None, **changes):
    settings = {"rounds": 3, "cohort_size": 20, "local": LocalSGD(0.1, 5), "seed": 0, "noise_multiplier": 0.5}
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double() if model is None else model
    return flat_training(model, cross_entropies, small_population(), **{**settings, **changes})


def test_a_training_takes_engine_and_precision_by_name():
    plain, stacked = training(engine="one-by-one"), training(engine="stacked")
    assert isinstance(plain.trainer, OneByOne)
    assert isinstance(stacked.trainer, Stacked)
    torch.testing.assert_close(stacked.run().state.params, plain.run().state.params, rtol=1e-11, atol=1e-12)
    with pytest.raises(SettingError, match=r"engine='stakced'.*did you mean 'stacked'"):
        training(engine="stakced")
    with pytest.raises(SettingError, match="precision='float16' must be one of float32, tf32, bf16"):
        training(precision="float16")


@pytest.mark.parametrize(
    ("model", "unknown"),
    [
        (nn.Linear(6, 3), None),
        (nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(16, 3)), None),
        (nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, track_running_stats=False)), "aten.native_batch_norm"),
    ],
)
def test_on_cores_auto_stacks_only_what_nobody_elses_presence_rounds(model, unknown):
    made = training(model.double(), cohort_size=20)
    assert isinstance(made.trainer, Stacked) == (unknown is None)
    if unknown is not None:
        assert unknown in made.engine
        assert isinstance(training(model, engine="stacked").trainer, Stacked)


# Which backend a number of workers means ----------------------------------------------------------------------------


needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")


def chosen(workers):
    return choose_backend(workers, engine := plain(), engine.problem, PoissonSampling(0.5))


def test_one_worker_is_this_process():
    backend = chosen(1)
    assert (type(backend), backend.size) == (SingleProcess, 1)


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
