"""On cores a stack rounds each user's numbers alike, whoever else is in it; what is not known to is found."""

import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from samples import cross_entropies, flat_training, one_by_one, rows_of
from torch import nn
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from clipline import LocalAdam, LocalSGD, Population
from clipline.engine.choose import choose_trainer
from clipline.engine.gpu.kernels import lstm
from clipline.engine.stacked import rounding
from clipline.engine.stacked.probe import CannotStack
from clipline.engine.stacked.trainer import Stacked
from clipline.engine.stacked.vmap_layers import StackSafe
from clipline.random.streams import Streams

# Of x and y, (rows, columns) of one user: operations of which 8 users are enough, and what their backward passes use.
IN_FEW = {
    "acos": lambda x, y: x.tanh().acos(),
    "acosh": lambda x, y: (x.abs() + 1.1).acosh(),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y.abs() + 0.5, value=0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.3),
    "asin": lambda x, y: x.tanh().asin(),
    "asinh": lambda x, y: x.asinh(),
    "atan": lambda x, y: x.atan(),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.tanh().square(), (y > 0).to(x), reduction="none"),
    "cos": lambda x, y: x.cos(),
    "digamma": lambda x, y: (x.abs() + 0.1).lgamma(),
    "erf": lambda x, y: x.erf(),
    "erfc": lambda x, y: x.erfc(),
    "exp": lambda x, y: x.exp(),
    "expm1": lambda x, y: x.expm1(),
    "fmod": lambda x, y: x.fmod(0.7),
    "frac": lambda x, y: x.frac(),
    "hardsigmoid": lambda x, y: F.hardsigmoid(x),
    "hardswish": lambda x, y: F.hardswish(x),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "log": lambda x, y: (x.abs() + 0.1).log(),
    "log10": lambda x, y: (x.abs() + 0.1).log10(),
    "log1p": lambda x, y: x.abs().log1p(),
    "log2": lambda x, y: (x.abs() + 0.1).log2(),
    "log_sigmoid_forward": lambda x, y: F.logsigmoid(x),
    "mse_loss": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "pow": lambda x, y: x**2 + x**3 + (x.abs() + 0.1) ** 0.5 + (x.abs() + 0.1) ** -1,
    "remainder": lambda x, y: x.remainder(0.7),
    "rsqrt": lambda x, y: (x.abs() + 0.1).rsqrt(),
    "sin": lambda x, y: x.sin(),
    "softshrink": lambda x, y: F.softshrink(x),
    "tan": lambda x, y: x.tan(),
    "tanh": lambda x, y: x.tanh(),
    "xlogy": lambda x, y: torch.xlogy(x, y.abs() + 0.1),
    "avg_pool2d": lambda x, y: F.avg_pool2d(torch.stack([x, y]), 2, 1, 1),
    "avg_pool3d": lambda x, y: F.avg_pool3d(torch.stack([x, y]).unsqueeze(0), (2, 1, 1)),
    "cumprod": lambda x, y: x.cumprod(-1),
    "cumsum": lambda x, y: x.cumsum(-1) + x.cumsum(0),
    "linalg_vector_norm": lambda x, y: x.norm(dim=-1),
    "linalg_vector_norm of columns": lambda x, y: torch.linalg.vector_norm(x, dim=0),
    "linalg_vector_norm of all": lambda x, y: torch.linalg.vector_norm(x),
    "logcumsumexp": lambda x, y: x.logcumsumexp(-1),
    "logsumexp": lambda x, y: x.logsumexp(-1),
    "logsumexp of columns": lambda x, y: x.logsumexp(0),
    "mean": lambda x, y: x.mean(-1),
    "mean of columns": lambda x, y: x.mean(0),
    "mean of all": lambda x, y: x.mean(),
    "native_layer_norm": lambda x, y: F.layer_norm(x, x.shape[-1:], y[0], y[-1]),
    "norm": lambda x, y: torch.ops.aten.norm(x, 2, [1]),
    "sum": lambda x, y: x.sum(-1),
    "sum of columns": lambda x, y: x.sum(0),
    "sum of all": lambda x, y: x.sum(),
    "sum of squares": lambda x, y: (x * y).sum(),
    "_adaptive_avg_pool2d": lambda x, y: F.adaptive_avg_pool2d(torch.stack([x, y]), (1, 2)),
    "_log_softmax": lambda x, y: x.log_softmax(-1),
    "_softmax": lambda x, y: x.softmax(-1),
    "matmul": lambda x, y: x @ y.T,
    "matrix by vector": lambda x, y: x @ y[0],
    "linear": lambda x, y: F.linear(x, y, y[:, 0]),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "batches": lambda x, y: torch.bmm(torch.stack([x, y]), torch.stack([y.T, x.T])),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], x[None]),
    "convolution": lambda x, y: F.conv2d(x[None, None], y[:1, None, :2, None], padding=1),
    "points": lambda x, y: F.conv1d(x[None], y[:, :1, None].expand(-1, len(x), -1)),
    "points in groups": lambda x, y: F.conv1d(x[None], y[:, :1, None], groups=len(x)),
}
# The same for operations that round the end of an array otherwise.
IN_WHOLE_REGISTERS = {
    "sigmoid": lambda x, y: x.sigmoid(),
    "silu": lambda x, y: F.silu(x),
    "gelu": lambda x, y: F.gelu(x),
    "gelu by tanh": lambda x, y: F.gelu(x, approximate="tanh"),
    "softplus": lambda x, y: F.softplus(x),
    "mish": lambda x, y: F.mish(x),
    "elu": lambda x, y: F.elu(x),
    "celu": lambda x, y: F.celu(x, 1.5),
    "selu": lambda x, y: F.selu(x),
    "std": lambda x, y: torch.cat([x, y]).std(0),
    "std of rows": lambda x, y: x.std(-1),
    "var": lambda x, y: torch.cat([x, y]).var(0),
    "var of rows": lambda x, y: x.var(dim=-1, correction=0),
    "softmax of columns": lambda x, y: x.softmax(0),
    "log_softmax of columns": lambda x, y: F.log_softmax(x, dim=0),
    "pow of any power": lambda x, y: (x.abs() + 0.1) ** 1.7,
    "var_mean": lambda x, y: sum(torch.var_mean(x, -1)) + sum(torch.std_mean(x, -1)),
    "cross-entropy at places": lambda x, y: F.cross_entropy(x[None], (y[:1] > 9).long(), reduction="none"),
    "huber_loss": lambda x, y: (x + 2) * F.huber_loss(x, y, reduction="none", delta=0.3),
    "smooth_l1_loss": lambda x, y: (x + 2) * F.smooth_l1_loss(x, y, reduction="none", beta=0.7),
    "glu": lambda x, y: F.glu(torch.cat([x, y], -1)),
}
SHAPES = [(1, 2), (5, 1), (3, 7), (2, 33), (8, 16), (4, 61), (19, 25)]  # rows, columns


