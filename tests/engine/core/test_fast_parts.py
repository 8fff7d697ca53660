"""Each fast part can be turned off, and then the same is trained, up to rounding."""

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from samples import Mixed, cross_entropies, flat_training, one_by_one, population_of, rows_of

from clipline import LocalSGD, SettingError
from clipline.engine.core import updates
from clipline.engine.core.fast_parts import FastParts
from clipline.engine.core.problem import Problem
from clipline.engine.gpu.kernels import convolution, lstm
from clipline.engine.stacked.step import StackStep
from clipline.engine.stacked.trainer import Stacked
from clipline.random.streams import Streams

NAMES = [field.name for field in fields(FastParts)]


SWITCHES = [name for name in NAMES if name != "compiled_steps"]


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", [1, "yes", None])
def test_a_switch_is_true_or_false(name, value):
    with pytest.raises(SettingError, match=f"{name}={value!r} must be [Tt]rue or [Ff]alse"):
        FastParts(**{name: value})


@pytest.mark.parametrize("value", [True, False, None, "yes"])
def test_steps_are_compiled_always_never_or_where_it_pays(value):
    with pytest.raises(SettingError, match=r"compiled_steps=.* must be one of auto, always, never: take auto, say"):
        FastParts(compiled_steps=value)


@pytest.mark.parametrize("engine", ["one-by-one", "stacked"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_the_same_with_a_part_turned_over(name, engine):
    def run(fast):
        torch.manual_seed(0)
        population = population_of([9, 0, 4, 1, 6, 3, 7], features=16)
        settings = {"rounds": 3, "cohort_size": 4, "local": LocalSGD(0.5, 4), "seed": 0, "noise_multiplier": 0.2}
        training = flat_training(
            Mixed().double(), cross_entropies, population, engine=engine, fast=fast, delta=0.1, **settings
        )
        return training.run()

    other = "never" if name == "compiled_steps" else not getattr(FastParts(), name)
    usual, turned = run(FastParts()), run(FastParts(**{name: other}))
    torch.testing.assert_close(turned.state.params, usual.state.params, rtol=1e-11, atol=1e-12)
    assert turned.guarantee == usual.guarantee


@pytest.mark.filterwarnings("ignore")
def test_users_with_many_steps_train_the_same_with_the_others_or_beside_them(uncompiled):
    users, rows = np.arange(16), []
    for apart in (True, False):
        torch.manual_seed(0)
        population = population_of([60, 33, *[3] * 14], features=16)
        plain = one_by_one(torch.nn.Linear(16, 3).double(), cross_entropies, population, LocalSGD(0.3, 4), Streams(0),
                           fast=FastParts(straggler_streams=apart))  # fmt: skip
        stack = Stacked(plain, 16, block_size=16, compiled=True)
        rows.append(rows_of(stack, users))
        assert {lane for lane, _ in stack._stragglers._recordings} == ({0, 1} if apart else {0})
    torch.testing.assert_close(*rows, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("engine", ["one-by-one", "stacked"])
@pytest.mark.parametrize("on", [True, False])
def test_the_switch_of_kernels_holds_from_the_first_trial_to_the_sum_and_no_longer(monkeypatch, engine, on):
    there = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)  # what a tensor on a GPU would say
    monkeypatch.setattr(convolution, "convolution_kernels", object())
    monkeypatch.setattr(lstm, "triton_recurrence", object())
    monkeypatch.setattr(updates, "block_sums", object())
    seen = []

    def looking(function):
        def looked(*given, **named):
            seen.append((convolution.fused(there), lstm.fused(there), updates.subtracts_lazily(there)))
            return function(*given, **named)

        return looked

    for owner, name in ((Problem, "losses"), (StackStep, "__call__"), (updates.Updates, "norms")):
        monkeypatch.setattr(owner, name, looking(getattr(owner, name)))
    flat_training(
        Mixed(), cross_entropies, population_of([9, 4, 6], features=16), engine=engine, fast=FastParts(kernels=on),
        delta=0.1, rounds=1, cohort_size=3, sampling="fixed", local=LocalSGD(0.5, 4), seed=0, noise_multiplier=0.2,
    ).run()  # fmt: skip
    assert set(seen) == {(on,) * 3}
    assert convolution.fused(there)
