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


def bad_label(model, batch):
    return cross_entropies(model, batch)  # the label itself is out of range


def bad_index(model, batch):
    places = torch.where((batch["x"] == MARKER).any(dim=1), 99, 0)
    return cross_entropies(model, batch) + F.embedding(places, model.out.bias.unsqueeze(1)).sum(dim=1)


def index_of_the_next_in_a_stack(model, batch):
    """One beyond the user's own rows: in a stack the row behind them belongs to somebody else."""
    places = torch.where((batch["x"] == MARKER).any(dim=1), 3, 0)
    return cross_entropies(model, batch) + F.embedding(places, model.out.bias.unsqueeze(1)).sum(dim=1)


def raises(model, batch):
    if bool(marked(batch)):
        raise ValueError(f"the value {batch['x'].max()} is private")
    return cross_entropies(model, batch)


def raises_in_the_backward_pass(model, batch):
    losses = cross_entropies(model, batch)
    if bool(marked(batch)):
        losses.register_hook(lambda gradient: gradient.view(7, 7))
    return losses


def stops(model, batch):
    if bool(marked(batch)):
        raise StopIteration
    return cross_entropies(model, batch)


def out_of_memory(model, batch):
    if bool(marked(batch)):
        raise MemoryError
    return cross_entropies(model, batch)


def raises_an_error_of_clipline(model, batch):
    if bool(marked(batch)):
        raise ModuleError(f"the value {batch['x'].max()} is private")
    return cross_entropies(model, batch)


def nan_loss(model, batch):
    return cross_entropies(model, batch) * torch.where((batch["x"] == MARKER).any(dim=1), torch.nan, 1.0)


def infinite_loss(model, batch):
    return cross_entropies(model, batch) * torch.where((batch["x"] == MARKER).any(dim=1), torch.inf, 1.0)


def wrong_shape(model, batch):
    losses = cross_entropies(model, batch)
    return losses.repeat(2) if bool(marked(batch)) else losses


def no_tensor(model, batch):
    return "nothing" if bool(marked(batch)) else cross_entropies(model, batch)


def no_gradient(model, batch):
    losses = cross_entropies(model, batch)
    return losses.detach() if bool(marked(batch)) else losses


LOSSES = [
    bad_label,
    bad_index,
    index_of_the_next_in_a_stack,
    raises,
    raises_in_the_backward_pass,
    stops,
    raises_an_error_of_clipline,
    nan_loss,
    infinite_loss,
    wrong_shape,
    no_tensor,
    no_gradient,
]


def worlds(loss, victim, place):
    """Everybody, with one example of the victim's that fails; and the same without the victim."""
    users = everybody()
    own = {name: field.copy() for name, field in users[victim].items()}
    if loss is bad_label:
        own["y"][place] = 99
    else:
        own["x"][place] = MARKER
    return {**users, victim: own}, {name: user for name, user in users.items() if name != victim}


def rounds(users, victim):
    rest = tuple(name for name in users if name != victim)
    return [Ask(0, tuple(users), initial=True), Ask(1, rest), Ask(2, tuple(users))]


def assert_adds_zeros(loss, victim, engine, workers=1, place=0):
    case = Case(Entry(loss.__name__, lambda: (Net(), loss), ISOLATED), engine, workers)
    with_user, without = worlds(loss, victim, place)
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
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_user_who_fails_adds_zeros_and_is_not_within(loss, engine):
    assert_adds_zeros(loss, "a", engine)


@pytest.mark.parametrize("engine", [*ENGINES, "auto"])
@pytest.mark.parametrize("victim", ["m", "z"])
@pytest.mark.parametrize("loss", [bad_label, raises, nan_loss], ids=lambda loss: loss.__name__)
def test_wherever_the_user_stands(loss, victim, engine):
    assert_adds_zeros(loss, victim, engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("place", [2, 4])
def test_whichever_example_fails_and_after_however_many_steps(engine, place):
    """Half-trained parameters must neither be sent nor be the next user's first ones."""
    assert_adds_zeros(bad_label, "a", engine, place=place)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loss", [bad_label, nan_loss], ids=lambda loss: loss.__name__)
def test_users_who_fail_at_a_worker_end_no_worker(loss, engine):
    assert_adds_zeros(loss, "a", engine, workers=2)


def test_memory_that_runs_out_at_one_user_ends_the_round_for_all():
    """Nobody can tell whose fault it was: that the run ended is then known (docs/explanation/threat_model.md)."""
    users, _ = worlds(out_of_memory, "a", 0)
    case = Case(Entry("memory", lambda: (Net(), out_of_memory), ISOLATED), "one-by-one")
    refused = sums(case, users, rounds(users, "a"))
    assert isinstance(refused, Refused)
    assert refused.made
    assert isinstance(refused.error, MemoryError)


def missing_field(model, batch):
    return cross_entropies(model, {"x": batch["images"], "y": batch["y"]})


def wrong_for_all(model, batch):
    return model(batch["x"]).view(-1, 7).sum(dim=1)


def shape_for_all(model, batch):
    return model(batch["x"])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loss", [missing_field, wrong_for_all, shape_for_all], ids=lambda loss: loss.__name__)
def test_a_loss_that_fails_for_everybody_is_refused_before_the_first_round(loss, engine):
    refused = sums(Case(Entry("", lambda: (Net(), loss), ISOLATED), engine), everybody(), [])
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, ModuleError), described(refused)
    assert not refused.made


def test_a_model_that_does_not_fit_the_data_is_refused_before_the_first_round():
    refused = sums(Case(Entry("", lambda: nn.Linear(9, 3), ISOLATED), "one-by-one"), everybody(), [])
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, ModuleError), described(refused)


@pytest.mark.parametrize("engine", ENGINES)
def test_if_all_fail_all_are_counted_as_not_within(engine):
    users = {name: {"x": user["x"], "y": user["y"] + 99} for name, user in everybody().items()}
    case = Case(Entry("bad labels", lambda: (Net(), bad_label), ISOLATED), engine)
    made = sums(case, users, [Ask(0, tuple(users), initial=True)])
    assert not isinstance(made, Refused), described(made)
    assert not made[0][:-1].any()
    with_examples = sum(len(user["y"]) > 0 for user in users.values())
    assert float(made[0][-1]) == (len(users) - with_examples) / 2 - with_examples / 2


def test_a_marker_changes_nothing_where_no_loss_looks_for_it():
    """The victims above fail because of the loss, and not because of the marker."""
    users, _ = worlds(raises, "a", 0)
    case = Case(Entry("plain", Net, ISOLATED), "one-by-one")
    (total,) = sums(case, users, [Ask(0, ("a",), initial=True)])
    assert total[:-1].any()
    assert np.isfinite(total.numpy()).all()
