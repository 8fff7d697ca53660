"""The engine's own layers: torch's in the caller's model, and equal to torch's in a stack."""

import copy
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from samples import cross_entropies, one_by_one, population_of, rows_of, small_population
from torch import nn
from torch.func import functional_call, vmap

from clipline import LocalSGD
from clipline.engine.core.vmap_axis import users_first
from clipline.engine.core.working_model import WorkingModel
from clipline.engine.stacked import vmap_layers as layers
from clipline.engine.stacked.trainer import Stacked
from clipline.engine.stacked.vmap_layers import make_stackable, replace_layers
from clipline.random.streams import Streams

DOUBLE = torch.float64
USERS = 3


def model():
    few = nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)
    return nn.Sequential(*few, nn.LSTM(2, 2), nn.GRU(2, 2), nn.MultiheadAttention(2, 1))


def test_layers_are_swapped_in_the_working_copy_only_and_what_is_handed_back_is_torchs():
    ours = model()
    kinds, keys = [type(layer) for layer in ours], list(ours.state_dict())
    flat = WorkingModel(ours, make_stackable=make_stackable)
    swapped = [type(layer) for layer in flat.module]
    assert all(issubclass(ours, torchs) for ours, torchs in zip(swapped, kinds, strict=True))
    assert {kind for kind in swapped if kind in kinds} == {nn.ReLU}  # every other layer has one of our own
    assert list(flat.module.state_dict()) == keys
    exported = flat.export(flat.initial + 1)
    assert [type(layer) for layer in exported] == [type(layer) for layer in ours] == kinds
    assert not list(ours.buffers())
    ours.load_state_dict(exported.state_dict())  # the same keys
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in ours.parameters()]), flat.initial + 1)


def test_layers_that_inherit_from_torchs_are_left_as_they_are():
    class Doubling(nn.Linear):
        def forward(self, values):
            return 2 * super().forward(values)

    layer = replace_layers(Doubling(2, 2))
    assert type(layer) is Doubling


def test_a_users_dropout_differs_by_user_round_step_and_layer():
    record = Mock()

    class Recorded(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.out = nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(6, 3)

        def forward(self, x):
            ones = torch.ones(64)
            record(self.first(ones))
            record(self.second(ones))
            return self.out(x)

    population = small_population(4)
    users = [user for user in range(4) if population.size(user) > 8][:2]

    def loss(model, batch):
        return model(batch["x"]).square().mean()

    engine = one_by_one(Recorded(), loss, population, LocalSGD(0.1, batch_size=8), Streams(0))
    record.reset_mock()  # made-up examples
    for round_index in (0, 1):
        engine.block(engine.problem.model.initial, torch.tensor(users).numpy(), round_index)
    masks = [call.args[0] for call in record.call_args_list]
    steps = sum(-(-population.size(user) // 8) for user in users)
    assert len(masks) == 2 * 2 * steps >= 16
    assert len({tuple(mask.tolist()) for mask in masks}) == len(masks)


def weighted(output):
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    return (output * weights).sum()


def compare(make, inputs):
    """A stack of layers with parameters of their own against torch's layers one after the other, there and back."""
    torch.manual_seed(0)
    theirs = [make().to(DOUBLE) for _ in range(USERS)]
    for layer in theirs:
        for param in layer.parameters():
            nn.init.normal_(param)
    ours = replace_layers(copy.deepcopy(theirs[0]))
    stack = {
        name: torch.stack([dict(layer.named_parameters())[name].detach() for layer in theirs]).requires_grad_()
        for name, _ in ours.named_parameters()
    }
    inputs = inputs.clone().requires_grad_()
    out = vmap(lambda params, values: functional_call(ours, params, (values,)))(stack, inputs)
    found = torch.autograd.grad(weighted(out), [inputs, *stack.values()])
    alone = [layer(values) for layer, values in zip(theirs, inputs, strict=True)]
    torch.testing.assert_close(out, torch.stack(alone), rtol=1e-12, atol=1e-12)
    params = [param for layer in theirs for param in layer.parameters()]
    expected = torch.autograd.grad(weighted(torch.stack(alone)), [inputs, *params])
    torch.testing.assert_close(found[0], expected[0], rtol=1e-11, atol=1e-12)
    for number, gradient in enumerate(found[1:]):
        wanted = torch.stack(expected[1 + number :: len(stack)])
        torch.testing.assert_close(gradient, wanted, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(ours(inputs[0]), alone[0], rtol=0, atol=0)  # alone it is torch's own


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 5), (4, 7, 5), (5,), (2, 3, 2, 5)])
def test_linear_in_a_stack_is_torchs_there_and_back(bias, shape):
    compare(lambda: nn.Linear(5, 6, bias=bias), torch.randn(USERS, *shape, dtype=DOUBLE))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 5, 3), (4, 6, 9), (4, 6, 2, 2, 2)])
