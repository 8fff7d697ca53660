from unittest.mock import Mock

import numpy as np
import pytest
import torch
from samples import cross_entropy, linear_model, one_by_one, population_of, request, small_population
from torch import nn

from clipline import LocalSGD, Population, SettingError
from clipline.errors import ModuleError
from clipline.random.streams import Streams

STREAMS = Streams(0)


def clients(population, model=None, loss=cross_entropy, local=None, streams=STREAMS):
    return one_by_one(model or linear_model(), loss, population, local or LocalSGD(0.1, batch_size=8), streams)


def mean_model():
    """One parameter; the loss 1/2 (w - x)^2 moves it towards the data."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def pull(model, batch):
    return 0.5 * (model.weight[0, 0] - batch["x"]).square().mean()


def update_of(engine, user, params=None, round_index=0):
    """(dim,): one user's update, from the initial parameters unless told otherwise."""
    params = engine.problem.model.initial if params is None else params
    return engine.block(params, np.array([user]), round_index).dense(engine.problem.model.dim)[0]


def seen_by(population, local, user, round_index=0):
    """The values of x in each batch that a user trains on: what the loss receives."""
    record = Mock()  # of a library: the engine does not look into it, and puts nothing back

    def recording(model, batch):
        record(batch["x"].tolist())
        return pull(model, batch)

    engine = clients(population, mean_model(), recording, local)
    record.reset_mock()  # made-up examples
    update_of(engine, user, round_index=round_index)
    return [call.args[0] for call in record.call_args_list]


def first_with_examples(engine):
    return int(np.flatnonzero(np.diff(engine.problem.examples.population.offsets))[0])


def test_local_sgd_by_hand():
    # one example a batch, x = 4: w = 0 -> 0.5 * 4 = 2 -> 2 + 0.5 * (4 - 2) = 3
    population = Population.from_arrays([0, 0], x=[4.0, 4.0])
    engine = clients(population, mean_model(), pull, LocalSGD(0.5, batch_size=1))
    assert update_of(engine, 0).tolist() == [3.0]
    two_epochs = clients(population, mean_model(), pull, LocalSGD(0.5, batch_size=1, epochs=2))
    assert update_of(two_epochs, 0).tolist() == [3.75]


def test_the_last_batch_is_as_small_as_it_comes_and_every_example_is_seen_once_an_epoch():
    population = Population.from_arrays([0] * 23, x=np.arange(23.0))
    batches = seen_by(population, LocalSGD(0.1, batch_size=10, epochs=2), 0)
    assert [len(batch) for batch in batches] == [10, 10, 3, 10, 10, 3]
    for epoch in (batches[:3], batches[3:]):
        assert sorted(x for batch in epoch for x in batch) == list(range(23))


def test_the_order_is_drawn_anew_at_every_visit_every_epoch_and_for_every_user():
    population = Population.from_arrays([0] * 30 + [1] * 30, x=np.tile(np.arange(30.0), 2))
    local = LocalSGD(0.1, batch_size=30, epochs=2)
    orders = [tuple(batch) for user in (0, 1) for t in (0, 1) for batch in seen_by(population, local, user, t)]
    assert len(set(orders)) == 8
    assert orders[:2] == [tuple(batch) for batch in seen_by(population, local, 0, 0)]  # and the same when asked again


def test_a_cap_keeps_the_first_examples():
    population = Population.from_arrays([0] * 50, x=np.arange(50.0))
    local = LocalSGD(0.1, batch_size=20, max_examples=12)
    assert sorted(x for batch in seen_by(population, local, 0) for x in batch) == list(range(12))


def test_blocks_do_not_change_updates_and_the_callers_generator_is_left_alone():
    population = small_population(150)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    engine = clients(population, model)
    params = engine.problem.model.vector.clone()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    blocks = [updates for updates, _ in engine.train([request(params, np.arange(150), 3)])]
    assert torch.equal(torch.get_rng_state(), before)
    assert [len(block) for block in blocks] == [64, 64, 22]
    alone = update_of(engine, 100, params, 3)  # dropout too is the user's own
    assert torch.equal(torch.cat([block.dense(engine.problem.model.dim) for block in blocks])[100], alone)


def test_frozen_parameters_stay_and_sparse_gradients_work():
    model = nn.ModuleDict({"embed": nn.Embedding(10, 4, sparse=True), "out": nn.Linear(4, 2)})
    model["out"].bias.requires_grad_(False)
    population = Population.from_arrays([0, 0], x=[3, 3], y=[0, 1])

    def loss(model, batch):
        return nn.functional.cross_entropy(model["out"](model["embed"](batch["x"])), batch["y"])

    engine = clients(population, model, loss)
    update = update_of(engine, 0)
    rows = update[:40].reshape(10, 4).abs().sum(dim=1).nonzero().flatten().tolist()
    assert (engine.problem.model.dim, rows) == (48, [3])


def test_a_loss_that_clears_gradients_trains_all_the_same():
    def loss(model, batch):
        model.zero_grad()
        return cross_entropy(model, batch)

    engine = clients(small_population(), loss=loss)
    user = first_with_examples(engine)
    assert update_of(engine, user).abs().max() > 0
    assert torch.equal(update_of(engine, user), update_of(clients(small_population()), user))


def test_a_type_that_torch_refuses_is_explained():
    population = Population.from_arrays([0, 0], x=np.ones((2, 6), int), y=[0, 1])
    with pytest.raises(ModuleError, match=r"a batch holds x int64, y int64: convert in the loss, .* with \.float\(\)"):
        clients(population, linear_model(dtype=torch.float32))


def test_models_and_losses_that_cannot_train_are_refused():
    with pytest.raises(ModuleError, match="must share one type"):
        clients(small_population(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))
    whole = Population.from_arrays([0, 0], x=[[1.0] * 6, [2.0] * 6], y=[0, 1])
    for loss, words in (
        (lambda m, b: m(b["x"]), r"loss returned a tensor of shape \(8, 3\) but must return a tensor of one number"),
        (lambda m, b: 3.0, "loss returned float but must return a tensor of one number"),
        (lambda m, b: torch.tensor(1.0), "does not depend on the model's trainable parameters"),
    ):
        with pytest.raises(ModuleError, match=words):
            clients(whole, loss=loss)


def test_local_settings_check_themselves():
    for settings, words in (
        ({"lr": -1.0}, "client_lr=-1.0"), ({"lr": 0.1, "batch_size": 0}, "batch_size=0"),
        ({"lr": 0.1, "epochs": 0}, "client_epochs=0"), ({"lr": 0.1, "max_examples": -5}, "max_examples=-5"),
    ):  # fmt: skip
        with pytest.raises(SettingError, match=words):
            LocalSGD(**settings)


def test_examples_of_a_user_are_not_held_once_for_every_epoch(monkeypatch):
    engine = clients(population_of([6, 3, 9]), nn.Linear(6, 3).double(), local=LocalSGD(0.01, batch_size=4, epochs=50))
    examples, held, between = engine.problem.examples, [], engine.problem.examples.between
    monkeypatch.setattr(examples, "gather", None)
    monkeypatch.setattr(examples, "between", lambda *rows: held.append(rows[1] - rows[0]) or between(*rows))
    engine.block(engine.problem.model.initial, np.arange(3), 0)
    assert held == [6, 3, 9]
