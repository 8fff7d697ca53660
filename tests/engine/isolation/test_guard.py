"""What one user leaves in a model or a loss, in whatever way, the next does not find."""

import collections
import contextlib
import functools
import itertools
import sys
import types

import numpy as np
import pytest
import torch
from samples import cross_entropies, cross_entropy, one_by_one, population_of, small_population
from torch import nn

from clipline import LocalSGD
from clipline.errors import ModuleError
from clipline.random.streams import Streams

pytestmark = pytest.mark.filterwarnings("ignore::clipline.engine.core.one_by_one.RetainedStateWarning")
MARK = 50.0  # of the first user; nothing made up is so large
HELPER = types.ModuleType("helper_of_the_caller")
HELPER.STATE = []
sys.modules["helper_of_the_caller"] = HELPER
SEEN: list = []  # named in functions inside functions alone


class Holder:
    __memory__: list = []  # noqa: RUF012


class Numbers(dict):
    pass


class Lazy(dict):
    """Makes its entries when they are asked for, and cannot make all, as tables of models in transformers."""

    def items(self):
        raise ValueError("an entry cannot be imported")

    __iter__ = keys = values = items


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


def inside(_):
    with noting():
        pass


def length(model):
    return len(model.held)


class Net(nn.Linear):
    """A linear layer; `recall` says what is found of earlier users and `remember` leaves something for later ones."""

    def __init__(self, recall, remember, held=None):
        super().__init__(6, 3)
        self.recall, self.remember, self.held = recall, remember, held

    def forward(self, x):
        found = self.recall(self)
        if bool((x.detach() == MARK).any()):
            self.remember(self)
        return super().forward(x * (3.0 if found else 1.0))


def forms():
    """name -> (recall, remember, what the model holds)."""
    items, numbers, lazy = [], Numbers(), Lazy(a=[])

    @functools.wraps(torch.nn.functional.cross_entropy)
    def wrapped(_):
        return bool(items)

    push, count = items.append, items.__len__
    return {
        "a tensor of a list": (
            lambda m: float(m.held[0].sum()), lambda m: m.held[0].add_(1.0), [torch.zeros(2), torch.zeros(2)]),
        "an array of a list": (
            lambda m: m.held[0].sum(), lambda m: m.held[0].__iadd__(1), [np.zeros(2), np.zeros(2)]),
        "a global of a function inside": (lambda m: (lambda: len(SEEN))(), lambda m: (lambda: SEEN.append(1))(), None),
        "a function without gradients": (noted, note, None),
        "a context manager": (noted, inside, None),
        "a module by name": (lambda m: len(HELPER.STATE), lambda m: HELPER.STATE.append(1), None),
        "a wrapped function": (wrapped, lambda m: items.append(1), None),
        "bound methods": (lambda m: count(), lambda m: push(1), None),
        "a class attribute with dunders": (
            lambda m: len(Holder.__memory__), lambda m: Holder.__memory__.append(1), None),
        "attributes of a dictionary": (
            lambda m: getattr(numbers, "seen", 0), lambda m: setattr(numbers, "seen", 1), None),
        "a list in a dictionary that does not show it": (
            lambda m: len(lazy["a"]), lambda m: lazy["a"].append(1), None),
        "a dictionary in Python": (length, lambda m: m.held.update(a=1), collections.UserDict()),
        "a list in Python": (length, lambda m: m.held.append(1), collections.UserList()),
        "a counter that numbers words": (
            lambda m: m.held["word"] % 2, lambda m: (m.held["new"], m.held["newer"]),
            collections.defaultdict(itertools.count().__next__)),
        "children of a generator": (
            lambda m: m.held.bit_generator.seed_seq.n_children_spawned, lambda m: m.held.spawn(1),
            np.random.default_rng(1)),
        "a sequence that fills a square": (
            lambda m: m.held.num_generated, lambda m: m.held.draw(1), torch.quasirandom.SobolEngine(2)),
        "a minus before zero": (lambda m: bool(torch.signbit(m.held)), lambda m: m.held.neg_(), torch.zeros(())),
        "a gradient of a tensor": (
            lambda m: m.held.grad is not None, lambda m: setattr(m.held, "grad", torch.ones(())),
            torch.zeros((), requires_grad=True)),
        "objects in an array": (
            lambda m: len(m.held[0]), lambda m: m.held[0].append(1), np.array([[], None], dtype=object)),
        "an optimiser": (
            lambda m: m.held.param_groups[0]["lr"] != 1.0, lambda m: m.held.param_groups[0].update(lr=2.0),
            torch.optim.SGD([torch.zeros(1)], lr=1.0)),
        "a hook after a gradient": (
            lambda m: m.weight._post_accumulate_grad_hooks,
            lambda m: m.weight.register_post_accumulate_grad_hook(lambda _: None), None),
        "the default type": (
            lambda m: torch.get_default_dtype() == torch.float64,
            lambda m: torch.set_default_dtype(torch.float64), None),
    }  # fmt: skip


def update(net, users):
    population = population_of([4, 4, 4])
    population.fields["x"][0, 0] = MARK
    engine = one_by_one(net.double(), cross_entropy, population, LocalSGD(0.1, 4), Streams(0))
    return engine.block(engine.problem.model.initial, np.array(users), 0).dense(engine.problem.model.dim)


@pytest.fixture(autouse=True)
def _as_found():
    yield
    torch.set_default_dtype(torch.float32)
    HELPER.STATE.clear()
    SEEN.clear()
    Holder.__memory__.clear()


@pytest.mark.parametrize("name", forms())
def test_the_next_user_finds_nothing(name):
    def made():
        torch.manual_seed(0)
        return Net(*forms()[name])

    try:
        expected, ours = update(made(), [1])[0], update(made(), [0, 1])[1]
    except ModuleError:
        return  # refused in a sentence, before anything is released
    assert expected.norm() > 0
    assert torch.equal(ours, expected)


