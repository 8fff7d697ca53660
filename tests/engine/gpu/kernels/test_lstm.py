"""A recurrence for a stack of users, against the textbook's written out."""

from types import SimpleNamespace

import pytest
import torch
from torch.func import functional_call, stack_module_state, vmap
from torch.library import opcheck

from clipline.engine.gpu.kernels import convolution, lstm, lstm_cuda
from clipline.engine.stacked.layers import MatrixLSTM

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
    layers, stack = stack_of(lambda: MatrixLSTM(5, 5).to(DOUBLE))
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


@pytest.mark.parametrize("weight_type", [torch.bfloat16, torch.float32])
def test_the_backward_pass_is_laid_out_as_the_compiler_is_told(weight_type):
    outputs, gates = (torch.randn(USERS, 3, 2, width, dtype=torch.bfloat16) for width in (5, 20))
    cells, weight = torch.randn(USERS, 3, 2, 5), torch.randn(USERS, 20, 5, dtype=weight_type)
    active = torch.ones(USERS, 3, 2, dtype=torch.bool)
    checks = "test_schema", "test_faketensor"
    opcheck(lstm.stacked_lstm_backward, (outputs, outputs, gates, cells, weight, active), test_utils=checks)


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


on_chip = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU of 2020 or newer"
)


@on_chip
@pytest.mark.parametrize(
    ("users", "batch", "time", "hidden"),
    [(2, 4, 80, 256), (150, 4, 9, 256), (40, 16, 5, 670), (3, 37, 7, 64), (5, 3, 4, 34), (3, 9, 4, 100)],
    ids=["few users", "more than fit at once", "hidden size 670", "groups", "a last slice in part", "8 bytes a copy"],
)
def test_weights_on_chip_give_the_recurrence_in_float64_up_to_bfloat16(users, batch, time, hidden):
    assert lstm_cuda.units_on_chip(hidden, batch, torch.device("cuda")) > 0
    generator = torch.Generator("cuda").manual_seed(users)
    gate_inputs = torch.randn(users, time, batch, 4 * hidden, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(users, 4 * hidden, hidden, device="cuda", generator=generator).bfloat16() / hidden**0.5
    active = torch.rand(users, time, batch, device="cuda", generator=generator) < 0.8
    grad = torch.randn(users, time, batch, hidden, device="cuda", generator=generator).bfloat16()
    outputs, gates, cells = lstm.stacked_lstm(gate_inputs, weight, active)
    grad_inputs, grad_weight = lstm.stacked_lstm_backward(grad, outputs, gates, cells, weight, active)
    some = slice(users - 2, users)  # the last to start: the loop in float64 takes its time
    plain = lstm.stacked_lstm(gate_inputs[some].double(), weight[some].double(), active[some])
    wanted = lstm.stacked_lstm_backward(grad[some].double(), *plain, weight[some].double(), active[some])
    for ours, expected in zip((outputs, gates, cells, grad_inputs, grad_weight), (*plain, *wanted), strict=True):
        assert relative(ours[some], expected.cpu()) < 6e-3  # bfloat16 has 8 bits: 2e-3 for each rounding
    again = lstm.stacked_lstm(gate_inputs, weight, active)
    assert all(map(torch.equal, again, (outputs, gates, cells)))
    last = slice(users - 1, users)  # to the last bit, whoever trains beside
    alone = lstm.stacked_lstm(gate_inputs[last], weight[last], active[last])
    assert all(torch.equal(one, other[last]) for one, other in zip(alone, (outputs, gates, cells), strict=True))
    grads = lstm.stacked_lstm_backward(grad[last], *alone, weight[last], active[last])
    assert torch.equal(grads[0], grad_inputs[last])


@on_chip
def test_without_gradients_a_gpu_takes_the_library_s_recurrence_of_the_same_values():
    torch.manual_seed(0)
    layer, inputs = MatrixLSTM(5, 32).cuda(), torch.randn(2, 7, 5, device="cuda")
    for name, mask in LSTM_MASKS.items():
        with torch.no_grad():
            ours = layer(inputs, mask.cuda())
        expected = written_out(layer.double(), inputs.double(), mask.cuda())
        layer.float()
        assert relative(ours, expected.detach().cpu()) < 2e-3, name  # cuDNN may round products to tf32


def test_a_group_is_on_chip_only_where_four_launches_cannot_wait_for_each_other(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(lstm_cuda, "_kernels", lambda *sizes: None)

    def units(multiprocessors, hidden):
        properties = SimpleNamespace(shared_memory_per_block_optin=232448, multi_processor_count=multiprocessors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return lstm_cuda.units_on_chip.__wrapped__(hidden, 16, torch.device("cuda"))

    assert units(132, 256) == 32  # 8 blocks in a group
    assert units(132, 670) == 32  # 21: four groups that lack one block each hold 80 of 132
    assert units(132, 1024) == 0  # 64 blocks of 16 units: three groups that lack one hold 189
    assert units(32, 256) == 32  # 4 * 7 = 28 of 32
    assert units(20, 256) == 0  # 28 of 20


def test_kernels_get_what_lies_in_one_piece_where_wide_reads_may_begin():
    numbers = torch.arange(40, dtype=torch.bfloat16)
    for view in (numbers[1:33], numbers[:32].view(4, 8).T, numbers[8:]):
        (laid_out,) = lstm_cuda._laid_out(view)
        assert torch.equal(laid_out, view)
        assert laid_out.is_contiguous()
        assert laid_out.data_ptr() % 16 == 0
    assert lstm_cuda._laid_out(numbers)[0] is numbers
