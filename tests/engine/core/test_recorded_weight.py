"""Steps on a weight that are recorded and not taken: the same as steps that are taken, however the weight is used."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from samples import aggregate, flat_training, one_by_one, opened, request, rows_of
from tagged_posts import HEIGHT, SIZES, TAGS, Tags, loss, posts
from torch import nn
from torch.utils.checkpoint import checkpoint

from clipline import FixedClip, LocalSGD, Population
from clipline.engine.core.batches import plan_steps
from clipline.engine.core.fast_parts import FastParts
from clipline.engine.core.recorded_weight import StepRecord, bag
from clipline.errors import ModuleError
from clipline.random.streams import Streams

USERS = np.arange(len(SIZES))


def engine(use="once", dtype=torch.float64, epochs=3, noted=True, batch_size=4):
    torch.manual_seed(0)
    local = LocalSGD(0.5, batch_size=batch_size, epochs=epochs, reduction="sum")
    rows, fast = {"tags.weight": "words"}, FastParts()
    made = one_by_one(Tags(use).to(dtype), loss, posts(), local, Streams(0), row_fields=rows, fast=fast)
    if not noted:
        made.recorded = frozenset()
    return made


def in_numpy(made):
    """(users, HEIGHT * TAGS + TAGS): updates of weight and bias by dense rows, softmax and its gradient by hand."""
    fields = made.problem.examples.population.fields
    local, streams = made.problem.local, made.problem.runs[0].streams
    steps = plan_steps(posts(), USERS, local, lambda purpose: streams.user_keys(purpose, 0, USERS))
    dense = np.zeros((len(fields["y"]), HEIGHT))
    for row, (words, weights) in enumerate(zip(fields["words"], fields["weights"], strict=True)):
        for word, weight in zip(words, weights, strict=True):
            dense[row, min(word, HEIGHT - 1)] += weight
    model = made.problem.model.export(made.problem.model.initial)
    first, first_bias = model.tags.weight.detach().double().numpy(), model.tags.bias.detach().double().numpy()
    updates = []
    for rows_of_steps, counts in zip(steps.rows, steps.counts, strict=True):
        weight, bias = first.copy(), first_bias.copy()
        for rows, count in zip(rows_of_steps, counts, strict=True):
            x, y = dense[rows[:count]], np.eye(TAGS)[fields["y"][rows[:count]]]
            scores = np.exp(x @ weight + bias)
            error = scores / scores.sum(axis=1, keepdims=True) - y
            weight, bias = (
                weight - local.lr * x.T @ error,
                bias - local.lr * error.sum(axis=0),
            )
        updates.append(np.concatenate([(weight - first).ravel(), bias - first_bias]))
    return torch.from_numpy(np.array(updates))


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_noted_changes_are_those_of_dense_rows_in_plain_numpy(dtype, tolerance, epochs):
    made = engine(dtype=dtype, epochs=epochs)
    names = list(made.problem.model.named_shapes)
    assert names[1:] == ["tags.weight", "tags.bias"]  # after the scale, which is not used
    updates = rows_of(made, USERS).double()
    torch.testing.assert_close(updates[:, 1:], in_numpy(made), rtol=tolerance, atol=tolerance)
    assert (updates.norm(dim=1) > 0.1).tolist() == [True, False, True, True, True]
    assert made.recorded == {"tags.weight"}


@pytest.mark.parametrize("use", ["once", "twice", "without gradient"])
def test_a_weight_that_is_used_in_products_alone_is_noted_and_gives_what_moving_it_gives(use):
    made = engine(use)
    expected = rows_of(engine(use, noted=False), USERS)
    torch.testing.assert_close(rows_of(made, USERS), expected, rtol=1e-12, atol=1e-12)
    assert made.recorded == {"tags.weight"}


@pytest.mark.parametrize("use", ["looked up", "detached", "among others", "learned values", "drawn"])
def test_a_weight_that_is_used_otherwise_too_is_moved_and_the_user_begins_again(use):
    made = engine(use)
    expected = rows_of(engine(use, noted=False), USERS)
    torch.testing.assert_close(rows_of(made, USERS), expected, rtol=1e-12, atol=1e-12)
    assert made.recorded == set()


def test_several_steps_with_small_batches_are_added_up_now_and_then():
    made = engine(epochs=20, batch_size=2)  # 10 words and more for each row of the weight
    expected = rows_of(engine(epochs=20, batch_size=2, noted=False), USERS)
    torch.testing.assert_close(rows_of(made, USERS), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("users", "sizes"), [(1, [1]), (16, [16]), (17, [9, 8]), (50, [13, 13, 12, 12])])
def test_blocks_of_noted_users_are_of_equal_size(users, sizes):
    made = engine()
    asked = request(made.problem.model.initial, np.resize(USERS, users))
    assert [len(updates) for updates, _ in made.train([asked])] == sizes


def test_bfloat16_products_are_not_noted():
    rows, local = {"tags.weight": "words"}, LocalSGD(0.5, batch_size=4)
    made = one_by_one(Tags(), loss, posts(), local, Streams(0), precision="bf16", row_fields=rows)
    assert made.recorded == set()


def test_a_layer_may_call_bag_by_itself_and_padding_may_have_any_number():
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    features, values = torch.tensor([[1, 1, 9], [3, 0, 0]]), torch.tensor([[0.5, 2.0, 0.0], [1.0, 0.0, 0.0]]).double()
    expected = torch.stack([2.5 * weight[1], weight[3]])
    assert torch.equal(bag(features, weight, values), expected)
    with torch.no_grad():
        torch.testing.assert_close(bag(features, StepRecord(weight, 1.0).stand_in(), values), expected)


def test_nothing_of_a_user_outlives_the_update():
    gc.collect()
    gc.disable()
    try:
        made = engine()
        updates = made.block(made.problem.model.initial, USERS, 0)
        tables = [weakref.ref(part.table) for parts in updates.pieces[1].users for part in parts]
        del updates
        assert len(tables) > len(USERS)
        assert all(table() is None for table in tables)
    finally:
        gc.enable()


WORDS, WIDTH, USERS_OF_WORDS = 50, 8, 16


class Bagging(nn.Module):
    """Words to classes, with something else done beside the product."""

    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH, dtype=torch.float64))
        self.use = use

    def forward(self, words, values):
        if self.use == "lookup that shortens rows":
            return F.embedding(words.long(), self.weight, max_norm=1.0).sum(dim=1)
        if self.use == "writes":
            with torch.no_grad():
                self.weight[words.long()] *= 0.9
        if self.use == "by one user" and bool((values > 0.995).any()):
            return bag(words, self.weight, values) + self.weight[words[:, 0].long()]
        if self.use == "copied":
            copy.deepcopy(self)
        if self.use == "checkpoint":
            return checkpoint(lambda: bag(words, self.weight, values).tanh(), use_reentrant=False)
        out = bag(words, self.weight, values)
        if self.use == "in place":
            out += 1.0
            out = torch.relu_(out)
        return out


def word_loss(model, batch):
    return F.cross_entropy(model(batch["words"], batch["values"]), batch["y"], reduction="none")


def words():
    rng = np.random.default_rng(0)
    fields = {
        "words": rng.integers(0, WORDS, (3 * USERS_OF_WORDS, 4)),
        "values": 0.9 * rng.random((3 * USERS_OF_WORDS, 4)),
        "y": rng.integers(0, WIDTH, 3 * USERS_OF_WORDS),
    }
    fields["values"][3 * 8, 0] = 0.999  # of user 8
    return Population(np.arange(0, 3 * USERS_OF_WORDS + 1, 3), fields)


def bagging(use, row_fields):
    return one_by_one(Bagging(use), word_loss, words(), LocalSGD(0.5, 2, 2), Streams(1), row_fields=row_fields)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("use", ["lookup that shortens rows", "writes"])
def test_a_model_that_writes_into_its_weight_does_not_reach_the_model_of_all(use, workers):
    training = flat_training(
        Bagging(use), word_loss, words(), rounds=1, cohort_size=8, local=LocalSGD(0.5, 2), seed=0, noise_multiplier=0.1,
        clip=FixedClip(1e-6), row_fields={"weight": "words"}, workers=workers, sampling="fixed",
    )  # fmt: skip
    first = Bagging(use).weight.detach().flatten()
    assert torch.equal(training.problem.model.initial, first)  # the trials of the engine have not moved it
    after = training.run().state.params
    assert 0 < float((after - first).abs().max()) < 1e-5


@pytest.mark.parametrize("use", ["once", "copied", "checkpoint", "in place", "by one user"])
def test_however_the_weight_is_used_the_updates_are_those_of_dense_rows(use):
    users = np.arange(USERS_OF_WORDS)
    ours, expected = (rows_of(bagging(use, rows), users) for rows in ({"weight": "words"}, {}))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-13)
    assert (ours.norm(dim=1) > 0).all()


def test_nobody_of_a_block_is_lost_where_one_uses_the_weight_otherwise():
    made = bagging("by one user", {"weight": "words"})
    blocks = [updates for updates, _ in made.train([request(made.problem.model.initial, np.arange(USERS_OF_WORDS))])]
    assert sum(map(len, blocks)) == USERS_OF_WORDS
    assert made.recorded == {"weight"}  # for the others nothing is different
    total = opened(aggregate(blocks, 1e9, made.problem.model.dim))
    assert total[-1] == USERS_OF_WORDS / 2  # all within


@pytest.mark.parametrize("values", [(1, 4), (3, 1), (3,)])
def test_features_and_values_of_different_shapes_are_refused_before_memory_is_read(values):
    weight = torch.ones(5, 2, dtype=torch.float64)
    for given in (weight, StepRecord(weight, 0.1).stand_in()):
        with pytest.raises(ModuleError, match="must both be"):
            bag(torch.zeros(3, 4, dtype=torch.int64), given, torch.ones(values, dtype=torch.float64))


def test_many_small_steps_on_a_tall_weight_stay_few_parts():
    record, weight = (
        StepRecord(torch.zeros(1000, 2, dtype=torch.float64), 0.5),
        torch.zeros(1000, 2, dtype=torch.float64),
    )
    for step in range(100):
        features, values = torch.tensor([[step % 7, 3]]), torch.tensor([[1.0, 2.0]], dtype=torch.float64)
        out = bag(features, record.stand_in(), values)
        torch.testing.assert_close(out.detach(), values @ weight[features[0]], rtol=1e-12, atol=1e-12)
        (product,) = record.products()
        gradient = torch.full((1, 2), 0.01 * step, dtype=torch.float64)
        record.step([gradient])
        for feature, value in zip(features[0].tolist(), values[0].tolist(), strict=True):
            weight[feature] -= 0.5 * value * gradient[0]
        assert product.shape == (1, 2)
        assert len(record.terms()) <= 33
