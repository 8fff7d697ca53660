import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from clipline import SettingError
from clipline.engine.stacked.layers import BagLinear, GroupNormReLU, MatrixLSTM, PatchConv2d

DOUBLE = torch.float64


def as_matrix(kernel):
    """(out, in, rows, columns) of `nn.Conv2d` to the layout of `PatchConv2d`."""
    return kernel.permute(0, 2, 3, 1).reshape(len(kernel), -1)


def in_a_stack_of_one(layer, inputs):
    params = {name: param.detach().unsqueeze(0) for name, param in layer.named_parameters()}
    return vmap(lambda p: functional_call(layer, p, inputs))(params)[0]


def gradients(output, tensors):
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    return torch.autograd.grad((output * weights).sum(), tensors)


CASES = [(3, 1, 0, True), (3, 2, 1, True), (5, 1, 2, False), (1, 1, 0, False), (1, 2, 0, True), (7, 3, 3, True)]


@pytest.mark.parametrize(("size", "stride", "padding", "bias"), CASES)
def test_convolution_equals_the_librarys_forward_and_backward_alone_and_stacked(size, stride, padding, bias):
    torch.manual_seed(0)
    ours = PatchConv2d(4, 6, size, stride, padding, bias).to(DOUBLE)
    theirs = nn.Conv2d(4, 6, size, stride, padding, bias=bias).to(DOUBLE)
    ours.weight.data = as_matrix(theirs.weight.data)
    if bias:
        ours.bias.data = theirs.bias.data.clone()
    images = torch.randn(3, 4, 11, 11, dtype=DOUBLE, requires_grad=True)
    expected = theirs(images)
    expected_grads = gradients(expected, [images, theirs.weight, *([theirs.bias] if bias else [])])
    expected_grads = [expected_grads[0], as_matrix(expected_grads[1]), *expected_grads[2:]]
    torch.testing.assert_close(ours(images), expected, rtol=0, atol=1e-10)
    for got, want in zip(gradients(ours(images), [images, *ours.parameters()]), expected_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)

    torch.testing.assert_close(in_a_stack_of_one(ours, (images,)), expected, rtol=0, atol=1e-10)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    params = {name: param.detach().unsqueeze(0) for name, param in ours.named_parameters()}
    per_user = vmap(grad(lambda p: (functional_call(ours, p, (images.detach(),)) * weights).sum()))(params)
    for name, want in zip([name for name, _ in ours.named_parameters()], expected_grads[1:], strict=True):
        torch.testing.assert_close(per_user[name][0], want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("side", [5, 6, 12, 24])
@pytest.mark.parametrize(("size", "stride"), [(3, 1), (7, 2), (3, 2), (1, 1), (2, 2)])
def test_same_padding_puts_the_odd_zero_below_and_to_the_right_as_tensorflow_does(side, size, stride):
    torch.manual_seed(0)
    layer = PatchConv2d(2, 3, size, stride, "same", bias=False).to(DOUBLE)
    images = torch.randn(2, 2, side, side, dtype=DOUBLE)
    out = -(-side // stride)
    total = max((out - 1) * stride + size - side, 0)  # the formula of TensorFlow's documentation
    padded = F.pad(images, (total // 2, total - total // 2) * 2)
    kernel = layer.weight.view(3, size, size, 2).permute(0, 3, 1, 2)
    expected = F.conv2d(padded, kernel, stride=stride)
    assert expected.shape[-2:] == (out, out)
    torch.testing.assert_close(layer(images), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(in_a_stack_of_one(layer, (images,)), expected, rtol=0, atol=1e-10)


def test_unknown_padding_is_refused():
    with pytest.raises(SettingError, match=r"padding='sane'.*did you mean 'same'"):
        PatchConv2d(1, 1, 3, padding="sane")


def library_lstm(ours, input_size):
    theirs = nn.LSTM(input_size, ours.hidden_size, batch_first=True).to(DOUBLE)
    theirs.weight_ih_l0.data, theirs.weight_hh_l0.data = ours.weight_ih.data.clone(), ours.weight_hh.data.clone()
    theirs.bias_ih_l0.data, theirs.bias_hh_l0.data = ours.bias.data.clone(), torch.zeros_like(ours.bias)
    return theirs


@pytest.mark.parametrize("way", [MatrixLSTM.forward, MatrixLSTM._step_by_step])
def test_lstm_equals_the_librarys_forward_and_backward(way):
    torch.manual_seed(0)
    ours = MatrixLSTM(5, 7).to(DOUBLE)
    theirs = library_lstm(ours, 5)
    inputs = torch.randn(3, 9, 5, dtype=DOUBLE, requires_grad=True)
    expected = theirs(inputs)[0]
    torch.testing.assert_close(way(ours, inputs, None), expected, rtol=0, atol=1e-10)
    wanted = gradients(expected, [inputs, theirs.weight_ih_l0, theirs.weight_hh_l0, theirs.bias_ih_l0])
    got = gradients(way(ours, inputs, None), [inputs, ours.weight_ih, ours.weight_hh, ours.bias])
    for mine, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


REAL_FIRST = [[True] * 3 + [False] * 3, [True] * 6, [True] + [False] * 5, [False] * 6]
ANY_ORDER = [[True, True, False, True, False, False], [False, True, True, True, True, True]]


@pytest.mark.parametrize("mask", [REAL_FIRST, ANY_ORDER])
def test_lstm_with_padding_is_the_same_alone_stacked_and_step_by_step(mask):
    torch.manual_seed(0)
    ours = MatrixLSTM(5, 7).to(DOUBLE)
    mask = torch.tensor(mask)
    inputs = torch.randn(*mask.shape, 5, dtype=DOUBLE, requires_grad=True)
    expected = ours._step_by_step(inputs, mask)
    torch.testing.assert_close(ours(inputs, mask), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(in_a_stack_of_one(ours, (inputs, mask)), expected, rtol=0, atol=1e-10)
    tensors = [inputs, *ours.parameters()]
    for mine, other in zip(gradients(ours(inputs, mask), tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("way", [MatrixLSTM.forward, MatrixLSTM._step_by_step])
def test_lstm_holds_its_state_where_the_mask_is_false(way):
    torch.manual_seed(0)
    ours = MatrixLSTM(5, 7).to(DOUBLE)
    inputs = torch.randn(2, 6, 5, dtype=DOUBLE)
    got = way(ours, inputs, torch.tensor(ANY_ORDER))
    awake = ours(inputs[:1, [0, 1, 3]])[0]  # as if the masked steps had never been
    torch.testing.assert_close(got[0], awake[[0, 1, 1, 2, 2, 2]], rtol=0, atol=1e-12)
    torch.testing.assert_close(got[1, 1:], ours(inputs[1:, 1:])[0], rtol=0, atol=1e-12)
    assert got[1, 0].abs().max() == 0  # nothing has been read yet
    padded = way(ours, inputs, torch.tensor([REAL_FIRST[0], REAL_FIRST[3]]))
    torch.testing.assert_close(padded[0, 2:], padded[0, 2:3].expand(4, -1), rtol=0, atol=0)
    assert padded[1].abs().max() == 0


def test_lstm_starts_as_in_keras():
    torch.manual_seed(0)
    layer = MatrixLSTM(8, 16)
    assert layer.bias.tolist() == [0.0] * 16 + [1.0] * 16 + [0.0] * 32
    torch.testing.assert_close(layer.weight_hh.T @ layer.weight_hh, torch.eye(16), rtol=0, atol=1e-5)
    assert layer.weight_ih.abs().max() <= (6 / (8 + 64)) ** 0.5


def test_sparse_rows_equal_the_dense_linear_layer_forward_and_backward():
    torch.manual_seed(0)
    ours = BagLinear(50, 7).to(DOUBLE)
    features = torch.stack([torch.randperm(50)[:6] for _ in range(4)])
    values = torch.rand(4, 6, dtype=DOUBLE)
    features[0, 3:], values[0, 3:] = 50, 0.0  # padding, beyond the last feature
    dense = torch.zeros(4, 51, dtype=DOUBLE).scatter(1, features, values)[:, :50]
    weight, bias = ours.weight.detach().clone().requires_grad_(), ours.bias.detach().clone().requires_grad_()
    expected = F.linear(dense, weight.T, bias)
    torch.testing.assert_close(ours(features, values), expected, rtol=0, atol=1e-10)
    wanted = gradients(expected, [weight, bias])
    for mine, other in zip(gradients(ours(features, values), [ours.weight, ours.bias]), wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)
    params = {name: param.detach().unsqueeze(0) for name, param in ours.named_parameters()}
    out = vmap(lambda p: functional_call(ours, p, (features, values)))(params)[0]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)


def test_norm_and_relu_are_the_librarys_alone_and_in_a_stack():
    layer, library = GroupNormReLU(2, 8, eps=1e-3), nn.GroupNorm(2, 8, eps=1e-3)
    images, params = 1 + 2 * torch.randn(3, 5, 8, 3, 3), {name: torch.randn(3, 8) for name in ("weight", "bias")}
    stacked = torch.func.vmap(lambda own, x: torch.func.functional_call(layer, own, x))(params, images)
    for user, expected in enumerate(stacked):
        own = {name: value[user] for name, value in params.items()}
        assert 0.2 < float((expected == 0).float().mean()) < 0.8
        torch.testing.assert_close(torch.func.functional_call(library, own, images[user]).relu(), expected)
        torch.testing.assert_close(torch.func.functional_call(layer, own, images[user]), expected)
