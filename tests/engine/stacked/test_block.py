"""A block of users: some of its users are a block again."""

import numpy as np
import pytest
import torch

from clipline.engine.core.batches import Steps
from clipline.engine.core.row_fields import TouchedRows
from clipline.engine.stacked.trainer import Block


def made():
    """Three users with two steps of two examples."""
    rows = np.arange(12).reshape(3, 2, 2)
    counts = np.array([[2, 2], [2, 1], [1, 0]])
    used = torch.tensor([[True, True], [True, True], [True, False]])
    touched = TouchedRows(torch.tensor([[0, 1], [2, 3], [4, 0]]), used)
    users, owners, places = np.array([7, 8, 9]), np.array([0, 1, 0]), np.array([1, 0, 0])
    examples = {"x": torch.arange(12.0).view(3, 2, 2), "y": torch.arange(12).view(3, 2, 2).to(torch.uint16)}
    keys, rates = torch.arange(12, dtype=torch.int32).view(3, 2, 1, 2), torch.tensor([0.1, 0.2, 0.3])
    steps = Steps(rows, counts, np.array([2, 2, 2]))
    return Block(users, owners, places, steps, examples, {"w": touched}, keys, torch.from_numpy(counts), rates)


def assert_same(block, whole, users, longest=2, room=2):
    """Everything in `block` is what `whole` has for these users, cut to so many steps and rows."""
    for name in ("users", "owners", "places"):
        assert getattr(block, name).tolist() == getattr(whole, name)[users].tolist()
    assert block.steps.rows.tolist() == whole.steps.rows[users, :longest].tolist()
    assert block.steps.counts.tolist() == whole.steps.counts[users, :longest].tolist()
    assert block.steps.widths.tolist() == whole.steps.widths[users].tolist()
    for name, field in whole.examples.items():
        assert block.examples[name].dtype == field.dtype
        assert block.examples[name].tolist() == field.double()[users, :longest].tolist()
    assert torch.equal(block.rows["w"].rows, whole.rows["w"].rows[users, :room])
    assert torch.equal(block.rows["w"].used, whole.rows["w"].used[users, :room])
    assert torch.equal(block.random_keys, whole.random_keys[users, :longest])
    assert torch.equal(block.counts, whole.counts[users, :longest])
    assert torch.equal(block.rates, whole.rates[users])


@pytest.mark.parametrize("chosen", [[0, 1, 2], [2, 0], [1], []])
def test_some_users_of_a_block_in_any_order(chosen):
    whole = made()
    assert_same(whole.of_users(np.array(chosen, np.int64)), whole, chosen)


@pytest.mark.parametrize(("start", "stop", "longest", "room"), [(0, 3, 2, 2), (1, 3, 2, 2), (2, 3, 1, 1), (1, 1, 0, 1)])
def test_users_side_by_side_with_their_own_steps_and_rows_alone(start, stop, longest, room):
    whole = made()
    block = whole.of_users(slice(start, stop), {"w": room})
    assert block.steps.longest == longest
    assert_same(block, whole, slice(start, stop), longest, room)
    assert block.rows["w"].rows.is_contiguous()


def test_all_that_lies_on_the_device_is_named():
    block = made()
    own = [*block.examples.values(), block.rows["w"].rows, block.rows["w"].used]
    assert {id(one) for one in block.tensors()} == {
        id(one) for one in [*own, block.random_keys, block.counts, block.rates]
    }
