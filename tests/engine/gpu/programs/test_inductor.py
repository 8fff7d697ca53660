"""Our own operations under the compiler: the number of users stays open, so that one program serves any number."""

import pytest
import torch
from torch import Tensor

from clipline.engine.core import vmap_axis
from clipline.engine.gpu.kernels import convolution, lstm
from clipline.engine.gpu.programs import inductor


def _users(*shape):
    return torch.zeros(6, *shape)


_IMAGES, _MAPS = _users(3, 8, 8, 16), _users(3, 8, 8, 4)  # (users, batch, height, width, channels)
_GATES, _STATES = _users(7, 3, 20), _users(7, 3, 5)  # (users, time, batch, gates or states)
_CALLS = {
    convolution.stacked_conv: (_IMAGES, _users(4, 3, 3, 16), _users(4, 144), _users(4), 1, 1),
    convolution.stacked_conv_pixels: (_MAPS, _users(4, 144), 8, 8, 3, 1, 1),
    convolution.stacked_conv_weight: (_MAPS, _IMAGES, 3, 1, 1, True),
    lstm.stacked_lstm: (_GATES, _users(20, 5), _users(7)),
    lstm.stacked_lstm_backward: (_STATES, _STATES, _GATES, _STATES, _users(20, 5), _users(7)),
    vmap_axis.stacked_product: (_users(3, 5), _users(4, 5)),
    vmap_axis.stacked_product_weight: (_users(3, 4), _users(3, 5)),
}


@pytest.mark.parametrize("operation", _CALLS, ids=lambda operation: operation._name)
def test_an_operation_leaves_the_number_of_users_open(operation):
    given = _CALLS[operation]
    tensors = [one for one in given if isinstance(one, Tensor)]
    shapes, like = inductor._stand_ins(tensors, len(tensors))
    stand_ins = iter(like)
    with like[0].fake_mode:
        operation(*(next(stand_ins) if isinstance(one, Tensor) else one for one in given))
    condition = inductor._condition(shapes, like)
    assert inductor.Compiled(lambda: None, condition).serves(6)
    assert inductor.Compiled(lambda: None, condition).serves(100), condition


def test_every_stacked_operation_is_among_them():
    named = {operation._name for operation in _CALLS}
    assert named == {name for module in (convolution, lstm, vmap_axis) for name in _stacked(module)}


def _stacked(module):
    own = (one for one in vars(module).values() if isinstance(one, torch.library.CustomOpDef))
    return {one._name for one in own if "stacked" in one._name}
