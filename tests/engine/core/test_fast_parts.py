"""Each fast part can be turned off, and then the same is trained, up to rounding."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from samples import Mixed, cross_entropies, flat_training, population_of

from clipline import LocalSGD, SettingError
from clipline.engine.core.fast_parts import FastParts
from clipline.engine.core.problem import Problem
from clipline.engine.gpu.kernels import convolution, lstm
from clipline.engine.stacked.step import StackStep

NAMES = [field.name for field in fields(FastParts)]


@pytest.mark.parametrize("name", NAMES)
def test_a_switch_is_true_or_false_and_steps_are_compiled_always_never_or_where_it_pays(name):
    takes = "one of auto, always, never: take auto, say" if name == "compiled_steps" else "[Tt]rue or [Ff]alse"
    for value in (True, False, None, "yes") if name == "compiled_steps" else (1, "yes", None):
        with pytest.raises(SettingError, match=f"{name}={value!r} must be {takes}"):
            FastParts(**{name: value})


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


@pytest.mark.parametrize("engine", ["one-by-one", "stacked"])
@pytest.mark.parametrize("on", [True, False])
def test_the_switch_of_kernels_holds_from_the_first_trial_on_and_no_longer(monkeypatch, engine, on):
    there = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)  # what a tensor on a GPU would say
    monkeypatch.setattr(convolution, "convolution_kernels", object())
    monkeypatch.setattr(lstm, "triton_recurrence", object())
    seen = []

    def looking(function):
        def looked(*given, **named):
            seen.append((convolution.fused(there), lstm.fused(there)))
            return function(*given, **named)

        return looked

    for owner, name in ((Problem, "losses"), (StackStep, "__call__")):
        monkeypatch.setattr(owner, name, looking(getattr(owner, name)))
    flat_training(
        Mixed(), cross_entropies, population_of([9, 4, 6], features=16), engine=engine, fast=FastParts(kernels=on),
        delta=0.1, rounds=1, cohort_size=3, sampling="fixed", local=LocalSGD(0.5, 4), seed=0, noise_multiplier=0.2,
    ).run()  # fmt: skip
    assert set(seen) == {(on,) * 2}
    assert convolution.fused(there)
