"""State is found wherever Python code can put it: in what libraries wrap, derive from, or keep as plain containers."""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import random
import statistics
import sys
import threading
import types
import weakref
from array import array

import numpy as np
import pytest
import torch
from samples import cross_entropy, one_by_one, population_of
from torch import nn

from clipline import LocalSGD
from clipline.engine.isolation.reachable import _full_names
from clipline.errors import ModuleError
from clipline.streams import Streams

pytestmark = pytest.mark.filterwarnings("ignore::clipline.engine.one_by_one.RetainedStateWarning")
MARK = 50.0  # of the first user; nothing made up is so large
SEEN = []
LEVEL = contextvars.ContextVar("LEVEL", default=0)


class Shown(np.ndarray):
    pass


class Draws(random.Random):
    seen = 0


class Bound(functools.partial):
    seen = 0


class Link(weakref.ref):
    seen = 0


class Described(property):
    seen = 0


class Local(threading.local):
    shared: list = []  # noqa: RUF012


class Spread(statistics.NormalDist):
    """Its numbers are in slots of the library's class."""


class Slotted(nn.Linear):
    __slots__ = ("last",)


def parametrised():
    layer = Slotted(2, 2).requires_grad_(False)
    layer.last = 0
    return torch.nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())


Made = dataclasses.make_dataclass("Made", [("seen", int, 0)])


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


def in_package(code):
    """A function of a package that imports what is beside it."""
    beside = types.ModuleType("callers_package.beside")
    beside.SEEN = []
    package = types.ModuleType("callers_package")
    package.SEEN, package.beside = [], beside
    sys.modules.update({"callers_package": package, "callers_package.beside": beside})
    namespace = {"__name__": "callers_package.model", "__package__": "callers_package"}
    exec(code, namespace)
    return namespace["recall"], namespace["remember"], None


def imports(line, name):
    return in_package(
        f"def recall(_):\n    {line}\n    return len({name})\ndef remember(_):\n    {line}\n    {name}.append(1)"
    )


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
        "an attribute of a reference": (lambda m: LINK.seen, lambda m: setattr(LINK, "seen", 1), None),
        "an attribute of a property": (lambda m: SHOWN.seen, lambda m: setattr(SHOWN, "seen", 1), None),
        "a class of a thread's variables": (
            lambda m: len(LOCAL.shared), lambda m: LOCAL.shared.append(1), None),
        "a class made by a library": (seen, see, Made()),
        "slots of a library's class": (
            lambda m: m.held._mu, lambda m: setattr(m.held, "_mu", 1.0), Spread(0.0, 1.0)),
        "a counter that numbers words": (
            lambda m: m.held["word"] % 2, lambda m: (m.held["new"], m.held["newer"]), numbers),
        "a key": (
            lambda m: next(iter(m.held)).seen, lambda m: setattr(next(iter(m.held)), "seen", 1), {Described(): 1}),
        "a class without a module": (seen, see, EXECUTED()),
        "slots of a class that a library derives from": (
            lambda m: m.held.last, lambda m: setattr(m.held, "last", 1), parametrised()),
        "children of a seed": (
            lambda m: m.held.n_children_spawned, lambda m: m.held.spawn(1), np.random.SeedSequence(1)),
        "children of a generator": (
            lambda m: m.held.bit_generator.seed_seq.n_children_spawned, lambda m: m.held.spawn(1),
            np.random.default_rng(1)),
        "a sequence that fills a square": (
            lambda m: m.held.num_generated, lambda m: m.held.draw(1), torch.quasirandom.SobolEngine(2)),
        "another factory": (
            lambda m: m.held.default_factory is not int, lambda m: setattr(m.held, "default_factory", float),
            collections.defaultdict(int)),
        "a context variable": (lambda m: LEVEL.get(), lambda m: LEVEL.set(1), None),
        "an array of numbers": (length, lambda m: m.held.append(1.0), array("d")),
        "memory": (lambda m: VIEW[0], lambda m: VIEW.__setitem__(0, 1), None),
        "storage": (lambda m: m.held[0], lambda m: m.held.__setitem__(0, 1), torch.zeros(2).untyped_storage()),
        "a dictionary in Python": (length, lambda m: m.held.update(a=1), collections.UserDict()),
        "a list in Python": (length, lambda m: m.held.append(1), collections.UserList()),
        "dictionaries in a row": (length, lambda m: m.held.update(a=1), collections.ChainMap()),
        "a dictionary of weak keys": (
            lambda m: len(WEAK), lambda m: WEAK.__setitem__(Spread, 1), None),
        "an optimiser": (
            lambda m: m.held.param_groups[0]["lr"] != 1.0, lambda m: m.held.param_groups[0].update(lr=2.0),
            torch.optim.SGD([torch.zeros(1)], lr=1.0)),
        "a hook after a gradient": (
            lambda m: m.weight._post_accumulate_grad_hooks,
            lambda m: m.weight.register_post_accumulate_grad_hook(lambda _: None), None),
        "a module beside": imports("from .beside import SEEN", "SEEN"),
        "a module from the package": imports("from . import beside", "beside.SEEN"),
        "the package of a module": imports("import callers_package.beside", "callers_package.SEEN"),
    }  # fmt: skip


EXECUTED = {}
exec("class Executed:\n    seen = 0", EXECUTED)  # as tools do that read settings in Python
EXECUTED = EXECUTED["Executed"]
LINK, SHOWN, LOCAL, VIEW = Link(Spread), Described(), Local(), memoryview(bytearray(2))
WEAK = weakref.WeakKeyDictionary()


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
    token = LEVEL.set(0)
    yield
    LEVEL.reset(token)
    SEEN.clear()
    Local.shared.clear()
    WEAK.clear()
    VIEW[0] = LINK.seen = SHOWN.seen = 0
    for name in ("callers_package", "callers_package.beside"):
        sys.modules.pop(name, None)


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


def test_an_import_inside_a_package_may_mean_a_module_beside_it_or_above():
    assert _full_names("a.b", "") == ["a", "a.b"]
    assert _full_names("", "top.low") == ["", "top", "top.low", "top"]
    assert "top.state" in _full_names("state", "top.low")


def test_a_context_variable_that_has_no_value_to_go_back_to_is_refused():
    bare = contextvars.ContextVar("bare")
    population = population_of([4, 4])
    population.fields["x"][0, 0] = MARK
    net = Net(lambda m: bare.get(0), lambda m: bare.set(1), None)
    engine = one_by_one(net.double(), cross_entropy, population, LocalSGD(0.1, 4), Streams(0))
    for users in ([0, 1], [1]):  # the next attempt does not take it for the caller's
        with pytest.raises(ModuleError, match="cannot be unset: give it a default"):
            engine.block(engine.problem.model.initial, np.array(users), 0)


def test_a_tensor_that_vmap_has_left_behind_ends_no_training():
    kept = []
    torch.vmap(lambda row: kept.append(row) or row)(torch.ones(2, 3))

    def loss(model, batch):
        return cross_entropy(model, batch) + 0 * len(kept)

    one_by_one(nn.Linear(6, 3).double(), loss, population_of([2]), LocalSGD(0.1), Streams(0))
