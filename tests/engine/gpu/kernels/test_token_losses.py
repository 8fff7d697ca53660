"""Losses of an output layer a few rows at a time, against torch's cross entropy on all logits."""

import pytest
import torch
import torch.nn.functional as F

from clipline.engine.gpu.kernels import token_losses as module
from clipline.engine.gpu.kernels.token_losses import token_losses


def made(users, rows, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(users, rows, 5, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(7, 5, generator=generator, dtype=dtype)
    return values, weight, torch.randint(7, (users, rows), generator=generator)


@pytest.mark.parametrize("held", [1, 14, 1 << 24])  # one row at a time, two, all of them
def test_losses_and_gradients_are_those_of_all_logits_however_few_are_held(monkeypatch, held):
    monkeypatch.setattr(module, "_LOGITS", held)
    (rows,), weight, (labels,) = made(1, 9)
    expected = F.cross_entropy(rows @ weight.T, labels, reduction="none")
    torch.testing.assert_close(token_losses(rows, weight, labels), expected)
    weights = torch.arange(9.0, dtype=torch.float64)  # each loss counts otherwise
    (found,) = torch.autograd.grad((token_losses(rows, weight, labels) * weights).sum(), rows)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), rows)
    torch.testing.assert_close(found, wanted)


def test_in_a_stack_every_user_gets_the_own_losses_and_gradients():
    rows, weight, labels = made(3, 4)
    stacked = torch.func.vmap(lambda rows, labels: token_losses(rows, weight, labels))(rows, labels)
    assert stacked.shape == (3, 4)
    (found,) = torch.autograd.grad(stacked.square().sum(), rows)
    for user in range(3):
        own = rows[user].detach().requires_grad_()
        expected = F.cross_entropy(own @ weight.T, labels[user], reduction="none")
        torch.testing.assert_close(stacked[user], expected)
        torch.testing.assert_close(found[user], torch.autograd.grad(expected.square().sum(), own)[0])


def test_an_output_layer_of_each_user_has_no_version_here():
    rows, weight, labels = made(2, 3)
    with pytest.raises(NotImplementedError, match="all users share"):
        torch.func.vmap(token_losses)(rows, torch.stack([weight, weight]), labels)


def test_rows_of_few_digits_have_losses_in_float32():
    rows, weight, labels = made(1, 6, torch.bfloat16)
    losses = token_losses(rows[0], weight, labels[0])
    assert losses.dtype == torch.float32
    expected = F.cross_entropy(rows[0].float() @ weight.float().T, labels[0], reduction="none")
    torch.testing.assert_close(losses, expected, rtol=0.02, atol=0.05)
