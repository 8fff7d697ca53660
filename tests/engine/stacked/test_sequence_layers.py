"""Recurrences and attention of torch, in a stack: torch's own there and back, or a reason why not."""

import copy

import numpy as np
import pytest
import torch
from samples import one_by_one, rows_of
from torch import nn
from torch.func import functional_call, vmap

from clipline import LocalSGD, Population
from clipline.engine.stacked.probe import CannotStack
from clipline.engine.stacked.trainer import Stacked
from clipline.engine.stacked.vmap_layers import replace_layers
from clipline.random.streams import Streams

DOUBLE = torch.float64
USERS = 3


def assert_torchs_in_a_stack(layer, shape, pick, **options):
    """What the layer gives in a stack and the gradients of its squares, and the same by torch, user by user."""
    generator = torch.Generator().manual_seed(1)
    layer = layer.to(DOUBLE).train()
    ours = replace_layers(copy.deepcopy(layer))
    assert list(ours.state_dict()) == list(layer.state_dict())
    weights = {
        name: torch.randn(USERS, *param.shape, generator=generator, dtype=DOUBLE).requires_grad_()
        for name, param in layer.named_parameters()
    }
    inputs = torch.randn(USERS, *shape, generator=generator, dtype=DOUBLE)
    stacked = vmap(lambda own, x: pick(functional_call(ours, own, (x,), options)))(weights, inputs)
    stacked.square().sum().backward()
    for user in range(USERS):
        alone = copy.deepcopy(layer)
        with torch.no_grad():
            for name, param in alone.named_parameters():
                param.copy_(weights[name][user])
        wanted = pick(alone(inputs[user], **options))
        torch.testing.assert_close(stacked[user], wanted)
        wanted.square().sum().backward()
        for name, param in alone.named_parameters():
            torch.testing.assert_close(weights[name].grad[user], param.grad, rtol=1e-9, atol=1e-9)


def outputs(given):
    return given[0]


def last_state(given):
    return given[1][0] if isinstance(given[1], tuple) else given[1]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (5, 2, 4)),
        ({"batch_first": True}, (2, 5, 4)),
        ({"num_layers": 2, "batch_first": True, "bias": False}, (2, 5, 4)),
        ({"num_layers": 3}, (5, 4)),  # one sequence, without a batch
        ({}, (1, 2, 4)),
    ],
)
@pytest.mark.parametrize("pick", [outputs, last_state])
def test_a_recurrence_in_a_stack_is_torchs_there_and_back(kind, options, shape, pick):
    assert_torchs_in_a_stack(kind(4, 6, **options), shape, pick)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(("layers", "shape", "bias"), [(1, (5, 2, 4), True), (2, (5, 2, 4), False), (2, (5, 4), True)])
def test_a_recurrence_from_a_given_state_is_torchs_and_gives_out_its_cell(kind, layers, shape, bias):
    state = torch.linspace(-1, 1, layers * 2 * 6, dtype=DOUBLE).view(layers, 2, 6)
    state = state[:, 0] if len(shape) == 2 else state
    start = (state, state.neg()) if kind is nn.LSTM else state
    for last in (0, 1) if kind is nn.LSTM else (0,):  # the state, the cell
        pick = (lambda given, last=last: given[1][last]) if kind is nn.LSTM else last_state
        assert_torchs_in_a_stack(kind(4, 6, layers, bias=bias), shape, pick, hx=start)
    assert_torchs_in_a_stack(kind(4, 6, layers, bias=bias), shape, outputs, hx=start)


PADDED = torch.tensor([[False, False, True, True], [True] * 4, [False] * 4])  # the second looks nowhere
CAUSAL = nn.Transformer.generate_square_subsequent_mask(4, dtype=DOUBLE)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"src_key_padding_mask": PADDED}, {"src_mask": CAUSAL, "is_causal": True}, {"src_mask": CAUSAL.isinf()},
     {"src_mask": CAUSAL.isinf().repeat(6, 1, 1), "src_key_padding_mask": PADDED}],
    ids=["plain", "padded", "causal", "causal by truth", "both, by head"],
)  # fmt: skip
def test_an_encoder_layer_in_a_stack_is_torchs_there_and_back(norm_first, options):
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=norm_first)
    assert_torchs_in_a_stack(layer, (3, 4, 8), lambda given: given, **options)


def test_attention_with_time_first_and_without_a_batch_is_torchs():
    attention = nn.MultiheadAttention(8, 2, bias=False)
    for shape in ((4, 3, 8), (4, 8)):
        assert_torchs_in_a_stack(_SelfAttention(attention), shape, lambda given: given)


class _SelfAttention(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Sequences(nn.Module):
    """24 features as four steps of six, a layer over them, and three classes."""

    def __init__(self, layer, width=6):
        super().__init__()
        self.layer, self.out = layer, nn.Linear(width, 3)

    def forward(self, x):
        given = self.layer(x.view(-1, 4, 6))
        return self.out((given[0] if isinstance(given, tuple) else given)[:, -1])


def trained(layer, width=6):
    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(6), [3, 1, 9, 0, 5, 2])[:-1]
    population = Population.from_arrays(
        ids, known_users=np.arange(6), x=rng.normal(size=(len(ids), 24)), y=rng.integers(0, 3, len(ids))
    )
    torch.manual_seed(0)

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    model = Sequences(layer, width).double()
    return one_by_one(model, loss, population, LocalSGD(0.3, batch_size=4, epochs=2), Streams(0))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.LSTM(6, 6, 2, batch_first=True),
        lambda: nn.GRU(6, 6, batch_first=True),
        lambda: FromZeros(),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, 0.3, batch_first=True), 2),
    ],
    ids=["lstm", "gru", "lstm from zeros", "encoder with dropout"],
)
def test_a_stack_trains_users_as_one_by_one_with_the_same_dropout(layer):
    plain = trained(layer())
    users = np.arange(6)
    torch.testing.assert_close(rows_of(Stacked(plain, 6), users), rows_of(plain, users), rtol=1e-9, atol=1e-11)
    twice = [rows_of(plain, users) for _ in range(2)]
    assert torch.equal(*twice)


class Cell(nn.Module):
    """Uses the last cell, through a layer of torch's own."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x):
        steps, (_, cell) = self.lstm(x)
        return steps + cell[-1].unsqueeze(1)


class FromZeros(nn.Module):
    """As tutorials write it."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x):
        zeros = torch.zeros(1, x.size(0), 6, dtype=x.dtype)
        steps, (_, cell) = self.lstm(x, (zeros, zeros))
        return steps + cell[-1].unsqueeze(1)


@pytest.mark.parametrize(
    ("layer", "width", "why"),
    [
        (lambda: nn.LSTM(6, 3, batch_first=True, bidirectional=True), 6, r"nn\.LSTM in two directions has no version"),
        (lambda: nn.LSTM(6, 6, batch_first=True, proj_size=4), 4, r"nn\.LSTM with a projection has no version"),
        (lambda: nn.GRU(6, 6, 2, batch_first=True, dropout=0.1), 6, r"nn\.GRU with dropout has no version"),
        (Cell, 6, "the last cell|_NoCell"),
    ],
    ids=["two directions", "projection", "dropout between layers", "last cell"],
)
def test_what_has_no_version_for_a_stack_trains_one_by_one_and_says_why(layer, width, why):
    plain = trained(layer(), width)
    assert rows_of(plain, np.arange(3)).abs().max() > 0
    with pytest.raises(CannotStack, match=why):
        Stacked(plain, 6)
