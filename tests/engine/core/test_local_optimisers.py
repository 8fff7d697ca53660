"""Momentum, Adam, weight decay, gradient clipping and FedProx, against torch.optim and by hand, in both engines."""

import copy

import numpy as np
import pytest
import torch
from samples import cross_entropies, one_by_one, population_of, request, rows_of
from torch import nn

from clipline import LocalAdam, LocalSGD, Population
from clipline.engine.core.local_optimisers import LocalOptimiser
from clipline.engine.core.problem import LocalRun
from clipline.engine.core.working_model import WorkingModel
from clipline.engine.gpu.programs.program_cache import fingerprint
from clipline.engine.gpu.recorded_step import traced
from clipline.engine.stacked.step import StackStep
from clipline.engine.stacked.trainer import Stacked
from clipline.errors import ModuleError
from clipline.random.streams import Streams

SIZES = [9, 0, 14, 1, 6]
USERS = np.arange(len(SIZES))
MORE = {"batch_size": 20, "epochs": 6}  # all examples in one batch: their order does not matter
OPTIMISERS = {
    "momentum": (LocalSGD(0.1, momentum=0.9, **MORE), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "decay": (LocalSGD(0.1, weight_decay=0.3, **MORE), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.3)),
    "all of SGD": (
        LocalSGD(0.2, momentum=0.5, weight_decay=0.3, clip_norm=0.2, proximal=0.7, **MORE),
        lambda p: torch.optim.SGD(p, 0.2, momentum=0.5, weight_decay=0.3),
    ),
    "adam": (LocalAdam(0.05, **MORE), lambda p: torch.optim.Adam(p, 0.05)),
    "all of Adam": (
        LocalAdam(0.05, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.3, clip_norm=0.2, proximal=0.7, **MORE),
        lambda p: torch.optim.AdamW(p, 0.05, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.3),
    ),
}


def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def trainers(model, loss, population, local, **options):
    plain = one_by_one(model, loss, population, local, Streams(0), **options)
    return plain, Stacked(plain, 5)


