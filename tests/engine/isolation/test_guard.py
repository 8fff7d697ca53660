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
from samples import cross_entropies, cross_entropy, one_by_one, population_of
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


def later(_):
    try:
        return LATER
    except NameError:
        return 0


def note_later(_):
    global LATER
    LATER = 1


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
    if items:
        unset = 0  # a variable that is not there yet

    def is_set(_):
        try:
            return unset
        except NameError:
            return 0

    def set_it(_):
        nonlocal unset
        unset = 1

    return {
        "a tensor of a list": (
            lambda m: float(m.held[0].sum()), lambda m: m.held[0].add_(1.0), [torch.zeros(2), torch.zeros(2)]),
        "an array of a list": (
            lambda m: m.held[0].sum(), lambda m: m.held[0].__iadd__(1), [np.zeros(2), np.zeros(2)]),
        "a global of a function inside": (lambda m: (lambda: len(SEEN))(), lambda m: (lambda: SEEN.append(1))(), None),
        "a function without gradients": (noted, note, None),
        "a global that is not there yet": (later, note_later, None),
        "a variable that is not there yet": (is_set, set_it, None),
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


def trained(net, loss=cross_entropy):
    """Three users by one engine; the mark is in the data of the first."""
    population = population_of([4, 4, 4])
    population.fields["x"][0, 0] = MARK
    return one_by_one(net.double(), loss, population, LocalSGD(0.1, 4), Streams(0))


def rows(engine, users):
    return engine.block(engine.problem.model.initial, np.array(users), 0).dense(engine.problem.model.dim)


def update(net, users):
    return rows(trained(net), users)


@pytest.fixture(autouse=True)
def _as_found():
    yield
    torch.set_default_dtype(torch.float32)
    globals().pop("LATER", None)
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

    torch.manual_seed(0)
    engine = trained(nn.Linear(6, 3), loss)
    with torch.no_grad():  # the caller's, which is nobody else's concern
        both = rows(engine, [0, 1])
        assert not torch.is_grad_enabled()
    assert both[1].norm() > 0
    assert torch.equal(both[1], rows(engine, [1])[0])


def test_what_an_interrupted_user_leaves_is_not_taken_for_the_callers():
    def remember(model):
        model.held = True
        raise KeyboardInterrupt

    torch.manual_seed(0)
    engine = trained(Net(lambda model: model.held, remember, held=False))
    before = rows(engine, [1])
    with pytest.raises(KeyboardInterrupt):
        rows(engine, [0])
    assert torch.equal(rows(engine, [1]), before)


def test_what_the_caller_sets_between_rounds_counts():
    torch.manual_seed(0)
    temperature = {"now": 1.0}
    engine = trained(nn.Linear(6, 3), lambda model, batch: cross_entropy(model, batch) * temperature["now"])
    first = rows(engine, [1])
    temperature["now"] = 2.0
    torch.testing.assert_close(rows(engine, [1]), 2 * first)


def test_a_buffer_that_stays_is_welcome_even_if_it_is_not_a_number():
    model = nn.Linear(6, 3)
    model.register_buffer("seen", torch.full((), torch.nan))
    assert rows(trained(model), [0]).isfinite().all()


def test_a_buffer_too_long_to_be_copied_that_is_written_past_torchs_count_is_refused_for_good(monkeypatch):
    monkeypatch.setattr("clipline.engine.isolation.state._COPIED", 8)
    net = Net(lambda model: False, lambda model: model.average.data.add_(1.0))
    net.register_buffer("average", torch.zeros(1 << 15))
    engine = trained(net)
    words = r"buffer 'average' of the model changed .* too long to be kept twice, and st"
    for _ in range(2):  # what was changed stays so, and is never trained with again
        with pytest.raises(ModuleError, match=words):
            rows(engine, [0, 1, 2])
