"""Users who touch few rows of a matrix: they train on those alone, and it is as if they had sent all."""

import numpy as np
import pytest
import tagged_posts
import torch
import torch.nn.functional as F
from samples import flat_training, one_by_one, rows_of
from tagged_posts import SIZES, TAGS, Tags
from torch import nn
from torch.utils.checkpoint import checkpoint

from clipline import FixedClip, LocalSGD, Population
from clipline.engine.core.batches import plan_steps
from clipline.engine.core.row_fields import (
    RowUsage,
    TouchedRows,
    build_updates,
    check_row_fields,
    renumber_rows,
    starting_params,
)
from clipline.engine.core.working_model import WorkingModel
from clipline.engine.stacked.trainer import Stacked
from clipline.errors import ModuleError
from clipline.layers import bag
from clipline.random.streams import Streams

HEIGHT = 40


class Bag(nn.Module):
    def __init__(self, penalty=0.0):
        super().__init__()
        self.emb, self.out = nn.Embedding(HEIGHT, 5), nn.Linear(5, 3)
        self.penalty = penalty

    def forward(self, words):
        return self.out(self.emb(words).mean(dim=1)) + self.penalty * self.emb.weight.square().sum()


def posts(sizes=(4, 0, 7, 1)):
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    words = rng.integers(0, HEIGHT, (offsets[-1], 3)).astype(np.int16)
    return Population(offsets, {"words": words, "y": rng.integers(0, 3, offsets[-1])})


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["words"].long()), batch["y"], reduction="none")


