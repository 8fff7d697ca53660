import math

import pytest
import torch

from clipline import LocalSGD
from clipline_paper.tasks.emnist_cr import TASK, CharacterNet, count, loss


def blank(images=2, value=255):
    return torch.full((images, 28, 28), value, dtype=torch.uint8)


def test_character_net_layer_by_layer():
    model = CharacterNet()
    assert [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)] == [0.25, 0.5]
    assert {name: tuple(param.shape) for name, param in model.named_parameters()} == {
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


def test_cross_entropy_is_a_mean_over_the_batch():
    model = CharacterNet()
    for param in model.parameters():
        param.data.zero_()
    model.out.bias.data[7] = math.log(2.0)  # 2 against 61 ones
    batch = {"pixels": blank(), "labels": torch.tensor([7, 0], dtype=torch.uint8)}
    losses = loss(model, batch)
    assert losses.tolist() == pytest.approx([math.log(63 / 2), math.log(63)])
    task = TASK.load(TASK.settings.overridden({"population_size": 2, "test_users": 2, "cohort_size": 1}, "here"))
    local = LocalSGD(1.0, reduction=task.reduction)
    mean = local.reduced(losses, torch.ones(2, dtype=torch.bool)).item()
    assert mean == pytest.approx((math.log(63 / 2) + math.log(63)) / 2)
    right, answers = count(model, batch)["accuracy"]
    assert (int(right), answers) == (1, 2)