def forward_and_backward(function, x, y):
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()

    def safely(x, y):
        with StackSafe():
            return function(x, y)

    out = vmap(safely)(x, y)
    weights = torch.cos(torch.arange(out[0].numel(), dtype=x.dtype)).view_as(out[0])
    gradients = torch.autograd.grad((out * weights).sum(), [x, y], allow_unused=True)
    return [out.detach(), *(one for one in gradients if one is not None)]


def equal_where_finite(one, other):
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", [*IN_FEW, *IN_WHOLE_REGISTERS])
def test_a_call_of_fixed_size_rounds_a_user_alike_whoever_else_is_there_and_wherever_the_user_stands(name):
    function = {**IN_FEW, **IN_WHOLE_REGISTERS}[name]
    generator = torch.Generator().manual_seed(1)
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.float64):
        grain = 8 if name in IN_FEW else 128 // dtype.itemsize
        for shape in SHAPES:
            if name.startswith("convolution") and shape[1] < 2:
                continue
            x, y = (2 * torch.randn(3 * grain, *shape, generator=generator, dtype=dtype) for _ in range(2))
            together, everybody = forward_and_backward(function, x, y), torch.arange(3 * grain)
            for who in (everybody.roll(1), everybody[: 2 * grain].flip(0), everybody[-grain:]):
                for one, whole in zip(forward_and_backward(function, x[who], y[who]), together, strict=True):
                    assert equal_where_finite(one, whole[who]), (dtype, shape, len(who))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hidden", [1, 3, 16, 17])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_8_users_are_enough_for_recurrences(batch, hidden, dtype):
    generator, time, users = torch.Generator().manual_seed(0), 3, 48
    torch.set_num_threads(1)

    def numbers(*shape):
        return torch.randn(users, *shape, generator=generator, dtype=dtype)

    inputs, weight, grad = numbers(time, batch, 4 * hidden), numbers(4 * hidden, hidden), numbers(time, batch, hidden)
    active = numbers(time, batch) > -1

    def of_users(who):
        forward = lstm.stacked_lstm(inputs[who], weight[who], active[who])
        return *forward, *lstm.stacked_lstm_backward(grad[who], *forward, weight[who], active[who])

    everybody = torch.arange(users)
    whole = of_users(everybody)
    for who in (everybody[:8], everybody[16:24], everybody[:40].flip(0), everybody.roll(5)):
        for one, together in zip(of_users(who), whole, strict=True):
            assert torch.equal(one, together[who])


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func.overloadpacket).rstrip("_"))
        return func(*args, **(kwargs or {}))