def bags(penalty=0.0, dtype=torch.float64, row_fields=None):
    torch.manual_seed(0)
    local, rows = LocalSGD(0.5, batch_size=4), {"emb.weight": "words"} if row_fields is None else row_fields
    return one_by_one(Bag(penalty).to(dtype), loss, posts(), local, Streams(0), row_fields=rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_users_who_touch_few_rows_train_as_if_they_sent_all(dtype):
    users, tolerance = np.arange(4), 1e-12 if dtype == torch.float64 else 1e-5
    expected = rows_of(bags(dtype=dtype, row_fields={}), users)
    sparse = bags(dtype=dtype)
    for clients in (sparse, Stacked(sparse, 4), Stacked(sparse, 4, block_size=2)):
        torch.testing.assert_close(rows_of(clients, users), expected, rtol=tolerance, atol=tolerance)
    assert (expected.norm(dim=1) > 0).tolist() == [True, False, True, True]


def test_a_loss_that_uses_rows_which_no_field_names_is_refused():
    with pytest.raises(ModuleError, match=r"rows of 'emb\.weight' that field 'words' does not name"):
        bags(penalty=0.1)


def test_row_numbers_below_0_are_refused():
    population = posts()
    population.fields["words"][0, 0] = -1
    with pytest.raises(ModuleError, match="holds a number below 0"):
        one_by_one(Bag(), loss, population, LocalSGD(0.1), Streams(0), row_fields={"emb.weight": "words"})


@pytest.mark.parametrize(
    ("row_fields", "words"),
    [
        ({"emb.wieght": "words"}, "names 'emb.wieght', which is no trainable matrix of the model"),
        ({"out.bias": "words"}, "names 'out.bias', which is no trainable matrix"),
        ({"emb.weight": "wrods"}, "names 'wrods', which is no field of whole numbers of the population"),
        ({"emb.weight": "words", "out.weight": "words"}, "names a field twice"),
    ],
)
def test_names_that_are_not_there_are_refused(row_fields, words):
    with pytest.raises(ModuleError, match=words):
        check_row_fields(row_fields, WorkingModel(Bag()), posts())


@pytest.mark.parametrize(("count", "room"), [(1, 2), (2, 2), (3, 8), (8, 8), (9, 30), (16, 30), (30, 30)])
def test_room_for_rows_depends_on_the_users_own_count_alone(count, room):
    for others in ([], [0], list(range(30))):
        numbers = torch.zeros(1 + bool(others), 30, dtype=torch.int64)
        numbers[0] = torch.arange(30).clamp(max=count - 1)
        if others:
            numbers[1, : len(others)] = torch.tensor(others)
        assert RowUsage(numbers, 30).rooms(2)[0] == room  # 2 times a power of four, at most all 30 rows


def test_the_rows_that_numbers_name_by_hand():
    numbers = torch.tensor([[[7, 2], [2, 99]], [[0, 0], [0, 0]]])  # 99 is beyond the last of 9 rows: the last
    rows, places = RowUsage(numbers, 9).touched()
    assert rows.rows.tolist() == [[2, 7, 8], [0, 0, 0]]
    assert rows.used.tolist() == [[True, True, True], [True, False, False]]
    assert places.tolist() == [[[1, 0], [0, 2]], [[0, 0], [0, 0]]]
    assert torch.equal(rows.rows.gather(1, places.flatten(1)).view_as(numbers), numbers.clamp(max=8))
    examples, found = renumber_rows({"words": numbers, "y": numbers[:, 0]}, {"w": "words"}, {"w": 9})
    assert torch.equal(examples["words"], places)
    assert torch.equal(examples["y"], numbers[:, 0])
    assert torch.equal(found["w"].rows, rows.rows)


def test_rows_that_stand_for_nothing_do_not_move_row_0():
    shapes = {"w": torch.Size([4, 2])}
    rows = {"w": TouchedRows(torch.tensor([[1, 3], [2, 0]]), torch.tensor([[True, True], [True, False]]))}
    first = starting_params(torch.arange(8.0).unsqueeze(0), shapes, rows)
    assert first["w"].tolist() == [[[2.0, 3.0], [6.0, 7.0]], [[4.0, 5.0], [0.0, 1.0]]]
    dense = build_updates([first["w"] + 1.0], first, shapes, rows).dense(8)
    assert dense.tolist() == [[0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0], [0.0] * 4 + [1.0, 1.0, 0.0, 0.0]]


def test_users_of_several_runs_start_from_the_parameters_of_their_own():
    shapes = {"w": torch.Size([2, 2]), "b": torch.Size([1])}
    rows = {"w": TouchedRows(torch.tensor([[1], [0], [1]]), torch.ones(3, 1, dtype=torch.bool))}
    params = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0], [10.0, 20.0, 30.0, 40.0, 50.0]])
    first = starting_params(params, shapes, rows, torch.tensor([0, 1, 1]))
    assert first["w"].flatten(1).tolist() == [[3.0, 4.0], [10.0, 20.0], [30.0, 40.0]]
    assert first["b"].flatten().tolist() == [5.0, 50.0, 50.0]


def bag_updates_in_numpy(made):
    """(users, HEIGHT * TAGS + TAGS): updates of weight and bias by dense rows, softmax and its gradient by hand."""
    fields = made.problem.examples.population.fields
    local, streams, users = made.problem.local, made.problem.runs[0].streams, np.arange(len(SIZES))
    steps = plan_steps(tagged_posts.posts(), users, local, lambda purpose: streams.user_keys(purpose, 0, users))
    dense = np.zeros((len(fields["y"]), tagged_posts.HEIGHT))
    for row, (words, weights) in enumerate(zip(fields["words"], fields["weights"], strict=True)):
        for word, weight in zip(words, weights, strict=True):
            dense[row, min(word, tagged_posts.HEIGHT - 1)] += weight
    model = made.problem.model.export(made.problem.model.initial)
    first, first_bias = (one.detach().double().numpy() for one in (model.tags.weight, model.tags.bias))
    updates = []
    for rows_of_steps, counts in zip(steps.rows, steps.counts, strict=True):
        weight, bias = first.copy(), first_bias.copy()
        for rows, count in zip(rows_of_steps, counts, strict=True):
            x, y = dense[rows[:count]], np.eye(TAGS)[fields["y"][rows[:count]]]
            scores = np.exp(x @ weight + bias)
            error = scores / scores.sum(axis=1, keepdims=True) - y
            weight, bias = weight - local.lr * x.T @ error, bias - local.lr * error.sum(axis=0)
        updates.append(np.concatenate([(weight - first).ravel(), bias - first_bias]))
    return torch.from_numpy(np.array(updates))


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_bags_of_words_train_as_dense_rows_do_in_plain_numpy(dtype, tolerance, epochs):
    torch.manual_seed(0)
    local, fields = LocalSGD(0.5, 4, epochs, reduction="sum"), {"tags.weight": "words"}
    model = Tags().to(dtype)
    made = one_by_one(model, tagged_posts.loss, tagged_posts.posts(), local, Streams(0), row_fields=fields)
    updates = rows_of(made, np.arange(len(SIZES))).double()  # of the scale first, which is not used
    torch.testing.assert_close(updates[:, 1:], bag_updates_in_numpy(made), rtol=tolerance, atol=tolerance)
    assert (updates.norm(dim=1) > 0.1).tolist() == [True, False, True, True, True]


