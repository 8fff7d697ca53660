"""A stack of users is what each user does alone, whoever else is in the block."""

import functools

import numpy as np
import pytest
import torch
from samples import cross_entropies, cross_entropy, one_by_one, population_of, request, rows_of
from tagged_posts import Tags, posts
from tagged_posts import loss as tag_loss
from torch import nn

from clipline import LocalSGD, Population
from clipline.engine.core.problem import LocalRun
from clipline.engine.gpu.recorded_step import RecordedBlocks
from clipline.engine.stacked import trainer as stacked
from clipline.engine.stacked.trainer import Stacked
from clipline.errors import ModuleError
from clipline.random.streams import Streams

SIZES = [5, 0, 1, 23, 8, 12, 16, 3, 0, 11]
USERS = np.arange(len(SIZES))
LOCAL = LocalSGD(0.3, batch_size=4, epochs=2)


def network(dropout=0.4):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.GroupNorm(2, 8), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def plain(model=None, loss=cross_entropies, local=LOCAL, population=None, seed=0):
    return one_by_one(model or network(), loss, population or population_of(SIZES), local, Streams(seed))


def stack(engine=None, block_size=None):
    return Stacked(engine or plain(), 10, block_size=block_size)


def assert_same(one, other):
    assert other.abs().max() > 1e-3  # the comparison is not of zeros
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [cross_entropies, cross_entropy])
@pytest.mark.parametrize("block_size", [1, 3, 4, 64])
def test_a_stack_equals_one_by_one_whatever_the_block(loss, block_size, reduction):
    engine = plain(loss=loss, local=LocalSGD(0.3, 4, 2, reduction=reduction))
    expected = rows_of(engine, USERS, 3)
    assert_same(rows_of(stack(engine, block_size), USERS, 3), expected)
    assert (expected[[1, 8]] == 0).all()  # who has no examples


@pytest.mark.parametrize("loss", [cross_entropies, cross_entropy])
@pytest.mark.parametrize("local", [LocalSGD(0.3, 1, 1, 7), LocalSGD(0.3, 100, 3), LocalSGD(0.3, 5, 2, 9)])
def test_a_stack_equals_one_by_one_for_caps_and_batches_of_any_size(loss, local):
    engine = plain(loss=loss, local=local)
    assert_same(rows_of(stack(engine), USERS), rows_of(engine, USERS))


