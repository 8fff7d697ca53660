import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from clipline import MatrixLSTM, PatchConv2d
from clipline.engine.kernels import convolution
from clipline.engine.updates import Dense, Rows, Updates, triton_sum

DOUBLE = torch.float64
USERS = 3


def stack_of(make):
    torch.manual_seed(0)
    layers = [make() for _ in range(USERS)]
    stacked, _ = stack_module_state(layers)
    return layers, {name: param.detach().requires_grad_() for name, param in stacked.items()}


def relative(ours, expected):
    return float((ours.detach().double().cpu() - expected).norm() / expected.norm())


LSTM_MASKS = {
    "all awake": torch.ones(2, 7, dtype=torch.bool),
    "asleep at the end": torch.tensor([[True] * 4 + [False] * 3, [True] * 7]),
    "asleep in between": torch.tensor([[True, False, True, False, False, True, True], [False] * 7]),
}


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


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or convolution.triton_convolution is None, reason="needs a GPU and Triton"
)
PRECISIONS = [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)]
CONVOLUTIONS = [(1, 32, 3, 1, 28), (32, 64, 3, 1, 26), (3, 64, 7, 2, 29), (64, 128, 1, 1, 6), (24, 40, 5, 3, 17)]


@needs_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize(("channels", "filters", "size", "stride", "side"), CONVOLUTIONS)
def test_convolution_on_a_gpu_equals_the_librarys_in_float64(channels, filters, size, stride, side, dtype, tolerance):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(USERS, 5, side, side, channels, generator=generator, dtype=DOUBLE)
    weight = torch.randn(USERS, filters, size * size * channels, generator=generator, dtype=DOUBLE)
    out = convolution.out_side(side, size, stride)
    grad = torch.randn(USERS, 5, out, out, filters, generator=generator, dtype=DOUBLE)
    bias = torch.randn(USERS, filters, generator=generator, dtype=DOUBLE)
    given = [pixels.to("cuda", dtype), weight.to("cuda", torch.float32), bias.to("cuda", torch.float32)]
    given = [tensor.requires_grad_() for tensor in given]
    ours = convolution.stacked_conv(*given, size, stride)
    found = torch.autograd.grad(ours, given, grad.to("cuda", dtype))
    assert found[1].dtype == torch.float32
    for user in range(USERS):
        x = pixels[user].permute(0, 3, 1, 2).requires_grad_()
        w = weight[user].view(filters, size, size, channels).permute(0, 3, 1, 2).requires_grad_()
        expected = F.conv2d(x, w, bias[user], stride=stride)
        of_x, of_w = torch.autograd.grad(expected, (x, w), grad[user].permute(0, 3, 1, 2))
        assert relative(ours[user].permute(0, 3, 1, 2), expected.detach()) < tolerance
        assert relative(found[0][user].permute(0, 3, 1, 2), of_x) < tolerance
        assert relative(found[1][user], of_w.permute(0, 2, 3, 1).flatten(1)) < tolerance
        assert relative(found[2][user], grad[user].sum(dim=(0, 1, 2))) < tolerance