def test_every_operation_on_the_lists_for_having_been_tried_is_tried_here():
    x = torch.randn(5, 3, 7)
    with Seen() as seen:
        for function in (*IN_FEW.values(), *IN_WHOLE_REGISTERS.values()):
            forward_and_backward(function, x, x.flip(0))
    assert {name for name in rounding.IN_WHOLE_REGISTERS if name.startswith("aten.")} <= seen.names
    known = rounding.IN_FEW | rounding.IN_WHOLE_REGISTERS
    assert {f"aten.{name.partition(' ')[0]}" for name in IN_FEW} & known <= seen.names


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("aten.sinh", torch.sinh),
        ("aten.linalg_matrix_exp", lambda x: torch.matrix_exp(x[:, :4])),
        ("aten._fft_r2c", lambda x: torch.fft.rfft(x).abs()),
    ],
)
def test_what_is_not_known_to_round_alike_is_found(name, function):
    values = torch.randn(7, 4, 6)
    with rounding.OperationsSeen() as seen:
        vmap(function)(values)
    assert name in seen.unknown


@pytest.mark.parametrize(
    ("users", "function"),
    [
        (8, lambda x: x.relu().log_softmax(-1) @ x.T),
        (32, lambda x: x.sigmoid()),
        (16, lambda x: x.double().sigmoid()),
        (64, lambda x: x.bfloat16() + 1),
        (32, lambda x: x.softmax(0)),
        (32, lambda x: torch.add(x, x, alpha=0.3)),
    ],
)
def test_how_many_users_leave_no_end_of_an_array(users, function):
    values = torch.randn(7, 4, 6)
    with rounding.OperationsSeen() as seen:
        vmap(function)(values)
    assert (seen.grain, seen.unknown) == (users, set())


def test_a_call_is_filled_up_with_copies_of_the_first_user_and_begins_at_a_multiple_of_64_bytes():
    values = torch.arange(12.0).view(6, 2)
    whole = rounding.filled(8, values[1:])
    assert whole[:, 0].tolist() == [2, 4, 6, 8, 10, 2, 2, 2]
    assert rounding.filled(8, whole) is whole
    assert values[1:].data_ptr() % 64
    moved = rounding.filled(5, values[1:])
    assert moved.data_ptr() % 64 == 0
    assert torch.equal(moved, values[1:])
    assert rounding.filled(4, torch.ones(3, 2, dtype=torch.uint16)).tolist() == [[1, 1]] * 4
    assert rounding.filled(8, torch.empty(5, 0, 2)).shape == (8, 0, 2)


def test_products_do_not_depend_on_where_a_matrix_lies_for_mkl_is_told_before_the_first():
    assert os.environ["MKL_CBWR"] == "AUTO"


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.out = kind(4, 7, batch_first=True), nn.Linear(7, 3)

    def forward(self, x):
        return self.out(self.layer(x.reshape(len(x), 5, 4))[0][:, -1])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.TransformerEncoderLayer(4, 2, 9, 0.1, "gelu", batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.layer(x.reshape(len(x), 5, 4)).mean(1))


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(*shape) / 4) for shape in ((20, 11), (3, 11)))

    def forward(self, x):
        return torch.einsum("bi,ci->bc", F.silu(x @ self.first), self.second)


