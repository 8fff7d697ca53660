"""Changes that are noted as terms: the same as changes that are made, in C and in torch's operations."""

import gc
import weakref

import numpy as np
import pytest
import torch
from samples import one_by_one, request, rows_of
from tagged_posts import HEIGHT, SIZES, TAGS, Tags, loss, posts

from clipline import LocalSGD
from clipline.engine.batches import plan_steps
from clipline.engine.sparse import native
from clipline.engine.sparse.outer_products import SparseOuterProducts, moved
from clipline.engine.sparse.recorded_weight import StepRecord, bag
from clipline.engine.sparse.updates import OuterProductUpdates
from clipline.engine.updates import Updates
from clipline.federated.clipping import clip_factors
from clipline.streams import Streams

USERS = np.arange(len(SIZES))
WAYS = ["C", "torch"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Both ways to do it; the first is there only where there is a compiler."""
    native.compiled.cache_clear()
    if request.param == "torch":
        monkeypatch.setenv("CLIPLINE_NATIVE", "0")
    elif native.compiled(torch.float64) is None:
        pytest.skip("needs a C compiler")
    yield request.param
    native.compiled.cache_clear()


def engine(use="once", dtype=torch.float64, epochs=3, noted=True, batch_size=4):
    torch.manual_seed(0)
    local = LocalSGD(0.5, batch_size=batch_size, epochs=epochs, reduction="sum")
    rows = {"tags.weight": "words"}
    made = one_by_one(Tags(use).to(dtype), loss, posts(), local, Streams(0), row_fields=rows)
    if not noted:
        made.recorded = frozenset()
    return made


def in_numpy(made):
    """(users, HEIGHT * TAGS + TAGS): updates of weight and bias by dense rows, softmax and its gradient by hand."""
    fields = made.problem.examples.population.fields
    steps = plan_steps(
        posts(), USERS, made.problem.local, lambda purpose: made.problem.runs[0].streams.user_keys(purpose, 0, USERS)
    )
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
                weight - made.problem.local.lr * x.T @ error,
                bias - made.problem.local.lr * error.sum(axis=0),
            )
        updates.append(np.concatenate([(weight - first).ravel(), bias - first_bias]))
    return torch.from_numpy(np.array(updates))


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_noted_changes_are_those_of_dense_rows_in_plain_numpy(way, dtype, tolerance, epochs):
    made = engine(dtype=dtype, epochs=epochs)
    names = list(made.problem.model.named_shapes)
    assert names[1:] == ["tags.weight", "tags.bias"]  # after the scale, which is not used
    updates = rows_of(made, USERS).double()
    torch.testing.assert_close(updates[:, 1:], in_numpy(made), rtol=tolerance, atol=tolerance)
    assert (updates.norm(dim=1) > 0.1).tolist() == [True, False, True, True, True]
    assert made.recorded == {"tags.weight"}


@pytest.mark.parametrize("use", ["once", "twice", "without gradient"])
def test_a_weight_that_is_used_in_products_alone_is_noted_and_gives_what_moving_it_gives(way, use):
    made = engine(use)
    torch.testing.assert_close(rows_of(made, USERS), rows_of(engine(use, noted=False), USERS), rtol=1e-12, atol=1e-12)
    assert made.recorded == {"tags.weight"}


@pytest.mark.parametrize("use", ["looked up", "detached", "among others", "learned values", "drawn"])
def test_a_weight_that_is_used_otherwise_too_is_moved_and_the_user_begins_again(way, use):
    made = engine(use)
    torch.testing.assert_close(rows_of(made, USERS), rows_of(engine(use, noted=False), USERS), rtol=1e-12, atol=1e-12)
    assert made.recorded == set()


def test_several_steps_with_small_batches_are_added_up_now_and_then(way):
    made = engine(epochs=20, batch_size=2)  # 10 words and more for each row of the weight
    torch.testing.assert_close(rows_of(made, USERS), rows_of(engine(epochs=20, batch_size=2, noted=False), USERS),
                               rtol=1e-9, atol=1e-9)  # fmt: skip


@pytest.mark.parametrize(("users", "sizes"), [(1, [1]), (16, [16]), (17, [9, 8]), (50, [13, 13, 12, 12])])
def test_blocks_of_noted_users_are_of_equal_size(users, sizes):
    made = engine()
    asked = request(made.problem.model.initial, np.resize(USERS, users))
    assert [len(updates) for updates, _ in made.train([asked])] == sizes


def test_bfloat16_products_are_not_noted():
    rows, local = {"tags.weight": "words"}, LocalSGD(0.5, batch_size=4)
    made = one_by_one(Tags(), loss, posts(), local, Streams(0), precision="bf16", row_fields=rows)
    assert made.recorded == set()


def test_norms_and_sums_of_terms_are_those_of_the_rows_they_stand_for(way):
    made = engine()
    ((updates, _),) = made.train([request(made.problem.model.initial, USERS)])
    dense = updates.dense(made.problem.model.dim)
    torch.testing.assert_close(updates.norms(), dense.norm(dim=1), rtol=1e-14, atol=0)
    scale = torch.tensor([0.5, 1.0, 0.0, 2.0, 0.25], dtype=torch.float64)
    total = torch.arange(made.problem.model.dim, dtype=torch.float64)
    updates.add_to(total.unsqueeze(0), scale)
    torch.testing.assert_close(total, torch.arange(made.problem.model.dim) + scale @ dense, rtol=1e-14, atol=1e-14)
    chosen = torch.tensor([False, True, True, False, True])
    assert torch.equal(updates.of_users(chosen).dense(made.problem.model.dim), dense[chosen])


@pytest.mark.parametrize("width", [1, 63, 64, 65, 127, 128, 129, 500])  # around what C adds up in registers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_any_width_are_those_of_the_rows_that_have_moved(way, dtype, width):
    rng = torch.Generator().manual_seed(0)
    weight, table = torch.randn(HEIGHT, width, generator=rng), torch.randn(6, width, generator=rng)
    numbers, sources = torch.randint(HEIGHT, (30,), generator=rng), torch.randint(6, (30,), generator=rng)
    change = SparseOuterProducts(numbers, sources, torch.randn(30, generator=rng).to(dtype), table.to(dtype))
    features, values = torch.randint(HEIGHT, (50, 9), generator=rng), torch.randn(50, 9, generator=rng).to(dtype)
    values[:, 7:], values[3] = 0, 0  # padding, and an example of padding alone
    by_hand = weight.double().index_add(0, numbers, change.factors.double().unsqueeze(1) * table[sources].double())
    product, terms = moved(weight.to(dtype), [change]).product(features, values)
    expected = torch.stack([value @ by_hand[feature] for feature, value in zip(features, values.double(), strict=True)])
    close = 1e-4 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(product, expected.to(dtype), rtol=close, atol=close)
    assert torch.equal(terms.numbers, features[values != 0])


def wide_updates(value=1.0, dtype=torch.float32, width=1100):
    """Three users whose rows are longer than what C forms at a time; the second touches one row, the third none."""
    rng = torch.Generator().manual_seed(0)

    def user(terms):
        numbers, sources = torch.randint(HEIGHT, (terms,), generator=rng), torch.randint(7, (terms,), generator=rng)
        factors, table = torch.randn(terms, generator=rng), value * torch.randn(7, width, generator=rng)
        return SparseOuterProducts(numbers, sources, factors.to(dtype), table.to(dtype))

    users = [[user(40), user(3)], [user(1)], [SparseOuterProducts.none(torch.empty(HEIGHT, width, dtype=dtype))]]
    return Updates([OuterProductUpdates(0, HEIGHT, users)]), HEIGHT * width


@pytest.mark.parametrize("value", [1e-20, 1.0, 1e18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_clipped_sum_of_terms_is_longer_than_the_clip_nor_much_shorter(way, dtype, value):
    updates, dim = wide_updates(value, dtype)
    norms = updates.norms()
    exact = torch.stack([row.double().div(value).square().sort().values.sum().sqrt() for row in updates.dense(dim)])
    torch.testing.assert_close(norms, exact * value, rtol=1e-14, atol=0)
    for user in (0, 1):
        scale, within = clip_factors(norms, 0.3 * float(norms[user]))
        assert not within[user]
        total = torch.zeros(dim, dtype=torch.float64)
        updates.add_to(total.unsqueeze(0), torch.where(torch.arange(3) == user, scale, 0.0))
        clipped = float((total / value).square().sort().values.sum().sqrt()) * value
        assert 0.3 * float(norms[user]) * (1 - 1.1e-12) <= clipped <= 0.3 * float(norms[user])


def test_the_norm_of_very_many_rows_is_far_closer_than_the_margin_of_the_clip(way):
    rows = torch.arange(300_000)
    terms = SparseOuterProducts(rows, torch.zeros_like(rows), torch.ones(len(rows)), torch.tensor([[0.1]]))
    exact = float(torch.tensor(0.1)) * len(rows) ** 0.5
    norm = float(Updates([OuterProductUpdates(0, len(rows), [[terms]])]).norms()[0])
    assert norm == pytest.approx(exact, rel=1e-14)  # one after the other the squares would be off by 1e-12


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_terms_that_are_not_finite_make_the_norm_so_and_take_no_part(way, dtype, bad):
    updates, dim = wide_updates(dtype=dtype)
    updates.pieces[0].users[1][0].table[:, 3] = bad
    norms = updates.norms()
    assert norms.isfinite().tolist() == [True, False, True]
    total, expected = torch.zeros(2, dim, dtype=torch.float64)
    updates.add_to(total.unsqueeze(0), clip_factors(norms, 1e9)[0])
    updates.of_users(torch.tensor([True, False, True])).add_to(
        expected.unsqueeze(0), torch.ones(2, dtype=torch.float64)
    )
    assert torch.equal(total, expected)


def test_a_layer_may_call_bag_by_itself_and_padding_may_have_any_number():
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    features, values = torch.tensor([[1, 1, 9], [3, 0, 0]]), torch.tensor([[0.5, 2.0, 0.0], [1.0, 0.0, 0.0]]).double()
    expected = torch.stack([2.5 * weight[1], weight[3]])
    assert torch.equal(bag(features, weight, values), expected)
    with torch.no_grad():
        torch.testing.assert_close(bag(features, StepRecord(weight, 1.0).noted(), values), expected)


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


def test_without_a_compiler_there_is_no_library(monkeypatch):
    native.compiled.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert native.compiled(torch.float32) is None
    native.compiled.cache_clear()
    monkeypatch.setenv("CC", "false")  # a compiler that fails
    assert native.compiled(torch.float32) is None
    native.compiled.cache_clear()
