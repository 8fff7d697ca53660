import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from samples import one_by_one

from clipline import LocalSGD, Population
from clipline.random.streams import Streams
from clipline_paper.facts import FACTS
from clipline_paper.tasks.so_nwp import TASK, WordLSTM, count, loss

OOV, BOS, EOS = 10_001, 10_002, 10_003


class Constant(torch.nn.Module):
    """The same logits everywhere: the end is the likeliest, by a factor of e."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.nn.functional.one_hot(torch.tensor(EOS), 10_004).float())

    def forward(self, tokens):
        return self.logits.expand(*tokens.shape, -1)


def sentences():
    tokens = torch.zeros(2, 21, dtype=torch.int16)
    tokens[0, :5] = torch.tensor([BOS, 4, OOV, 9, EOS])  # targets: 2 words, 1 unknown, 1 end, 16 padding
    tokens[1, :2] = torch.tensor([BOS, EOS])
    return {"tokens": tokens}


def test_layer_by_layer():
    model = WordLSTM()
    count = {name: sum(p.numel() for p in child.parameters()) for name, child in model.named_children()}
    assert count == {"embedding": 960_384, "lstm": 2_055_560, "projection": 64_416, "out": 970_388}
    assert sum(count.values()) == 4_050_748
    with torch.no_grad():
        assert model(torch.ones(2, 20, dtype=torch.long)).shape == (2, 20, 10_004)


def test_the_loss_is_a_mean_over_all_positions_with_padding_as_in_the_original():
    hit, miss = math.log(10_003 + math.e) - 1, math.log(10_003 + math.e)
    losses = loss(Constant(), sentences())
    assert losses.tolist() == pytest.approx([(hit + 19 * miss) / 20] * 2, rel=1e-6)  # one for each sentence
    assert losses.mean().item() == pytest.approx((2 * hit + 38 * miss) / 40, rel=1e-6)
    without = loss(Constant(), sentences(), padding_in_loss=False).item()
    assert without == pytest.approx((2 * hit + 3 * miss) / 5, rel=1e-6)
    assert TASK.settings.padding_in_loss is True


def test_three_accuracies_by_what_they_leave_out():
    counted = {name: (int(a), b if b is None else int(b)) for name, (a, b) in count(Constant(), sentences()).items()}
    assert counted == {
        "accuracy_with_oov": (2, 5),
        "accuracy_no_oov": (2, 4),
        "accuracy_no_oov_or_eos": (0, 2),
        "num_tokens": (5, None),
    }
    assert TASK.metric_name == "accuracy_no_oov_or_eos"


@pytest.mark.parametrize("task", ["so_nwp", "so_lr"])
def test_pitfall_defaults_that_drift_the_first_1000_examples_are_taken_and_then_shuffled(task):
    assert FACTS[task].max_examples == 1000
    population = Population(np.array([0, 2500]), {"x": np.arange(2500)})
    local = LocalSGD(0.1, batch_size=FACTS[task].batch_size, max_examples=FACTS[task].max_examples)
    record = Mock()

    def recording(model, batch):
        record(batch["x"].tolist())
        return model.weight.sum()

    trainer = one_by_one(torch.nn.Linear(1, 1), recording, population, local, Streams(0))
    record.reset_mock()  # made-up examples
    trainer.block(trainer.problem.model.initial, np.array([0]), 0)
    seen = [value for call in record.call_args_list for value in call.args[0]]
    assert sorted(seen) == list(range(1000))
    assert seen != list(range(1000))
