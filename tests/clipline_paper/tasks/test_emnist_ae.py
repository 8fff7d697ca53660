import math

import pytest
import torch

from clipline import LocalSGD
from clipline_paper.tasks.emnist_ae import TASK, Autoencoder, count, ink_of


def blank(images=2, value=255):
    return torch.full((images, 28, 28), value, dtype=torch.uint8)


def test_autoencoder_layer_by_layer():
    model = Autoencoder()
    widths = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
    assert [tuple(layer.weight.shape) for layer in model.layers] == list(zip(widths[1:], widths[:-1], strict=True))
    assert sum(p.numel() for p in model.parameters()) == 2_837_314


def test_only_the_code_of_30_is_linear():
    model = Autoencoder()
    for param in model.parameters():
        param.data.zero_()
    for layer in model.layers:
        layer.bias.data.fill_(-4.0)
    inputs = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, arguments, output: inputs.append(arguments[0].unique().item()))
    out = model(torch.zeros(1, 784))
    half = 1 / (1 + math.exp(4.0))
    assert inputs[1:] == pytest.approx([half, half, half, -4.0, half, half, half])
    assert out.unique().item() == pytest.approx(half)


def test_input_and_target_are_ink():
    assert ink_of(blank(), torch.float32).abs().max() == 0
    assert ink_of(blank(value=0), torch.float32).unique().tolist() == [1.0]
    assert ink_of(blank(3), torch.float64).shape == (3, 784)


class Grey(torch.nn.Module):
    """Draws everything as half ink."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, ink):
        return self.weight.expand_as(ink)


def test_pitfall_defaults_that_drift_the_autoencoder_loss_is_a_sum_over_the_batch():
    batch = {"pixels": torch.cat([blank(3), blank(2, value=0)])}
    task = TASK.load(TASK.settings.overridden({"population_size": 2, "test_users": 2, "cohort_size": 1}, "here"))
    local = LocalSGD(1.0, reduction=task.reduction)
    losses = task.loss(Grey(), batch)
    assert losses.tolist() == pytest.approx([0.25] * 5)
    assert local.reduced(losses, torch.ones(5, dtype=torch.bool)).item() == pytest.approx(5 * 0.25)  # a mean: 0.25
    error, examples = count(Grey(), batch)["mean_squared_error"]
    assert error.item() / examples == pytest.approx(0.25)
    assert TASK.settings.client_lr == pytest.approx(3.1622777)
