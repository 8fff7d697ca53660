"""A block of users: some of its users are a block again."""

import numpy as np
import pytest
import torch

from clipline.engine.core.batches import Steps
from clipline.engine.core.row_fields import TouchedRows
from clipline.engine.stacked.block import Block


def made(label=torch.uint16):
    """Three users with two steps of two examples."""
    rows = np.arange(12).reshape(3, 2, 2)
    counts = np.array([[2, 2], [2, 1], [1, 0]])
    touched = TouchedRows(
        torch.tensor([[0, 1], [2, 3], [4, 0]]), torch.tensor([[True, True], [True, True], [True, False]])
    )
    return Block(
        np.array([7, 8, 9]),
        np.array([0, 1, 0]),
        np.array([1, 0, 0]),
        Steps(rows, counts, np.array([2, 2, 2])),
        {"x": torch.arange(12.0).view(3, 2, 2), "y": torch.arange(12).view(3, 2, 2).to(label)},
        {"w": touched},
        torch.arange(12, dtype=torch.int32).view(3, 2, 1, 2),
        torch.from_numpy(counts),
        torch.tensor([0.1, 0.2, 0.3]),
    )


@pytest.mark.parametrize("label", [torch.uint8, torch.uint16, torch.int64])
@pytest.mark.parametrize("chosen", [[0, 1, 2], [2, 0], [1], []])
def test_some_users_of_a_block_in_any_order(chosen, label):
    whole = made(label)
    block = whole.of_users(np.array(chosen, np.int64))
    assert block.users.tolist() == whole.users[chosen].tolist()
    assert block.owners.tolist() == whole.owners[chosen].tolist()
    assert block.places.tolist() == whole.places[chosen].tolist()
    assert np.array_equal(block.steps.rows, whole.steps.rows[chosen])
    assert np.array_equal(block.steps.counts, whole.steps.counts[chosen])
    assert np.array_equal(block.steps.widths, whole.steps.widths[chosen])
    assert torch.equal(block.examples["x"], whole.examples["x"][chosen])
    assert block.examples["y"].dtype == label
    assert block.examples["y"].tolist() == whole.examples["y"].long()[chosen].tolist()
    assert torch.equal(block.rows["w"].rows, whole.rows["w"].rows[chosen])
    assert torch.equal(block.rows["w"].used, whole.rows["w"].used[chosen])
    assert torch.equal(block.random_keys, whole.random_keys[chosen])
    assert torch.equal(block.counts, whole.counts[chosen])
    assert torch.equal(block.rates, whole.rates[chosen])


@pytest.mark.parametrize(("start", "stop", "longest", "room"), [(0, 3, 2, 2), (1, 3, 2, 2), (2, 3, 1, 1), (1, 1, 0, 1)])
def test_users_side_by_side_with_their_own_steps_and_rows_alone(start, stop, longest, room):
    whole, users = made(), slice(start, stop)
    block = whole.between(start, stop, {"w": room})
    assert block.steps.longest == longest
    for name in ("users", "owners", "places"):
        assert getattr(block, name).tolist() == getattr(whole, name)[users].tolist()
    assert np.array_equal(block.steps.rows, whole.steps.rows[users, :longest])
    assert np.array_equal(block.steps.counts, whole.steps.counts[users, :longest])
    assert np.array_equal(block.steps.widths, whole.steps.widths[users])
    assert torch.equal(block.examples["x"], whole.examples["x"][users, :longest])
    assert block.examples["y"].tolist() == whole.examples["y"].long()[users, :longest].tolist()
    assert torch.equal(block.rows["w"].rows, whole.rows["w"].rows[users, :room])
    assert torch.equal(block.rows["w"].used, whole.rows["w"].used[users, :room])
    assert block.rows["w"].rows.is_contiguous()
    assert torch.equal(block.random_keys, whole.random_keys[users, :longest])
    assert torch.equal(block.counts, whole.counts[users, :longest])
    assert torch.equal(block.rates, whole.rates[users])


def test_all_that_lies_on_the_device_is_named():
    block = made()
    tensors = block.tensors()
    own = [*block.examples.values(), block.rows["w"].rows, block.rows["w"].used]
    assert {id(one) for one in tensors} == {id(one) for one in [*own, block.random_keys, block.counts, block.rates]}
