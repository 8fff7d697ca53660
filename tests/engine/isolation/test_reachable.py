"""State is found wherever Python code can put it: in what libraries wrap, derive from, or keep as plain containers."""

import collections
import contextlib
import functools
import itertools
import random

import numpy as np
import pytest
import torch
from samples import cross_entropy, one_by_one, population_of
from torch import nn

from clipline import LocalSGD
from clipline.errors import ModuleError
from clipline.random.streams import Streams

pytestmark = pytest.mark.filterwarnings("ignore::clipline.engine.core.one_by_one.RetainedStateWarning")
MARK = 50.0  # of the first user; nothing made up is so large
SEEN = []


class Shown(np.ndarray):
    pass


class Draws(random.Random):
    seen = 0


class Bound(functools.partial):
    seen = 0


@torch.no_grad()
def note(_=None):
    SEEN.append(1)


@torch.no_grad()
def noted(_=None):
    return len(SEEN)


@contextlib.contextmanager
def noting():
    SEEN.append(1)
    yield


@functools.singledispatch
def dispatched(_):
    SEEN.append(1)


def inside(_):
    with noting():
        pass


def length(model):
    return len(model.held)


def seen(model):
    return model.held.seen


def see(model):
    model.held.seen = 1


def forms():
    """name -> (recall, remember, what the model holds)."""
    called = torch.vmap(lambda x: (SEEN.append(1), x)[1])
    by_entry = np.vectorize(lambda x: (SEEN.append(1), x)[1], otypes=[float])
    partial, cached = functools.partial(int), functools.lru_cache(int)
    partial.seen = cached.seen = 0
    hidden = np.ma.masked_array(np.zeros(2), mask=[True, False])
    numbers = collections.defaultdict(itertools.count().__next__)
    return {
        "a function without gradients": (noted, note, None),
        "a context manager": (noted, inside, None),
        "a function by type": (noted, lambda m: dispatched(1), None),
        "a function of many": (noted, lambda m: called(torch.zeros(2)), None),
        "a function by entry": (noted, lambda m: by_entry(np.zeros(2)), None),
        "an entry of an array of objects": (
            lambda m: m.held[0] is not None, lambda m: m.held.__setitem__(0, 1.0), np.array([None, None])),
        "an attribute of an array": (
            lambda m: getattr(m.held, "seen", 0), see, np.zeros(2).view(Shown)),
        "what a mask hides": (lambda m: m.held.data[0], lambda m: m.held.data.__setitem__(0, 1.0), hidden),
        "whether an array can be written": (
            lambda m: not m.held.flags.writeable, lambda m: m.held.setflags(write=False), np.zeros(2)),
        "the length of an array": (
            lambda m: m.held.size > 2, lambda m: m.held.resize(3, refcheck=False), np.zeros(2)),
        "an attribute of a partial": (seen, see, partial),
        "an attribute of a cache": (seen, see, cached),
        "an attribute of a class from partial": (seen, see, Bound(int)),
        "an attribute of a generator": (seen, see, Draws(1)),
        "a counter that numbers words": (
            lambda m: m.held["word"] % 2, lambda m: (m.held["new"], m.held["newer"]), numbers),
        "children of a seed": (
            lambda m: m.held.n_children_spawned, lambda m: m.held.spawn(1), np.random.SeedSequence(1)),
        "children of a generator": (
            lambda m: m.held.bit_generator.seed_seq.n_children_spawned, lambda m: m.held.spawn(1),
            np.random.default_rng(1)),
        "a sequence that fills a square": (
            lambda m: m.held.num_generated, lambda m: m.held.draw(1), torch.quasirandom.SobolEngine(2)),
        "a dictionary in Python": (length, lambda m: m.held.update(a=1), collections.UserDict()),
        "a list in Python": (length, lambda m: m.held.append(1), collections.UserList()),
        "dictionaries in a row": (length, lambda m: m.held.update(a=1), collections.ChainMap()),
        "an optimiser": (
            lambda m: m.held.param_groups[0]["lr"] != 1.0, lambda m: m.held.param_groups[0].update(lr=2.0),
            torch.optim.SGD([torch.zeros(1)], lr=1.0)),
        "a hook after a gradient": (
            lambda m: m.weight._post_accumulate_grad_hooks,
            lambda m: m.weight.register_post_accumulate_grad_hook(lambda _: None), None),
    }  # fmt: skip


class Net(nn.Linear):
    """A linear layer; `recall` says what is found of earlier users and `remember` leaves something for later ones."""

    def __init__(self, recall, remember, held):
        super().__init__(6, 3)
        self.recall, self.remember, self.held = recall, remember, held

    def forward(self, x):
        found = self.recall(self)
        if bool((x.detach() == MARK).any()):
            self.remember(self)
        return super().forward(x * (3.0 if found else 1.0))


@pytest.fixture(autouse=True)
def _as_found():
    yield
    SEEN.clear()


@pytest.mark.parametrize("name", forms())
def test_the_next_user_finds_nothing(name):
    population = population_of([4, 4])
    population.fields["x"][0, 0] = MARK

    def update(users):
        torch.manual_seed(0)
        net = Net(*forms()[name])
        engine = one_by_one(net.double(), cross_entropy, population, LocalSGD(0.1, 4), Streams(0))
        return engine.block(engine.problem.model.initial, np.array(users), 0).dense(engine.problem.model.dim)[-1]

    try:
        expected = update([1])
        ours = update([0, 1])
    except ModuleError:
        return  # refused in a sentence, before anything is released
    assert expected.norm() > 0
    assert torch.equal(ours, expected)


def test_a_tensor_that_vmap_has_left_behind_ends_no_training():
    kept = []
    torch.vmap(lambda row: kept.append(row) or row)(torch.ones(2, 3))

    def loss(model, batch):
        return cross_entropy(model, batch) + 0 * len(kept)

    one_by_one(nn.Linear(6, 3).double(), loss, population_of([2]), LocalSGD(0.1), Streams(0))
