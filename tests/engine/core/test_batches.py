import numpy as np
import pytest
import torch

from clipline import LocalSGD, Population
from clipline.engine.core.batches import Examples, padded_width, plan_steps
from clipline.random.streams import Streams, keys_of, user_order

STREAMS = Streams(3)
SIZES = [5, 0, 1, 23, 8, 0, 16, 3, 0]  # users with none at the start of the next one, in between and at the end


def population_of(sizes):
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Population(offsets, {"x": np.arange(offsets[-1])})


def plan(population, users, local, round_index, streams=STREAMS):
    return plan_steps(population, users, local, lambda purpose: streams.user_keys(purpose, round_index, users))


def batches_alone(population, user, local, round_index):
    """The user's batches, one after the other, by the plain method."""
    start, size = int(population.offsets[user]), population.size(user)
    size = size if local.max_examples is None else min(size, local.max_examples)
    found = []
    for epoch in range(local.epochs):
        order = start + user_order(STREAMS.user_key(f"order/{epoch}", round_index, user), size)
        found += [order[i : i + local.batch_size].tolist() for i in range(0, size, local.batch_size)]
    return found


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("max_examples", [None, 1, 8, 9])
@pytest.mark.parametrize("batch_size", [1, 4, 8, 100])
def test_a_plan_is_what_each_user_does_alone(epochs, max_examples, batch_size):
    population = population_of(SIZES)
    local = LocalSGD(0.1, batch_size, epochs, max_examples)
    for users in (np.arange(9), np.array([6, 1, 3]), np.array([2]), np.array([5, 1]), np.zeros(0, np.int64)):
        steps = plan(population, users, local, 11)
        wanted = [batches_alone(population, user, local, 11) for user in users.tolist()]
        widest = max((len(batch) for batches in wanted for batch in batches), default=1)
        widths = padded_width(local.examples_of(population, users), batch_size)
        assert steps.widths.tolist() == widths.tolist()
        assert steps.rows.shape == (len(users), steps.longest, max(widths.tolist(), default=1))
        assert widest <= steps.rows.shape[2] <= min(batch_size, max(8, 2 * widest))
        assert steps.longest == max(map(len, wanted), default=0)
        for rows, counts, batches in zip(steps.rows, steps.counts, wanted, strict=True):
            assert counts.tolist() == [len(batch) for batch in batches] + [0] * (steps.longest - len(batches))
            assert [row[:count].tolist() for row, count in zip(rows, counts, strict=True) if count] == batches


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_short_batch_is_filled_with_the_users_own_first_example_and_nobody_elses(epochs):
    population = population_of(SIZES)
    steps = plan(population, np.arange(9), LocalSGD(0.1, 4, epochs, 9), 0)
    for user in np.flatnonzero(SIZES).tolist():
        filling = np.arange(4) >= steps.counts[user, :, None]
        assert filling.any()
        assert (steps.rows[user][filling] == population.offsets[user]).all()
        assert (steps.rows[user] >= population.offsets[user]).all()
        assert (steps.rows[user] < population.offsets[user + 1]).all()
    assert (steps.counts[np.array(SIZES) == 0] == 0).all()
    assert ((steps.rows >= 0) & (steps.rows < population.examples)).all()  # and all can be looked up


def test_how_wide_a_batch_is_filled_up_depends_on_the_users_own_examples_alone():
    sizes = np.array([0, 1, 5, 6, 8, 9, 10, 11, 15, 16, 20, 21, 400])
    expected = [5, 5, 5, 8, 8, 10, 10, 15, 15, 20, 20, 20, 20]  # 20 over 1, 1.41, 2, 2.83, 4, rounded up
    assert padded_width(sizes, 20).tolist() == expected
    for size, width in zip(sizes, expected, strict=True):
        assert padded_width(np.array([size, 7]), 20)[0] == width
    assert padded_width(sizes, 1).tolist() == [1] * len(sizes)


def test_users_of_several_runs_are_planned_together_each_with_the_keys_of_the_own_run():
    population, local = population_of(SIZES), LocalSGD(0.1, 4)
    users, owners, rounds = np.array([3, 4, 0, 1]), np.array([0, 1, 0, 1]), [(STREAMS, 0), (Streams(8), 5)]
    both = plan_steps(population, users, local, lambda purpose: keys_of(rounds, purpose, users, owners))
    for run, (streams, round_index) in enumerate(rounds):
        alone = plan(population, users[owners == run], local, round_index, streams)
        assert both.rows[owners == run, : alone.longest].tolist() == alone.rows.tolist()
    assert both.counts.tolist() == [[4, 4, 4, 4, 4, 3], [4, 4, 0, 0, 0, 0], [4, 1, 0, 0, 0, 0], [0] * 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fractions_take_the_type_of_the_model_and_labels_that_of_indices(dtype):
    fields = {
        "single": np.array([0.1, 1e-3, 7.0], np.float32), "double": np.array([[1 / 3], [2.0], [3.0]]),
        "word": np.array([1, 65_535, 40_000], np.uint16), "byte": np.array([[255, 0], [1, 2], [3, 4]], np.uint8),
        "whole": np.array([-1, 2**40, 5]), "truth": np.array([True, False, True]),
        "token": np.array([-1, 5, 7], np.int16), "index": np.array([-1, 5, 7], np.int8),
        "label": np.array([-1, 5, 7], np.int32), "count": np.array([1, 2**32 - 1, 7], np.uint32),
        "total": np.array([1, 2**40, 7], np.uint64),
    }  # fmt: skip
    examples = Examples(Population(np.array([0, 3]), fields), torch.device("cpu"), dtype)
    rows = np.array([[2, 1], [1, 0]])
    batch = examples.gather(rows)
    kinds = [dtype, dtype, torch.uint16, torch.uint8, torch.int64, torch.bool, torch.int16]
    kinds += [torch.int64] * 4
    assert [batch[name].dtype for name in fields] == kinds
    for name, field in fields.items():
        wanted = field[rows].astype(str(dtype).removeprefix("torch.")) if field.dtype.kind == "f" else field[rows]
        np.testing.assert_array_equal(batch[name].numpy(), wanted)
    assert batch["word"].long().tolist() == [[40_000, 65_535], [65_535, 1]]  # not negative, though it travels so
    assert examples.gather(np.zeros((2, 0), np.int64))["byte"].shape == (2, 0, 2)
    for start, stop in ((0, 2), (1, 3), (2, 2)):  # neighbours without a copy of their own
        between, gathered = examples.between(start, stop), examples.gather(np.arange(start, stop))
        for name, field in gathered.items():
            assert between[name].dtype == field.dtype
            assert torch.equal(between[name].double(), field.double())


def test_a_batch_size_above_all_users_costs_no_memory():
    population, local = population_of([6, 3, 9]), LocalSGD(0.1, batch_size=10**5)
    steps = plan_steps(population, np.arange(3), local, lambda purpose: np.zeros(3, np.uint64))
    assert steps.counts.tolist() == [[6], [3], [9]]
    assert steps.rows.shape == (3, 1, 9)  # 10^5 over 2^13.5, rounded up, is the first that holds 9


def test_a_field_on_disk_moves_without_a_warning(tmp_path):
    Population(np.array([0, 6, 9, 18]), {"x": np.ones((18, 6))}).save(tmp_path / "population")
    stored = Population.open(tmp_path / "population")
    torch.set_warn_always(True)  # otherwise once in a process; a warning is an error in all tests
    try:
        moved = Examples(stored, torch.device("cpu"), torch.float32)._moved(stored.fields["x"])
    finally:
        torch.set_warn_always(False)
    assert moved.shape == (18, 6)
