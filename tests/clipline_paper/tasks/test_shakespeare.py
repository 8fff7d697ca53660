import math

import pytest
import torch

from clipline_paper.tasks.shakespeare import TASK, CharacterLSTM, count, loss


class Constant(torch.nn.Module):
    """The same logits everywhere: number 5 is e times as likely as each other."""

    def __init__(self, size=90):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.eye(size)[5])

    def forward(self, tokens):
        return self.logits.expand(*tokens.shape, -1)


def rows():
    tokens = torch.zeros(2, 81, dtype=torch.uint8)
    tokens[0] = 5
    tokens[1, :3] = torch.tensor([88, 5, 7])  # of 80 targets two are real: 5 and 7
    return {"tokens": tokens}


def test_layer_by_layer():
    model = CharacterLSTM()
    count = {name: sum(p.numel() for p in child.parameters()) for name, child in model.named_children()}
    assert count == {"embedding": 720, "lstm1": 271_360, "lstm2": 525_312, "out": 23_130}
    assert sum(count.values()) == 820_522
    assert model(torch.ones(2, 80, dtype=torch.long)).shape == (2, 80, 90)


def test_initial_weights_are_those_of_keras():
    torch.manual_seed(0)
    model = CharacterLSTM()
    assert model.lstm2.weight_ih.std().item() == pytest.approx((2 / 256) ** 0.5, rel=0.02)  # he_normal
    assert 0.045 < model.embedding.weight.abs().max() <= 0.05
    assert model.lstm1.bias[256:512].unique().tolist() == [1.0]
    assert model.out.bias.abs().max() == 0


def test_padding_does_not_move_the_state():
    torch.manual_seed(0)
    model = CharacterLSTM()
    tokens = torch.tensor([[88, 4, 9, 0, 0, 0]])
    logits = model(tokens)[0]
    torch.testing.assert_close(logits[2:], logits[2:3].expand(4, -1))


def test_the_loss_is_a_mean_over_all_positions_with_padding_as_in_the_original():
    hit, miss = math.log(89 + math.e) - 1, math.log(89 + math.e)
    with_padding = (81 * hit + 79 * miss) / 160
    without = (81 * hit + miss) / 82
    losses = loss(Constant(), rows())
    assert losses.tolist() == pytest.approx([hit, (hit + 79 * miss) / 80], rel=1e-6)  # one for each row
    assert losses.mean().item() == pytest.approx(with_padding, rel=1e-6)
    assert loss(Constant(), rows(), padding_in_loss=False).item() == pytest.approx(without, rel=1e-6)
    assert TASK.settings.padding_in_loss is True


def test_accuracy_leaves_padding_out():
    right, answers = count(Constant(), rows())["accuracy"]
    assert (int(right), int(answers)) == (81, 82)