def test_a_layer_may_call_bag_by_itself_and_padding_may_have_any_number():
    weight = torch.randn(4, 3, dtype=torch.float64)
    features, values = torch.tensor([[1, 1, 9], [3, 0, 0]]), torch.tensor([[0.5, 2.0, 0.0], [1.0, 0.0, 0.0]]).double()
    assert torch.equal(bag(features, weight, values), torch.stack([2.5 * weight[1], weight[3]]))


@pytest.mark.parametrize("values", [(1, 4), (3, 1), (3,)])
def test_features_and_values_of_different_shapes_are_refused_before_memory_is_read(values):
    with pytest.raises(ModuleError, match="must both be"):
        bag(torch.zeros(3, 4, dtype=torch.int64), torch.ones(5, 2), torch.ones(values))


class Beside(nn.Module):
    """Words to classes through `bag`, with something else done beside the product."""

    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.use = nn.Parameter(torch.randn(HEIGHT, 3, dtype=torch.float64)), use

    def forward(self, words):
        values = torch.linspace(0.5, 1, words.numel(), dtype=torch.float64).view(words.shape)
        if self.use == "lookup that shortens rows":
            return F.embedding(words, self.weight, max_norm=1.0).sum(dim=1)
        if self.use == "writes":
            with torch.no_grad():
                self.weight[words] *= 0.9
        if self.use == "checkpoint":
            return checkpoint(lambda: bag(words, self.weight, values).tanh(), use_reentrant=False)
        out = bag(words, self.weight, values)
        return torch.relu_(out + self.weight[words[:, 0]]) if self.use == "looked up too" else out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("use", ["lookup that shortens rows", "writes"])
def test_a_model_that_writes_into_its_weight_does_not_reach_the_model_of_all(use, workers):
    training = flat_training(
        Beside(use), loss, posts(), rounds=1, cohort_size=4, local=LocalSGD(0.5, 2), seed=0, noise_multiplier=0.1,
        clip=FixedClip(1e-6), row_fields={"weight": "words"}, workers=workers, sampling="fixed", delta=0.1,
    )  # fmt: skip
    first = Beside(use).weight.detach().flatten()
    assert torch.equal(training.problem.model.initial, first)  # the trials of the engine have not moved it
    after = training.run().state.params
    assert 0 < float((after - first).abs().max()) < 1e-5


@pytest.mark.parametrize("use", ["once", "checkpoint", "looked up too"])
def test_however_the_weight_is_used_the_updates_are_those_of_the_whole_weight(use):
    ours, expected = (
        rows_of(one_by_one(Beside(use), loss, posts(), LocalSGD(0.5, 2, 2), Streams(1), row_fields=rows), np.arange(4))
        for rows in ({"weight": "words"}, {})
    )
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-13)
    assert (ours.norm(dim=1) > 0).tolist() == [True, False, True, True]
