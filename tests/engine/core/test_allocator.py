"""Freed memory is kept, on glibc and where the environment does not say otherwise."""

import ctypes
import mmap
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from samples import one_by_one as made
from samples import request, small_population
from torch import nn

from clipline import LocalSGD
from clipline.engine.core import one_by_one
from clipline.engine.core.allocator import keep_freed_memory
from clipline.engine.core.fast_parts import FastParts
from clipline.random.streams import Streams

PROGRAM = """
import resource, sys, torch
from clipline.engine.core.allocator import keep_freed_memory
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
def test_settings_of_the_environment_stand(monkeypatch, variables):
    monkeypatch.setattr(os, "environ", PLAIN | variables)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("the allocator was set"))
    assert keep_freed_memory.__wrapped__() is False


def test_elsewhere_nothing_happens(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory.__wrapped__() is False


@pytest.mark.parametrize("wanted", [True, False])
def test_training_on_a_processor_asks_for_it_if_the_caller_does(monkeypatch, wanted):
    asked = []
    monkeypatch.setattr(one_by_one, "keep_freed_memory", lambda: asked.append(True))
    fast = FastParts(keep_freed_memory=True) if wanted else None  # it reaches beyond the training: not by default
    engine = made(
        nn.Linear(6, 3),
        lambda m, b: m(b["x"]).square().mean(),
        small_population(4),
        LocalSGD(0.1),
        Streams(0),
        fast=fast,
    )
    assert not asked  # to make one changes nothing in the process
    list(engine.train([request(engine.problem.model.initial, np.arange(2))]))
    assert asked == ([True] if wanted else [])


needs_pages = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="areas are mapped on Linux alone")