SGD = LocalSGD(2.0, 6)
MODELS = {
    "silu": lambda: nn.Sequential(nn.Linear(20, 7), nn.SiLU(inplace=True), nn.Linear(7, 3)),
    "one unit": lambda: nn.Sequential(nn.Linear(20, 1), nn.Softplus(), nn.Linear(1, 3)),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "encoder": Encoder,
    "products": Products,
    "images": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2, 5)), nn.Conv2d(2, 3, 2, padding=1), nn.ELU(), nn.Conv2d(3, 8, 1), nn.Mish(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(24, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("local", [SGD, LocalAdam(0.3, 4, epochs=3)], ids=["sgd", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("model", MODELS)
def test_users_keep_every_bit_of_their_update_when_another_leaves(model, dtype, local):
    rng = np.random.default_rng(4)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 14, 19))])
    fields = {"x": rng.normal(size=(offsets[-1], 20)).astype(np.float64), "y": rng.integers(0, 3, offsets[-1])}
    torch.manual_seed(0)
    plain = one_by_one(MODELS[model]().to(dtype), cross_entropies, Population(offsets, fields), local, Streams(0))
    stack, users = Stacked(plain, 19), np.arange(19)
    assert not stack.rounds_by_company
    together = rows_of(stack, users)
    if local == SGD:  # Adam makes a step of a gradient that is rounding alone
        torch.testing.assert_close(together, rows_of(plain, users), rtol=1e-2, atol=1e-3)
    for left in (0, 7, 18):
        others = np.delete(users, left)
        assert torch.equal(rows_of(stack, others), together[others])


class Sinh(nn.Linear):
    def forward(self, x):
        return super().forward(x.sinh())


def test_auto_trains_one_by_one_what_is_not_known_and_says_which():
    rng = np.random.default_rng(0)
    people = Population.from_arrays(np.repeat(np.arange(9), 4), x=rng.normal(size=(36, 6)), y=rng.integers(0, 3, 36))
    settings = {"rounds": 1, "cohort_size": 5, "local": LocalSGD(0.1, 5), "seed": 0, "noise_multiplier": 0.5}
    made = flat_training(Sinh(6, 3).double(), cross_entropies, people, **settings)
    assert made.engine == (
        "one by one: stacking is disabled because aten.sinh may round differently depending on which users share the "
        "stack"
    )
    by_name = flat_training(Sinh(6, 3).double(), cross_entropies, people, engine="stacked", **settings)
    assert isinstance(by_name.trainer, Stacked)


def of_silu(**changes):
    rng = np.random.default_rng(0)
    people = Population(np.arange(0, 21, 2), {"x": rng.normal(size=(20, 20)), "y": rng.integers(0, 3, 20)})
    torch.manual_seed(0)
    return one_by_one(MODELS["silu"](), cross_entropies, people, LocalSGD(1.0, 5), Streams(0), **changes)


def test_an_operation_that_is_wrongly_on_a_list_is_found_by_the_trial(monkeypatch):
    assert Stacked(of_silu(), 10)._grain == 32
    monkeypatch.setattr(rounding, "IN_FEW", rounding.IN_FEW | rounding.IN_WHOLE_REGISTERS)
    monkeypatch.setattr(rounding, "IN_WHOLE_REGISTERS", frozenset())
    stack = Stacked(of_silu(), 10)
    assert stack.rounds_by_company == ""
    if stack._grain == 8:  # a processor that rounds this model alike in stacks of 8
        users = np.arange(10)
        assert torch.equal(rows_of(stack, users[1:]), rows_of(stack, users)[1:])
    else:
        assert stack._grain == 32  # 8 were tried and found to be too few


@pytest.mark.parametrize("coupling", ["place", "number", "company"])
def test_one_bit_that_another_user_decides_ends_stacking(coupling, monkeypatch):
    step = rounding.StackStep.__call__

    def tilted(self, stack, *arguments):
        step(self, stack, *arguments)
        weight = stack[0]
        everywhere = {"place": True, "number": len(weight) > 32, "company": bool((weight[-1].abs() > 1e3).any())}
        if everywhere[coupling]:
            weight[3 if coupling == "place" and len(weight) > 3 else 0].mul_(1 + 2e-7)

    monkeypatch.setattr(rounding.StackStep, "__call__", tilted)
    trained = choose_trainer("auto", of_silu(), 10)
    assert trained.in_words.startswith("one by one: stacking is disabled because on this machine made-up users")


def test_personal_parameters_are_refused_in_a_stack_that_may_round_by_company():
    rng = np.random.default_rng(0)
    people = Population(np.arange(0, 21, 2), {"x": rng.normal(size=(20, 6)), "y": rng.integers(0, 3, 20)})

    def plain(model):
        return one_by_one(model, cross_entropies, people, LocalSGD(1.0, 5), Streams(0), personal=["bias"])

    assert isinstance(choose_trainer("stacked", plain(nn.Linear(6, 3)), 10), Stacked)
    assert choose_trainer("auto", plain(Sinh(6, 3)), 10).in_words.startswith("one by one: stacking is disabled")
    with pytest.raises(CannotStack, match=r"personal parameters need exact stacks.*aten.sinh.*one-by-one"):
        choose_trainer("stacked", plain(Sinh(6, 3)), 10)
