import math

import numpy as np
import pytest
import torch

from clipline.tasks import emnist_ae, emnist_cr
from clipline.tasks.emnist_ae import Autoencoder
from clipline.tasks.emnist_cr import CharacterNet


def blank(count=2, value=255):
    return torch.full((count, 28, 28), value, dtype=torch.uint8)


def shapes_of(model):
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def test_character_net_layer_by_layer():
    model = CharacterNet()
    assert shapes_of(model) == {
        "conv1.weight": (32, 9), "conv1.bias": (32,), "conv2.weight": (64, 288), "conv2.bias": (64,),
        "hidden.weight": (128, 9216), "hidden.bias": (128,), "out.weight": (62, 128), "out.bias": (62,),
    }  # fmt: skip
    assert sum(p.numel() for p in model.parameters()) == 320 + 18_496 + 1_179_776 + 7_998 == 1_206_590


def test_weights_start_glorot_uniform_and_biases_at_zero():
    torch.manual_seed(0)
    model = CharacterNet()
    for weight, fans in ((model.conv2.weight, 288 + 576), (model.hidden.weight, 9216 + 128), (model.out.weight, 190)):
        limit = (6 / fans) ** 0.5
        assert 0.98 * limit < weight.abs().max() <= limit
    assert all(p.abs().max() == 0 for name, p in model.named_parameters() if name.endswith("bias"))


def test_paper_is_one_and_ink_is_zero_to_the_character_net():
    seen = []
    model = CharacterNet()
    model.conv1.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    model(blank())
    model(blank(value=0))
    assert seen[0].unique().tolist() == [1.0]
    assert seen[1].unique().tolist() == [0.0]


def test_dropout_is_a_quarter_and_a_half_and_only_in_training():
    model = CharacterNet()
    assert [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)] == [0.25, 0.5]
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 28, 28), np.uint8))
    assert not torch.equal(model(image), model(image))
    model.eval()
    assert torch.equal(model(image), model(image))


def test_cross_entropy_is_a_mean_over_the_batch():
    model = CharacterNet()
    for param in model.parameters():
        param.data.zero_()
    model.out.bias.data[7] = math.log(2.0)  # 2 against 61 ones
    batch = {"pixels": blank(), "labels": torch.tensor([7, 0], dtype=torch.uint8)}
    assert emnist_cr.loss(model, batch).item() == pytest.approx((math.log(63 / 2) + math.log(63)) / 2)
    right, answers = emnist_cr.count(model, batch)["accuracy"]
    assert (int(right), answers) == (1, 2)


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
    assert emnist_ae.ink_of(blank(), torch.float32).abs().max() == 0
    assert emnist_ae.ink_of(blank(value=0), torch.float32).unique().tolist() == [1.0]
    assert emnist_ae.ink_of(blank(3), torch.float64).shape == (3, 784)


class Grey(torch.nn.Module):
    """Draws everything as half ink."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, ink):
        return self.weight.expand_as(ink)


def test_pitfall_defaults_that_drift_the_autoencoder_loss_is_a_sum_over_the_batch():
    batch = {"pixels": torch.cat([blank(3), blank(2, value=0)])}
    assert emnist_ae.loss(Grey(), batch).item() == pytest.approx(5 * 0.25)  # a mean would be 0.25
    error, examples = emnist_ae.count(Grey(), batch)["mean_squared_error"]
    assert error.item() / examples == pytest.approx(0.25)
    assert emnist_ae.TASK.settings.client_lr == pytest.approx(3.1622777)