def test_what_is_set_and_reset_within_a_block_is_seen():
    def remember(model):
        model.held.fill_(1.0)

    def recall(model):
        found = float(model.held)
        model.held.zero_()
        return found

    torch.manual_seed(0)
    with pytest.raises(ModuleError, match="'held'"):
        update(Net(recall, remember, torch.zeros(())), [0, 1])


def test_a_user_who_turns_gradients_off_does_not_turn_them_off_for_the_next():
    def loss(model, batch):
        losses = cross_entropies(model, batch)
        torch.set_grad_enabled(not bool((batch["x"] == MARK).any()))
        return losses

    population = population_of([4, 4, 4])
    population.fields["x"][0, 0] = MARK
    torch.manual_seed(0)
    engine = one_by_one(nn.Linear(6, 3).double(), loss, population, LocalSGD(0.1, 4), Streams(0))
    with torch.no_grad():  # the caller's, which is nobody else's concern
        both = engine.block(engine.problem.model.initial, np.array([0, 1]), 0).dense(engine.problem.model.dim)
        assert not torch.is_grad_enabled()
    assert both[1].norm() > 0
    assert torch.equal(both[1], update_of(engine, 1))


def test_what_an_interrupted_user_leaves_is_not_taken_for_the_callers():
    def remember(model):
        model.held = True
        raise KeyboardInterrupt

    torch.manual_seed(0)
    net = Net(lambda model: model.held, remember, held=False)
    population = population_of([4, 4, 4])
    population.fields["x"][0, 0] = MARK
    engine = one_by_one(net.double(), cross_entropy, population, LocalSGD(0.1, 4), Streams(0))
    before = engine.block(engine.problem.model.initial, np.array([1]), 0).dense(engine.problem.model.dim)
    with pytest.raises(KeyboardInterrupt):
        engine.block(engine.problem.model.initial, np.array([0]), 0)
    assert torch.equal(
        engine.block(engine.problem.model.initial, np.array([1]), 0).dense(engine.problem.model.dim), before
    )


def test_what_the_caller_sets_between_rounds_counts():
    torch.manual_seed(0)
    temperature = {"now": 1.0}

    def loss(model, batch):
        return cross_entropy(model, batch) * temperature["now"]

    engine = one_by_one(nn.Linear(6, 3).double(), loss, population_of([4, 4]), LocalSGD(0.1, 4), Streams(0))
    first = engine.block(engine.problem.model.initial, np.array([1]), 0).dense(engine.problem.model.dim)
    temperature["now"] = 2.0
    second = engine.block(engine.problem.model.initial, np.array([1]), 0).dense(engine.problem.model.dim)
    torch.testing.assert_close(second, 2 * first)


def clients(population, model, loss=cross_entropy):
    return one_by_one(model, loss, population, LocalSGD(0.1, batch_size=8), Streams(0))


def update_of(engine, user):
    """(dim,): one user's update."""
    return engine.block(engine.problem.model.initial, np.array([user]), 0).dense(engine.problem.model.dim)[0]


def first_with_examples(engine):
    return int(np.flatnonzero(np.diff(engine.problem.population.offsets))[0])


class Remembering(nn.Module):
    """Keeps a private statistic in a buffer of its own making."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.sum().detach()
        return self.linear(x)


class Replacing(Remembering):
    """Puts a new tensor in the buffer's place instead of changing it."""

    def forward(self, x):
        self.seen = 0.5 * self.seen + x.sum().detach()
        return self.linear(x)


@pytest.mark.parametrize("kind", [Remembering, Replacing])
def test_any_other_buffer_that_moves_is_refused_when_it_moves(kind):
    with pytest.raises(ModuleError, match="buffer 'seen' of the model changed while a user trained"):
        clients(small_population(), kind())


@pytest.mark.parametrize("kind", [Remembering, Replacing])
def test_a_buffer_that_moves_for_some_data_alone_is_refused_then_and_put_back(kind):
    class Sometimes(kind):
        def forward(self, x):
            return super().forward(x) if bool((x > 100).any()) else self.linear(x)

    population = small_population()
    engine = clients(population, Sometimes().double())
    user = first_with_examples(engine)
    population.fields["x"][int(population.offsets[user])] = 1000.0
    with pytest.raises(ModuleError, match="buffer 'seen' of the model changed while a user trained"):
        update_of(engine, user)
    assert float(engine.problem.model.module.seen) == 0.0


def test_a_buffer_that_stays_is_welcome_even_if_it_is_not_a_number():
    model = Remembering()
    model.forward = model.linear.forward
    model.seen.fill_(float("nan"))
    engine = clients(small_population(), model, lambda m, b: m.linear(b["x"]).square().mean())
    user = first_with_examples(engine)
    assert update_of(engine, user).isfinite().all()


def test_a_buffer_too_long_to_be_copied_that_is_written_past_torchs_count_is_refused_for_good(monkeypatch):
    monkeypatch.setattr("clipline.engine.isolation.state._COPIED", 8)

    class Moving(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.register_buffer("average", torch.zeros(1 << 15))

        def forward(self, x):
            if bool((x == MARK).any()):  # nothing made up is so large
                self.average.data += x.mean()
            return super().forward(x)

    population = population_of([4] * 3)
    population.fields["x"][:] = MARK
    trained = clients(population, Moving().double(), cross_entropies)
    for _ in range(2):  # what was changed stays so, and is never trained with again
        with pytest.raises(
            ModuleError, match=r"buffer 'average' of the model changed .* too long to be kept twice, and st"
        ):
            trained.block(trained.problem.model.initial, np.arange(3), 0)