def test_neither_the_callers_model_nor_the_global_generator_is_touched():
    model = network()
    before, state = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    rows_of(stack(plain(model)), USERS)
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_blocks_share_the_users_evenly_and_come_with_most_work_first():
    engine = stack(block_size=4)
    asked = request(engine.problem.model.initial, USERS)
    blocks = list(engine.train([asked]))
    assert [len(updates) for updates, _ in blocks] == [4, 3, 3]  # at most 4 of 10 each
    assert [owners.tolist() for _, owners in blocks] == [[0] * 4, [0] * 3, [0] * 3]
    updates, _ = next(engine.train([asked]))
    expected = rows_of(plain(), np.array([3, 6, 5, 9]))
    assert_same(updates.dense(engine.problem.model.dim), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
@pytest.mark.parametrize("loss", [cross_entropies, cross_entropy])
def test_a_user_with_broken_data_breaks_nobody_elses_update(loss, bad):
    population = population_of(SIZES)
    expected = rows_of(stack(plain(loss=loss)), USERS)
    fields = {name: field.copy() for name, field in population.fields.items()}
    start = int(population.offsets[5])
    fields["x"][start : start + SIZES[5]] = bad
    spoilt = Population(population.offsets, fields, column_options={"missing": "zero-update"})
    broken = rows_of(stack(plain(loss=loss, population=spoilt)), USERS)
    others = USERS != 5
    assert torch.equal(broken[others], expected[others])
    assert not torch.equal(broken[5], expected[5])
    assert broken[5].isnan().any() == (not np.isfinite(bad))


def several_requests(problem):
    """Requests of three runs with users, round, seed, rate and parameters of their own; some users are in two."""
    torch.manual_seed(1)
    asked, problem.runs = [], []
    for run, (users, t, seed, lr) in enumerate(
        (([3, 5, 0, 1], 2, 7, 0.3), ([3, 4, 9, 6, 7], 0, 0, 0.05), ([2, 3], 2, 8, 0.9))
    ):
        problem.runs.append(LocalRun(Streams(seed), lr))
        params = problem.model.initial + 0.1 * torch.randn_like(problem.model.initial)
        asked.append(request(params, users, t, run=run))
    return asked


def by_request(engine, asked):
    """The rows of every request, users with most work first."""
    blocks = [(updates.dense(engine.problem.model.dim).clone(), owners) for updates, owners in engine.train(asked)]
    rows, owners = torch.cat([rows for rows, _ in blocks]), np.concatenate([owners for _, owners in blocks])
    return [rows[torch.from_numpy(owners == place)] for place in range(len(asked))], [len(rows) for rows, _ in blocks]


def test_users_of_several_runs_train_side_by_side_as_each_run_alone():
    engine = stack(block_size=5)
    asked = several_requests(engine.problem)
    together, sizes = by_request(engine, asked)
    assert sizes == [4, 4, 3]
    for rows, one, run in zip(together, asked, engine.problem.runs, strict=True):
        users = one.cohort.users
        alone = plain(local=LocalSGD(run.lr, 4, 2), seed=run.streams.seed)
        expected = rows_of(alone, users, one.round_index, one.params)
        assert_same(rows, expected[np.argsort(-np.array(SIZES)[users], kind="stable").copy()])


def test_an_empty_cohort_and_users_without_examples():
    engine = stack()
    assert rows_of(engine, np.zeros(0, np.int64)).shape == (0, engine.problem.model.dim)
    assert rows_of(engine, np.array([1, 8])).abs().max() == 0
    empty = Population(np.zeros(4, np.int64), {"x": np.zeros((0, 6)), "y": np.zeros(0, np.int64)})
    assert not rows_of(stack(plain(population=empty)), np.arange(3)).any()


def test_shared_frozen_and_reused_parts_of_a_model():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            self.second.weight = self.first.weight
            self.out.bias.requires_grad_(False)
            self.register_buffer("scale", torch.tensor(0.5))
            self.drop = nn.Dropout(0.3)

        def forward(self, x):
            return self.out(self.drop(self.second(torch.tanh(self.scale * self.first(x)))))

    torch.manual_seed(0)
    engine = plain(Parts().double())
    assert engine.problem.model.dim == 36 + 6 + 6 + 18
    assert_same(rows_of(stack(engine), USERS), rows_of(engine, USERS))


def test_a_user_with_very_many_examples_does_not_multiply_by_all_others(monkeypatch):
    sizes = [3, 2, 400, 5, 1, 4, 60, 2]
    engine = one_by_one(nn.Linear(6, 3).double(), cross_entropies, population_of(sizes), LocalSGD(0.1, 4), Streams(0))
    ours, gathered = Stacked(engine, 8), []
    assert engine.problem.examples.bytes_each == 6 * 8 + 8
    monkeypatch.setattr(stacked, "_GATHERED", 56 * 130)  # examples of two users with 60, not of one with 400
    gather = engine.problem.examples.gather
    monkeypatch.setattr(engine.problem.examples, "gather", lambda rows: gathered.append(rows.shape) or gather(rows))
    rows = rows_of(ours, np.arange(8))
    assert [(users, steps * width) for steps, users, width in gathered] == [(1, 400), (2, 60), (5, 4)]
    assert_same(rows, rows_of(engine, np.arange(8)))


def test_a_buffer_that_moves_for_some_users_is_refused_in_a_stack_too():
    class Alarm(nn.Linear):
        """Remembers whether anybody had five examples; nobody in the trial has."""

        def __init__(self):
            super().__init__(6, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            if len(x) == 5:
                self.seen = torch.maximum(self.seen, (x.detach().amax() > 1).to(self.seen.dtype))
            return super().forward(x)

    engine = one_by_one(Alarm().double(), cross_entropies, population_of([10, 5, 5]), LocalSGD(0.1, 9), Streams(0))
    with pytest.raises(ModuleError, match="buffer 'seen'"):
        rows_of(Stacked(engine, 2, block_size=2), np.array([0, 2]))
    assert not torch._C._functorch.is_functorch_wrapped_tensor(engine.problem.model.module.seen)
    assert float(engine.problem.model.module.seen) == 0.0


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)), Spare()],
    ids=["batch statistics", "unused layer"],
)
def test_batch_statistics_leave_the_filling_out_and_what_the_loss_does_not_use_stays(model):
    engine = plain(model.double(), local=LocalSGD(0.3, batch_size=4), population=population_of([6, 3, 7]))
    assert_same(rows_of(Stacked(engine, 3), np.arange(3)), rows_of(engine, np.arange(3)))