@needs_gpu
@pytest.mark.parametrize("width", [1, 1023, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_and_sums_on_a_gpu_are_those_of_float64(dtype, width):
    values = torch.randn(7, width + 5, generator=torch.Generator().manual_seed(1), dtype=DOUBLE).to(dtype)
    values = (values * torch.logspace(-15, 15, 7, dtype=dtype).unsqueeze(1))[:, 2 : width + 2]  # rows of a wider matrix
    updates = Updates([Dense(0, values.cuda())])
    expected = [math.sqrt(math.fsum(value * value for value in row)) for row in values.tolist()]  # torch's is 1e-14 off
    assert updates.norms().tolist() == pytest.approx(expected, rel=1e-15)
    scale, total = torch.linspace(0, 1, 7, dtype=DOUBLE), torch.ones(width, dtype=DOUBLE, device="cuda")
    updates.add_to(total, scale.cuda())
    error = (total.cpu() - 1 - scale @ values.double()).abs()
    assert (error <= 1e-14 * (1 + scale @ values.double().abs())).all()
    updates.pieces[0].values[3, 0] = torch.inf
    assert not updates.norms()[3].isfinite()


@needs_gpu
@pytest.mark.parametrize("runs", ["one", "several"])
@pytest.mark.parametrize("width", [1, 129, 70_001])
def test_what_was_before_is_subtracted_as_a_subtraction_does(width, runs):
    generator = torch.Generator().manual_seed(1)
    after = torch.randn(21, width, generator=generator).cuda()
    before = torch.randn(1 if runs == "one" else 21, width, generator=generator).cuda()
    formed, later = Updates([Dense(0, after - before)]), Updates([Dense(0, after, before)])
    torch.testing.assert_close(later.norms(), formed.norms(), rtol=1e-14, atol=0)
    scale = torch.linspace(0, 1, 21, dtype=DOUBLE, device="cuda")
    totals = [torch.ones(width, dtype=DOUBLE, device="cuda") for _ in range(2)]
    for updates, total in zip((formed, later), totals, strict=True):
        updates.add_to(total, scale)
    torch.testing.assert_close(*totals, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(totals[0], 1 + scale @ (after - before).double(), rtol=1e-13, atol=1e-13)
    assert torch.equal(later.dense(width), formed.dense(width))
    after[4, 0] = torch.inf
    after[0] = torch.nan  # whose scale is 0
    later.add_to(totals[0], torch.where(torch.arange(21, device="cuda") == 4, 0.0, scale))
    assert totals[0].isfinite().all()
    assert later.norms().isfinite().tolist() == [user not in (0, 4) for user in range(21)]


@needs_gpu
@pytest.mark.parametrize("padded", [True, False])
def test_rows_on_a_gpu_add_up_as_on_the_cpu_and_the_same_every_time(padded):
    generator = torch.Generator().manual_seed(1)
    places = torch.stack([torch.randperm(50, generator=generator)[:20].sort().values for _ in range(30)])
    values = torch.randn(30, 20, 600, generator=generator)
    used = torch.arange(20) < torch.randint(0, 20, (30, 1), generator=generator) if padded else None
    if used is not None:
        places, values = places.masked_fill(~used, 0), values.masked_fill(~used.unsqueeze(2), 0.0)
    scale = torch.linspace(0, 1, 30, dtype=DOUBLE)
    values[0] = torch.nan  # whose scale is 0
    expected = torch.ones(5 + 50 * 600 + 3, dtype=DOUBLE)
    Rows(5, 50, places, values).add_to(expected, scale)
    sums = []
    for _ in range(2):
        total = torch.ones(expected.shape, dtype=DOUBLE, device="cuda")
        on_gpu = Rows(5, 50, places.cuda(), values.cuda(), None if used is None else used.cuda())
        on_gpu.add_to(total, scale.cuda())
        sums.append(total)
    assert torch.equal(*sums)
    torch.testing.assert_close(sums[0].cpu(), expected, rtol=1e-13, atol=1e-13)


@needs_gpu
@pytest.mark.parametrize("users", [1, 8, 21])
def test_spreading_writes_every_row_and_nothing_beside(users):
    row, rows = torch.randn(1, 3001, device="cuda"), torch.full((users + 1, 3001), 7.0, device="cuda")
    triton_sum.spread(row[0], rows[:users])
    assert torch.equal(rows[:users], row.expand(users, 3001))
    assert (rows[users:] == 7).all()
    rounded = torch.zeros(users, 3001, dtype=torch.bfloat16, device="cuda")
    triton_sum.spread(row[0], rounded)
    assert torch.equal(rounded, row.bfloat16().expand(users, 3001))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooling_on_a_gpu_equals_the_librarys_with_ties_too(dtype):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 3, (USERS, 2, 6, 8, 5), generator=generator).to("cuda", dtype).requires_grad_()
    pooled, _ = convolution.pool(pixels)
    grad = torch.randn(pooled.shape, generator=generator).to("cuda", dtype)
    (found,) = torch.autograd.grad(pooled, pixels, grad)
    flat = pixels.detach().float().flatten(0, 1).permute(0, 3, 1, 2).requires_grad_()
    expected = F.max_pool2d(flat, 2)
    (theirs,) = torch.autograd.grad(expected, flat, grad.float().flatten(0, 1).permute(0, 3, 1, 2))
    assert torch.equal(pooled.float().flatten(0, 1).permute(0, 3, 1, 2), expected)
    assert torch.equal(found.float().flatten(0, 1).permute(0, 3, 1, 2), theirs)


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


@needs_gpu
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of what it uses itself
@pytest.mark.parametrize("make", [lambda: PatchConv2d(3, 8, 3, padding=1), lambda: nn.Sequential(MatrixLSTM(8, 8))])
def test_layers_compile_in_a_stack(make):
    torch._dynamo.reset()  # what it learnt of one layer's shapes it would try on the other's
    layers, stack = stack_of(make)
    inputs = torch.randn(USERS, 2, *((3, 8, 8) if isinstance(layers[0], PatchConv2d) else (5, 8)))
    device = {name: param.detach().cuda().requires_grad_() for name, param in stack.items()}
    run = vmap(lambda p, x: functional_call(layers[0], p, (x,)).square().sum())
    layers[0].cuda()
    eager = torch.autograd.grad(run(device, inputs.cuda()).sum(), list(device.values()))
    compiled = torch.autograd.grad(torch.compile(run)(device, inputs.cuda()).sum(), list(device.values()))
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


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
