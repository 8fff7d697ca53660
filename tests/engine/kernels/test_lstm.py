"""A recurrence for a stack of users, against the textbook's written out."""

import pytest
import torch
from torch.func import functional_call, stack_module_state, vmap

from clipline.engine.kernels import convolution
from clipline.engine.layers import MatrixLSTM

DOUBLE = torch.float64
USERS = 3
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or convolution.convolution_kernels is None, reason="needs a GPU and Triton"
)
LSTM_MASKS = {
    "all awake": torch.ones(2, 7, dtype=torch.bool),
    "asleep at the end": torch.tensor([[True] * 4 + [False] * 3, [True] * 7]),
    "asleep in between": torch.tensor([[True, False, True, False, False, True, True], [False] * 7]),
}


def stack_of(make):
    torch.manual_seed(0)
    layers = [make() for _ in range(USERS)]
    stacked, _ = stack_module_state(layers)
    return layers, {name: param.detach().requires_grad_() for name, param in stacked.items()}


def relative(ours, expected):
    return float((ours.detach().double().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("mask", LSTM_MASKS.values(), ids=LSTM_MASKS)
def test_a_stack_of_recurrences_equals_each_alone_written_out(mask):
    layers, stack = stack_of(lambda: MatrixLSTM(5, 4).to(DOUBLE))
    inputs = torch.randn(USERS, 2, 7, 5, dtype=DOUBLE, requires_grad=True)
    outputs = vmap(lambda p, x: functional_call(layers[0], p, (x, mask)))(stack, inputs)
    weights = torch.randn_like(outputs)
    ours = torch.autograd.grad((outputs * weights).sum(), [inputs, *stack.values()])
    for user, layer in enumerate(layers):
        alone = written_out(layer, inputs[user], mask)
        torch.testing.assert_close(outputs[user], alone)
        expected = torch.autograd.grad((alone * weights[user]).sum(), [inputs, *layer.parameters()])
        torch.testing.assert_close(ours[0][user], expected[0][user])
        for gradient, theirs in zip(ours[1:], expected[1:], strict=True):
            torch.testing.assert_close(gradient[user], theirs)


def test_a_stack_of_recurrences_in_bfloat16_is_near_that_in_float64():
    layers, stack = stack_of(lambda: MatrixLSTM(5, 4).to(DOUBLE))
    inputs = torch.randn(USERS, 2, 7, 5, dtype=DOUBLE)
    found = {}
    for dtype in (DOUBLE, torch.float32):
        own = {name: param.detach().to(dtype).requires_grad_() for name, param in stack.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != DOUBLE):
            out = vmap(lambda p, x: functional_call(layers[0], p, (x, None)))(own, inputs.to(dtype))
        found[dtype] = torch.autograd.grad(
            out.float().square().sum() if dtype != DOUBLE else out.square().sum(), list(own.values())
        )
    for ours, expected in zip(found[torch.float32], found[DOUBLE], strict=True):
        assert 0 < relative(ours, expected) < 3e-2


def written_out(layer, inputs, mask):
    """The textbook's recurrence, one step after the other, for autograd to differentiate."""
    hidden = cell = inputs.new_zeros(len(inputs), layer.hidden_size)
    outputs = []
    for t in range(inputs.shape[1]):
        gates = inputs[:, t] @ layer.weight_ih.T + hidden @ layer.weight_hh.T + layer.bias
        enter, keep, candidate, leave = gates.chunk(4, dim=1)
        new_cell = torch.sigmoid(keep) * cell + torch.sigmoid(enter) * torch.tanh(candidate)
        on = mask[:, t, None]
        hidden = torch.where(on, torch.sigmoid(leave) * torch.tanh(new_cell), hidden)
        cell = torch.where(on, new_cell, cell)
        outputs.append(hidden)
    return torch.stack(outputs, dim=1)


@needs_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("mask", LSTM_MASKS.values(), ids=LSTM_MASKS)
def test_recurrence_on_a_gpu_equals_the_plain_one_in_float64(mask, dtype, tolerance):
    layers, stack = stack_of(lambda: MatrixLSTM(5, 40).to(DOUBLE))
    inputs = torch.randn(USERS, 2, 7, 5, dtype=DOUBLE)

    def run(params, inputs, mask):
        outputs = vmap(lambda p, x: functional_call(layers[0], p, (x, mask)))(params, inputs)
        weights = torch.linspace(-1, 1, outputs.numel(), dtype=DOUBLE).view(outputs.shape).to(outputs)
        return [outputs, *torch.autograd.grad((outputs * weights).sum(), list(params.values()))]

    expected = run(stack, inputs, mask)
    moved = {name: param.detach().to("cuda", torch.float32).requires_grad_() for name, param in stack.items()}
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        ours = run(moved, inputs.to("cuda", torch.float32), mask.cuda())
    for one, other in zip(ours, expected, strict=True):
        assert relative(one, other.detach()) < tolerance


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mask", LSTM_MASKS.values(), ids=LSTM_MASKS)
def test_a_recurrence_alone_on_a_gpu_equals_the_plain_one_whatever_is_held(mask):
    torch.manual_seed(0)
    layer, inputs = MatrixLSTM(5, 32), torch.randn(2, 7, 5)
    expected = written_out(layer.double(), inputs.double(), mask)
    wanted = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
    layer = layer.float().cuda()
    ours = layer(inputs.cuda(), mask.cuda())
    gradients = torch.autograd.grad(ours.square().sum(), list(layer.parameters()))
    assert relative(ours, expected.detach()) < 1e-5
    for gradient, theirs in zip(gradients, wanted, strict=True):
        assert relative(gradient, theirs) < 1e-5