class Careless(nn.Sequential):
    def __init__(self):
        super().__init__(*network())
        self.busy = False


def careless(model, batch):
    """Leaves a mark if it fails on the way, and writes into its batch and the keys of its dropout."""
    model.busy = True
    with torch.no_grad():
        batch["x"].mul_(0.99)
    losses = cross_entropies(model, batch)
    model[2].key.add_(1)
    model.busy = False
    return losses


def test_where_a_user_fails_on_the_way_the_others_train_as_if_nobody_had():
    population = population_of(SIZES)
    population.fields["y"][population.offsets[3]] = 99
    engine = plain(Careless(), careless, population=population)
    ours, expected = rows_of(stack(engine), USERS), rows_of(engine, USERS)
    others = USERS != 3
    assert not ours[3].isfinite().all()
    assert not expected[3].isfinite().all()
    assert_same(ours[others], expected[others])


def test_what_a_step_leaves_in_a_cache_users_of_other_batches_do_not_find():
    @functools.lru_cache
    def factor():
        return torch.ones((), dtype=torch.float64)

    def loss(model, batch):
        return cross_entropy(model, batch) * factor().mul_(0.9)

    engine = stack(plain(loss=loss))
    together = rows_of(engine, USERS)
    for user in (2, 7):
        assert_same(together[user], rows_of(engine, np.array([user]))[0])


def of_rows(people, local):
    model = Tags().double()
    return one_by_one(model, tag_loss, people, local, Streams(0), row_fields={"tags.weight": "words"})


def blocks_of(stack, users):
    whole = request(stack.problem.model.initial, np.array(users))
    return stack._prepare([whole], *stack._sorted_by_work([whole]))


def rooms_of(blocks):
    return [block.rows["tags.weight"].rows.shape[1] for block in blocks]


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_users_with_few_and_with_many_rows_train_as_alone_in_blocks_by_the_number_of_rows(monkeypatch, as_on_a_gpu):
    monkeypatch.setattr(stacked, "MIN_ROOM", 2)  # so that these users need 2, 8 or all 12 rows
    people = posts()
    plain, users = of_rows(people, LocalSGD(0.3, 4, 2)), np.arange(len(people))
    stack = Stacked(plain, 5, block_size=5)
    if as_on_a_gpu:  # in static buffers, steps as written
        stack._recorded = RecordedBlocks(stack._step, users=5, steps=12, width=4, compiled=False)
    stack._next_block = lambda users: 5  # one block of all, as on a GPU
    blocks = blocks_of(stack, users)
    assert rooms_of(blocks) == sorted(set(rooms_of(blocks)), reverse=True)
    assert len(blocks) > 1
    assert sorted(user for block in blocks for user in block.users.tolist()) == users.tolist()
    assert_same(rows_of(stack, users), rows_of(plain, users))


def test_users_without_examples_make_no_group_of_their_own_and_nobody_elses_rows_larger(monkeypatch):
    monkeypatch.setattr(stacked, "MIN_ROOM", 1)
    sizes = [10, 0, 0, 1, 0, 1]
    words = np.zeros((12, 6), np.int64)
    words[:10] = np.arange(10)[:, None]  # of user 0, ten rows
    words[10] = 3  # of user 3, one row
    words[11] = np.arange(6)  # of user 5, six rows: with these user 4, who has no example, is padded
    fields = {"words": words, "weights": np.ones((12, 6)), "y": words[:, 0] % 5}
    plain = of_rows(Population(np.concatenate([[0], np.cumsum(sizes)]), fields), LocalSGD(0.3, 4))
    stack = Stacked(plain, 4, block_size=4)
    assert [block.users.tolist() for block in blocks_of(stack, [0, 1, 2, 3])] == [[0], [3, 1, 2]]
    for users in ([3], [3, 1], [3, 4]):  # the model sees how many rows there are: whoever else comes, user 3 has one
        assert rooms_of(blocks_of(stack, users)) == [1]
    assert len(blocks_of(stack, [1, 4])) == 1
    assert (rows_of(stack, np.array([1, 4])) == 0).all()
    assert_same(rows_of(stack, np.array([3, 4])), rows_of(plain, np.array([3, 4])))
    for users in ([3, 4], [0, 3, 4]):  # as on a GPU, where who has no step runs along: their rows exist
        for block in blocks_of(stack, users):
            assert int(block.examples["words"].max()) < block.rows["tags.weight"].rows.shape[1]
            assert (block.examples["words"][(block.counts == 0).all(dim=1)] == 0).all()