def by_torch(model, population, local, make):
    """(users, dim): what torch.optim makes of every user, in a loop as one writes it."""
    rows = []
    for user in USERS:
        own, start = copy.deepcopy(model), [param.detach().clone() for param in model.parameters()]
        optimiser = make(own.parameters())
        part = slice(*population.offsets[user : user + 2])
        batch = {name: torch.from_numpy(field[part]) for name, field in population.fields.items()}
        batch["x"] = batch["x"].float()
        for _ in range(local.epochs if SIZES[user] else 0):
            optimiser.zero_grad()
            loss = cross_entropies(own, batch).mean()
            loss = loss + local.proximal / 2 * sum(
                (p - p0).square().sum() for p, p0 in zip(own.parameters(), start, strict=True)
            )
            loss.backward()
            if local.clip_norm is not None:
                nn.utils.clip_grad_norm_(own.parameters(), local.clip_norm)
            optimiser.step()
        moved = [(param.detach() - p0).flatten() for param, p0 in zip(own.parameters(), start, strict=True)]
        rows.append(torch.cat(moved))
    return torch.stack(rows)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_both_engines_do_what_torch_optim_does(name):
    local, make = OPTIMISERS[name]
    population = population_of(SIZES)
    expected = by_torch(network(), population, local, make)
    assert expected[0].norm() > 0.05
    for trainer in trainers(network(), cross_entropies, population, local):
        torch.testing.assert_close(rows_of(trainer, USERS), expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", ["all of SGD", "all of Adam"])
@pytest.mark.parametrize("per_example", [True, False])
def test_the_engines_agree_where_users_have_other_numbers_of_steps(name, per_example):
    local = OPTIMISERS[name][0]
    local = type(local)(**{**vars(local), "batch_size": 4, "epochs": 2})
    loss = cross_entropies if per_example else lambda model, batch: cross_entropies(model, batch).mean()
    plain, stacked = trainers(network().double(), loss, population_of(SIZES), local)
    rows = rows_of(plain, USERS)
    torch.testing.assert_close(rows_of(stacked, USERS), rows, rtol=1e-9, atol=1e-12)
    assert torch.equal(rows_of(plain, USERS), rows)  # a second round with the same keys: no state is left
    alone = rows_of(plain, USERS[2:3])
    assert torch.equal(alone[0], rows[2])


def pull(model, batch):
    """1/2 (w - x)^2 of each example."""
    return 0.5 * (model.weight[0, 0] - batch["x"]).square()


def weight(value):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def numbers(*users):
    offsets = np.cumsum([0, *map(len, users)])
    return Population(offsets, {"x": np.concatenate([np.asarray(user, np.float64) for user in users])})


def test_fedprox_ends_between_the_user_and_the_round():
    # 1/2 (w - 4)^2 + mu/2 (w - 1)^2 is least at (4 + mu) / (1 + mu) = 2 for mu = 2: the update is 1, not 3.
    local = LocalSGD(0.2, epochs=60, proximal=2.0)
    for trainer in trainers(weight(1.0), pull, numbers([4.0], [1.0]), local):
        assert rows_of(trainer, np.arange(2)).flatten().tolist() == pytest.approx([1.0, 0.0], abs=1e-6)


def test_a_loss_that_asks_for_the_rounds_parameters_gets_them_and_cannot_move_them():
    def prox(model, batch, reference):
        with torch.no_grad():
            start = reference["weight"][0, 0].clone()
        assert not reference["weight"].requires_grad
        return pull(model, batch) + (model.weight[0, 0] - start).square()

    def writes(model, batch, reference):
        reference["weight"].add_(100.0)
        return pull(model, batch)

    users, params = np.arange(2), torch.tensor([1.0])
    for trainer in trainers(weight(9.0), prox, numbers([4.0, 4.0], [1.0]), LocalSGD(0.2, epochs=60)):
        # the same with mu = 2: it is the round's parameter 1 that counts, not the initial 9
        assert rows_of(trainer, users, params=params).flatten().tolist() == pytest.approx([1.0, 0.0], abs=1e-6)
    for trainer in trainers(weight(9.0), writes, numbers([4.0, 4.0], [1.0]), LocalSGD(0.5)):
        assert rows_of(trainer, users, params=params).flatten().tolist() == pytest.approx([1.5, 0.0])
        assert params.tolist() == [1.0]
    # The anchor of FedProx stays at 1 too: the first step leads to 2.5, the second to 2.5 + (4 - 2.5 - (2.5 - 1)) / 2.
    for trainer in trainers(weight(9.0), writes, numbers([4.0], [1.0]), LocalSGD(0.5, epochs=2, proximal=1.0)):
        assert rows_of(trainer, users, params=params).flatten().tolist() == pytest.approx([1.5, 0.0])


@pytest.mark.parametrize("local", [LocalSGD(0.1, momentum=0.9, proximal=0.5), LocalAdam(0.1, clip_norm=1.0)])
def test_of_rows_that_a_user_touches_the_rest_need_not_be_trained(local):
    class Tags(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Embedding(40, 3)

        def forward(self, words):
            return self.rows(words).mean(dim=1)

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["words"]), batch["y"], reduction="none")

    rng = np.random.default_rng(0)
    fields = {"words": rng.integers(0, 40, (30, 4)), "y": rng.integers(0, 3, 30)}
    population = Population(np.array([0, 9, 9, 23, 24, 30]), fields)
    local = type(local)(**{**vars(local), "batch_size": 4, "epochs": 2})
    dense = one_by_one(Tags().double(), loss, population, local, Streams(0))
    sparse = one_by_one(
        copy.deepcopy(dense.problem.model._original), loss, population, local, Streams(0),
        row_fields={"rows.weight": "words"},
    )  # fmt: skip
    expected = rows_of(dense, USERS)
    for trainer in (sparse, Stacked(sparse, 5)):
        torch.testing.assert_close(rows_of(trainer, USERS), expected, rtol=1e-9, atol=1e-12)
    decaying = LocalSGD(0.1, weight_decay=0.1)
    with pytest.raises(ModuleError, match=r"weight_decay=0.1 must be 0 where row_fields .* shrinks all rows"):
        one_by_one(Tags(), loss, population, decaying, Streams(0), row_fields={"rows.weight": "words"})


