"""Freed memory is kept, on glibc and where the environment does not say otherwise."""

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from samples import small_population
from torch import nn

from clipline import LocalSGD
from clipline.federated import one_by_one
from clipline.federated.memory import keep_freed_memory
from clipline.federated.sampling import Cohort
from clipline.privacy.events import PoissonSampling
from clipline.streams import Streams

PROGRAM = """
import resource, sys, torch
from clipline.federated.memory import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(1 << 24)
before = faults()
for _ in range(5):
    torch.ones(1 << 24)
print(kept, faults() - before)
"""
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))}


def outcome(wish, **variables):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, wish], env=PLAIN | variables, capture_output=True, text=True, check=True
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have no such setting")
def test_pages_of_freed_tensors_are_not_asked_for_again():
    pages = 5 * 4 * 2**24 // os.sysconf("SC_PAGESIZE")  # five tensors of 64 MiB; fewer where pages are huge
    assert outcome("keep") == ("True", pytest.approx(0, abs=pages // 100))
    kept, faults = outcome("leave")
    assert kept == "None"
    assert faults > pages // 1000  # what it is for


@pytest.mark.parametrize(
    "variables", [{"MALLOC_TRIM_THRESHOLD_": "1000000"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1000000"}]
)
def test_settings_of_the_environment_stand(variables):
    assert outcome("keep", **variables)[0] == "False"


def test_elsewhere_nothing_happens(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory.__wrapped__() is False


def test_training_on_a_processor_asks_for_it(monkeypatch):
    asked = []
    monkeypatch.setattr(one_by_one, "keep_freed_memory", lambda: asked.append(True))
    engine = one_by_one.OneByOne(
        nn.Linear(6, 3), lambda m, b: m(b["x"]).square().mean(), small_population(4), LocalSGD(0.1), Streams(0)
    )
    assert not asked  # to make one changes nothing in the process
    list(engine.train(engine.flat.initial, Cohort(np.arange(2), PoissonSampling(0.5)), 0))
    assert asked == [True]
