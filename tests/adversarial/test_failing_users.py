"""A user whose data make the loss fail adds zeros and is not within; nobody else notices."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from adversarial.entry import ISOLATED, Entry, Net, cross_entropies
from adversarial.neighbours import CLIP, Ask, Case, Refused, described, everybody, sums
from torch import nn

from clipline.errors import ModuleError

MARKER = 12345.0
ENGINES = ["one-by-one", "stacked"]


def marked(batch):
    return (batch["x"] == MARKER).any()


def of_examples(batch, there, elsewhere):
    """For each example one of two numbers: `there` if it is marked."""
    return torch.where((batch["x"] == MARKER).any(dim=1), there, elsewhere)


def looked_up(model, batch, there):
    """A row of a table of three that is out of range for a marked example."""
    return F.embedding(of_examples(batch, there, 0), model.out.bias.unsqueeze(1)).sum(dim=1)


def raising(error):
    def loss(model, batch):
        if bool(marked(batch)):
            raise error
        return cross_entropies(model, batch)

    return loss


def fails_in_the_backward_pass(model, batch):
    losses = cross_entropies(model, batch)
    if bool(marked(batch)):
        losses.register_hook(lambda gradient: gradient.view(7, 7))
    return losses


def gives(what):
    """A loss that makes something else of the losses of a batch with a marked example."""
    return lambda model, batch: (what if bool(marked(batch)) else lambda losses: losses)(cross_entropies(model, batch))


LOSSES = {
    "bad label": cross_entropies,  # the label itself is out of range
    "bad index": lambda model, batch: cross_entropies(model, batch) + looked_up(model, batch, 99),
    # One beyond the user's own rows: in a stack the row behind them belongs to somebody else.
    "index of the next in a stack": lambda model, batch: cross_entropies(model, batch) + looked_up(model, batch, 3),
    "raises": raising(ValueError("the value 7781 is private")),
    "raises in the backward pass": fails_in_the_backward_pass,
    "stops": raising(StopIteration()),
    "raises an error of clipline": raising(ModuleError("the value 7781 is private")),
    "NaN": lambda model, batch: cross_entropies(model, batch) * of_examples(batch, torch.nan, 1.0),
    "infinite": lambda model, batch: cross_entropies(model, batch) * of_examples(batch, torch.inf, 1.0),
    "wrong shape": gives(lambda losses: losses.repeat(2)),
    "no tensor": gives(lambda losses: "nothing"),
    "no gradient": gives(lambda losses: losses.detach()),
}


def worlds(name, victim, place):
    """Everybody, with one example of the victim's that fails; and the same without the victim."""
    users = everybody()
    own = {field: values.copy() for field, values in users[victim].items()}
    if name == "bad label":
        own["y"][place] = 99
    else:
        own["x"][place] = MARKER
    return {**users, victim: own}, {other: user for other, user in users.items() if other != victim}


def rounds(users, victim):
    rest = tuple(name for name in users if name != victim)
    return [Ask(0, tuple(users), initial=True), Ask(1, rest), Ask(2, tuple(users))]


def assert_adds_zeros(name, victim, engine, workers=1, place=0):
    case = Case(Entry(name, lambda: (Net(), LOSSES[name]), ISOLATED), engine, workers)
    with_user, without = worlds(name, victim, place)
    failing, others = (sums(case, users, rounds(users, victim)) for users in (with_user, without))
    if engine == "stacked" and isinstance(others, Refused) and not others.made:
        assert isinstance(others.error, ModuleError)  # cannot be stacked, with that user or not
        assert isinstance(failing, Refused)
        assert str(failing.error) == str(others.error)
        return
    for world in (failing, others):
        assert not isinstance(world, Refused), described(world)
    for moment in (0, 2):
        moved = failing[moment] - others[moment]
        assert float(moved[:-1].norm()) <= 1e-9 * CLIP
        assert float(moved[-1]) == -0.5
    assert torch.equal(failing[1], others[1])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LOSSES)
def test_a_user_who_fails_adds_zeros_and_is_not_within(name, engine):
    assert_adds_zeros(name, "a", engine)


@pytest.mark.parametrize("engine", [*ENGINES, "auto"])
@pytest.mark.parametrize("victim", ["m", "z"])
@pytest.mark.parametrize("name", ["bad label", "raises", "NaN"])
def test_wherever_the_user_stands(name, victim, engine):
    assert_adds_zeros(name, victim, engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("place", [2, 4])
def test_whichever_example_fails_and_after_however_many_steps(engine, place):
    """Half-trained parameters must neither be sent nor be the next user's first ones."""
    assert_adds_zeros("bad label", "a", engine, place=place)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["bad label", "NaN"])
def test_users_who_fail_at_a_worker_end_no_worker(name, engine):
    assert_adds_zeros(name, "a", engine, workers=2)


def test_memory_that_runs_out_at_one_user_ends_the_round_for_all():
    """Nobody can tell whose fault it was: that the run ended is then known (docs/explanation/threat_model.md)."""
    users, _ = worlds("memory", "a", 0)
    case = Case(Entry("memory", lambda: (Net(), raising(MemoryError())), ISOLATED), "one-by-one")
    refused = sums(case, users, rounds(users, "a"))
    assert isinstance(refused, Refused)
    assert refused.made
    assert isinstance(refused.error, MemoryError)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "made",
    [
        lambda: (Net(), lambda model, batch: cross_entropies(model, {"x": batch["images"], "y": batch["y"]})),
        lambda: (Net(), lambda model, batch: model(batch["x"]).view(-1, 7).sum(dim=1)),
        lambda: (Net(), lambda model, batch: model(batch["x"])),
        lambda: nn.Linear(9, 3),
    ],
    ids=["missing field", "wrong view", "wrong shape", "a model that does not fit the data"],
)
def test_what_fails_for_everybody_is_refused_before_the_first_round(made, engine):
    refused = sums(Case(Entry("", made, ISOLATED), engine), everybody(), [])
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, ModuleError), described(refused)
    assert not refused.made


@pytest.mark.parametrize("engine", ENGINES)
def test_if_all_fail_all_are_counted_as_not_within(engine):
    users = {name: {"x": user["x"], "y": user["y"] + 99} for name, user in everybody().items()}
    case = Case(Entry("bad labels", Net, ISOLATED), engine)
    made = sums(case, users, [Ask(0, tuple(users), initial=True)])
    assert not isinstance(made, Refused), described(made)
    assert not made[0][:-1].any()
    with_examples = sum(len(user["y"]) > 0 for user in users.values())
    assert float(made[0][-1]) == (len(users) - with_examples) / 2 - with_examples / 2


def test_a_marker_changes_nothing_where_no_loss_looks_for_it():
    """The victims above fail because of the loss, and not because of the marker."""
    users, _ = worlds("raises", "a", 0)
    case = Case(Entry("plain", Net, ISOLATED), "one-by-one")
    (total,) = sums(case, users, [Ask(0, ("a",), initial=True)])
    assert total[:-1].any()
    assert np.isfinite(total.numpy()).all()