@pytest.mark.parametrize("local", [LocalSGD(0.1, momentum=0.9, weight_decay=0.1), LocalAdam(0.1, weight_decay=0.1)])
def test_who_has_no_step_keeps_parameters_and_state(local):
    optimiser, bad = LocalOptimiser(local), float("nan")
    params = [torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 4.0])]
    state = optimiser.init(params)
    working, rates = torch.tensor([True, False]), torch.tensor([0.1, bad])
    optimiser.step(params, [torch.tensor([[1.0], [bad]]), None], state, [], rates, working)
    assert params[0][0, 0] < 1.0
    assert (params[0][1, 0], params[1].tolist()) == (2.0, [3.0, 4.0])  # None: the loss does not use it
    each = len(state) // 2
    assert all(piece[0].abs().sum() > 0 and piece[1].sum() == 0 for piece in state[:each])
    assert all(not piece.any() for piece in state[each:])


def stacked_step(local, rate=0.1):
    """A step of two users, of whom the second has no examples left, and its arguments."""
    step = StackStep(WorkingModel(weight(1.0)), pull, local)
    step.per_example = True
    whole = step.complete({"w": torch.ones(1, 1, 1)}).values()
    stack = [piece.expand(2, *piece.shape[1:]).clone() for piece in whole]
    kept, keys = torch.tensor([[True] * 3, [False] * 3]), torch.zeros(2, 0, 2, dtype=torch.int32)
    return step, (stack, keys, {"x": torch.full((2, 3), 5.0)}, kept, torch.full((2,), rate))


def test_a_rate_of_the_round_is_no_part_of_a_compiled_program_and_the_optimiser_is():
    def program(local, rate):
        step, arguments = stacked_step(local, rate)
        return fingerprint(traced(step, arguments), arguments)

    momentum = LocalSGD(0.1, momentum=0.9)
    assert program(momentum, 0.1) == program(LocalSGD(0.3, momentum=0.9), 0.3)
    others = [LocalSGD(0.1, momentum=0.8), LocalAdam(0.1), LocalAdam(0.1, eps=1e-5)]
    assert len({program(local, 0.1) for local in (momentum, *others)}) == 4


def test_a_traced_step_moves_parameters_and_state_as_the_eager_one_does():
    local = LocalAdam(0.1, weight_decay=0.1, clip_norm=1.0, proximal=0.1)
    (step, eager), (_, recorded) = stacked_step(local), stacked_step(local)
    program = traced(step, recorded)
    for _ in range(3):
        step(*eager)
        program(*recorded)
    for ours, theirs in zip(eager[0], recorded[0], strict=True):
        torch.testing.assert_close(ours, theirs)
    assert eager[0][0].flatten()[1] == 1.0
    assert eager[0][0].flatten()[0] > 1.2


def test_every_run_and_round_trains_at_its_own_rate():
    plain, _ = trainers(weight(0.0), pull, numbers([1.0], [2.0]), LocalSGD(0.1, lr_schedule="step:1:0.5"))
    plain.problem.runs = [*plain.problem.runs, LocalRun(Streams(0), 0.4)]
    stacked, params = Stacked(plain, 4), torch.zeros(1)
    requests = [request(params, [0, 1], 2), request(params, [0], 2, run=1)]
    for trainer in (plain, stacked):
        found = sorted(
            (int(owner), round(float(row), 6))
            for updates, owners in trainer.train(requests)
            for row, owner in zip(updates.dense(1)[:, 0], owners, strict=True)
        )
        assert found == [(0, 0.025), (0, 0.05), (1, 0.4)]  # 0.1 halved twice, times 1 and 2; 0.4 times 1
