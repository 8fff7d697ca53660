from types import SimpleNamespace

import torch
from torch.func import grad, vmap

from clipline.engine.core.vmap_axis import is_batched, users_first


def test_only_tensors_of_a_stack_are_stacked():
    seen = []
    vmap(lambda x: seen.append(is_batched(x)) or x)(torch.zeros(2))
    assert seen == [True]
    assert not is_batched(torch.zeros(2))


def test_one_tensor_of_a_stack_among_others_is_enough_and_other_transforms_count_too():
    shared, seen = torch.zeros(2), []
    vmap(lambda x: seen.append(is_batched(shared, x)) or x)(torch.zeros(2))
    grad(lambda x: seen.append(is_batched(x)) or x)(torch.zeros(()))
    assert seen == [True, True]


def test_users_come_first_whatever_axis_they_were_and_share_what_is_shared():
    info, tensor = SimpleNamespace(batch_size=4), torch.arange(24.0).view(2, 3, 4)
    first = users_first(info, 2, tensor)
    assert first.shape == (4, 2, 3)
    assert torch.equal(first[1], tensor[:, :, 1])
    shared = users_first(info, None, tensor)
    assert shared.shape == (4, 2, 3, 4)
    assert torch.equal(shared[3], tensor)
    assert shared.data_ptr() == tensor.data_ptr()  # no copy
