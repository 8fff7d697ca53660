"""Users who touch few rows of a matrix: they train on those alone, and it is as if they had sent all."""

import numpy as np
import pytest
import torch
from samples import aggregate, one_by_one, opened, request, rows_of
from torch import nn

from clipline import LocalSGD, Population
from clipline.engine.core.row_fields import (
    RowUsage,
    TouchedRows,
    build_updates,
    check_row_fields,
    renumber_rows,
    starting_params,
    together,
    touched,
)
from clipline.engine.core.updates import Dense, Rows, Updates
from clipline.engine.core.working_model import WorkingModel
from clipline.engine.stacked.trainer import Stacked
from clipline.errors import ModuleError
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


def test_the_norm_of_rows_is_that_of_the_update_and_no_contribution_is_longer_than_the_clip():
    stack = Stacked(bags(), 4)
    dim = stack.problem.model.dim
    for user in (0, 2, 3):
        asked = request(stack.problem.model.initial, [user])
        ((updates, _),) = stack.train([asked])
        assert float(updates.norms()[0]) == pytest.approx(float(updates.dense(dim).norm()), rel=1e-12)
        total = aggregate((block for block, _ in stack.train([asked])), 0.01, dim)
        assert float(opened(total)[:-1].norm()) <= 0.01


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


def test_the_rows_that_numbers_name_by_hand():
    numbers = torch.tensor([[[7, 2], [2, 99]], [[0, 0], [0, 0]]])  # 99 is beyond the last of 9 rows: the last
    rows, places = touched(numbers, 9)
    assert rows.rows.tolist() == [[2, 7, 8], [0, 0, 0]]
    assert rows.used.tolist() == [[True, True, True], [True, False, False]]
    assert places.tolist() == [[[1, 0], [0, 2]], [[0, 0], [0, 0]]]
    assert torch.equal(rows.rows.gather(1, places.flatten(1)).view_as(numbers), numbers.clamp(max=8))
    examples, found = renumber_rows({"words": numbers, "y": numbers[:, 0]}, {"w": "words"}, {"w": 9})
    assert torch.equal(examples["words"], places)
    assert torch.equal(examples["y"], numbers[:, 0])
    assert torch.equal(found["w"].rows, rows.rows)


@pytest.mark.parametrize(("count", "room"), [(1, 2), (2, 2), (3, 8), (8, 8), (9, 30), (16, 30), (30, 30)])
def test_room_for_rows_depends_on_the_users_own_count_alone(count, room):
    for others in ([], [0], list(range(30))):
        numbers = torch.zeros(1 + bool(others), 30, dtype=torch.int64)
        numbers[0] = torch.arange(30).clamp(max=count - 1)
        if others:
            numbers[1, : len(others)] = torch.tensor(others)
        assert RowUsage(numbers, 30).rooms(2)[0] == room  # 2 times a power of four, at most all 30 rows


def test_rows_that_stand_for_nothing_do_not_move_row_0():
    shapes = {"w": torch.Size([4, 2])}
    rows = {"w": TouchedRows(torch.tensor([[1, 3], [2, 0]]), torch.tensor([[True, True], [True, False]]))}
    params = torch.arange(8.0).unsqueeze(0)
    first = starting_params(params, shapes, rows)
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


def test_updates_of_single_users_as_one_block():
    one = Updates([Dense(0, torch.tensor([[1.0]])), Rows(1, 3, torch.tensor([[2]]), torch.tensor([[[4.0]]]))])
    two = Updates([Dense(0, torch.tensor([[2.0]])), Rows(1, 3, torch.tensor([[0, 1]]), torch.tensor([[[5.0], [6.0]]]))])
    assert together([one]) is one
    assert together([one, two]).dense(4).tolist() == [[1.0, 0.0, 0.0, 4.0], [2.0, 5.0, 6.0, 0.0]]
    with pytest.raises(TypeError, match="different kinds"):
        together([Updates([Dense(0, torch.ones(1, 6))]), Updates([Rows(0, 3, torch.zeros(1, 1), torch.ones(1, 1, 2))])])