def test_group_norm_in_a_stack_is_torchs_there_and_back(affine, groups, shape):
    inputs = 3 + 2 * torch.randn(USERS, *shape, dtype=DOUBLE)
    compare(lambda: nn.GroupNorm(groups, 6, eps=1e-3, affine=affine), inputs)


@pytest.mark.filterwarnings("ignore:.*zero-padded copy")
@pytest.mark.parametrize(
    "options",
    [
        {}, {"stride": 2}, {"padding": 1, "bias": False}, {"padding": (2, 1), "stride": 2}, {"padding": "same"},
        {"kernel_size": 4, "padding": "same"}, {"dilation": 2}, {"groups": 2}, {"kernel_size": (3, 2)},
        {"padding": 1, "padding_mode": "circular"}, {"stride": (1, 2)},
    ],
)  # fmt: skip
def test_convolution_in_a_stack_is_torchs_there_and_back(monkeypatch, options):
    monkeypatch.setattr(layers, "LIBRARY_IS_FAST", ())  # as on a GPU
    convolved, calls = layers.convolution.convolved, []
    monkeypatch.setattr(layers.convolution, "convolved", lambda *given: calls.append(1) or convolved(*given))
    inputs = torch.randn(USERS, 2, 4, 9, 8, dtype=DOUBLE)
    compare(lambda: nn.Conv2d(4, 6, **{"kernel_size": 3, **options}), inputs)
    rare = {"dilation", "groups", "padding_mode"} & set(options) or isinstance(options.get("stride"), tuple)
    assert bool(calls) != bool(rare or isinstance(options.get("kernel_size"), tuple))


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"padding": "same", "bias": False}, {"padding": (2, 1)}])
def test_convolution_of_gray_images_is_torchs_on_cores_with_and_without_a_gradient_of_the_image(options):
    inputs = torch.randn(USERS, 2, 1, 9, 8, dtype=DOUBLE)
    compare(lambda: nn.Conv2d(1, 6, **{"kernel_size": 3, **options}), inputs)  # asks for the gradient of the images
    layer = replace_layers(nn.Conv2d(1, 6, **{"kernel_size": 3, **options}).double())
    stack = {name: torch.randn(USERS, *param.shape, dtype=DOUBLE) for name, param in layer.named_parameters()}
    ours, theirs = ({name: piece.clone().requires_grad_() for name, piece in stack.items()} for _ in range(2))
    out = vmap(lambda params, images: functional_call(layer, params, (images,)))(ours, inputs)
    biases = theirs.get("bias", [None] * USERS)
    alone = [
        torch.nn.functional.conv2d(images, weight, bias, layer.stride, layer.padding)
        for images, weight, bias in zip(inputs, theirs["weight"], biases, strict=True)
    ]
    torch.testing.assert_close(out, torch.stack(alone), rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(weighted(out), list(ours.values()))
    expected = torch.autograd.grad(weighted(torch.stack(alone)), list(theirs.values()))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_a_view_works_in_a_stack_where_it_works_for_one_user():
    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 4, 3), nn.Linear(4 * 4, 3)

        def forward(self, x):
            return self.out(nn.functional.relu(self.conv(x.view(-1, 1, 4, 4))).view(-1, 4 * 2 * 2))

    engine = one_by_one(Viewed(), cross_entropies, population_of([3, 5, 2], features=16), LocalSGD(0.1), Streams(0))
    users = np.arange(3)
    torch.testing.assert_close(rows_of(Stacked(engine, 3), users), rows_of(engine, users), rtol=1e-4, atol=1e-6)


def test_a_shared_input_and_a_frozen_weight_work_in_a_stack():
    torch.manual_seed(0)
    layer = replace_layers(nn.Linear(5, 2).double())
    values, biases = torch.randn(4, 5, dtype=DOUBLE), torch.randn(USERS, 2, dtype=DOUBLE)
    weights = torch.randn(USERS, 2, 5, dtype=DOUBLE)
    out = vmap(lambda weight: functional_call(layer, {"weight": weight}, (values,)))(weights)
    torch.testing.assert_close(out, values @ weights.transpose(1, 2) + layer.bias)
    out = vmap(lambda bias: functional_call(layer, {"bias": bias}, (values,)))(biases)
    torch.testing.assert_close(out, (values @ layer.weight.T)[None] + biases[:, None])
    many = torch.randn(USERS, 4, 5, dtype=DOUBLE)
    torch.testing.assert_close(vmap(layer)(many), many @ layer.weight.T + layer.bias)


def test_users_come_first_whatever_axis_they_were_and_share_what_is_shared():
    info, tensor = SimpleNamespace(batch_size=4), torch.arange(24.0).view(2, 3, 4)
    first = users_first(info, 2, tensor)
    assert first.shape == (4, 2, 3)
    assert torch.equal(first[1], tensor[:, :, 1])
    shared = users_first(info, None, tensor)
    assert shared.shape == (4, 2, 3, 4)
    assert torch.equal(shared[3], tensor)
    assert shared.data_ptr() == tensor.data_ptr()  # no copy
