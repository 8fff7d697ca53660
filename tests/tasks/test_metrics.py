import numpy as np
import pytest
import torch

from clipline import Population, SettingError
from clipline.tasks.metrics import evaluator, held_out, hits_without, sequence_loss

TEST = Population(np.array([0, 3, 3, 4, 7, 9]), {"x": np.arange(9, dtype=np.float64)})


class Anything(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))


def test_validation_and_test_are_disjoint_halves_of_the_users_and_original_is_all():
    assert held_out(TEST, "validation").tolist() == [0, 1, 2, 3, 7, 8]  # users 0, 2 and 4
    assert held_out(TEST, "test").tolist() == [4, 5, 6]  # users 1, who has nothing, and 3
    assert held_out(TEST, "original").tolist() == list(range(9))
    with pytest.raises(SettingError, match=r"evaluate_on='tests'.*did you mean 'test'"):
        held_out(TEST, "tests")


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_metrics_are_ratios_of_sums_whatever_the_batches(batch_size):
    def count(model, batch):
        assert batch["x"].dtype == torch.float32  # fractions take the type of the model
        return {
            "mean": (batch["x"].sum(), len(batch["x"])),
            "sum": (batch["x"].sum(), None),
            "none": (batch["x"].sum() * 0, 0),
        }

    metrics = evaluator(count, TEST, "original", batch_size=batch_size)(Anything())
    assert metrics == {"mean": 4.0, "sum": 36.0, "none": 0.0}


def test_only_the_first_examples_count_on_validation_but_all_on_test():
    def count(model, batch):
        return {"n": (torch.tensor(len(batch["x"])), None)}

    assert evaluator(count, TEST, "validation", batch_size=2, max_examples=4)(Anything()) == {"n": 4}
    assert evaluator(count, TEST, "original", batch_size=2, max_examples=4)(Anything()) == {"n": 4}
    assert evaluator(count, TEST, "test", batch_size=2, max_examples=1)(Anything()) == {"n": 3}


def test_the_mean_over_all_positions_or_over_those_that_are_not_padding():
    losses = torch.tensor([[1.0, 2.0], [3.0, 10.0]])
    targets = torch.tensor([[5, 5], [5, 0]])
    assert sequence_loss(losses, targets, padding_in_loss=True).tolist() == [1.5, 6.5]  # whose mean is that of all, 4
    assert sequence_loss(losses, targets, padding_in_loss=False).item() == 2.0
    assert sequence_loss(losses, targets * 0, padding_in_loss=False).item() == 0.0


def test_ignored_targets_count_neither_above_nor_below():
    targets = torch.tensor([[1, 2, 0, 3]])
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 1, 0, 3]]), 4).float()
    assert [int(n) for n in hits_without(logits, targets, (0,))] == [2, 3]
    assert [int(n) for n in hits_without(logits, targets, (0, 3))] == [1, 2]
    assert [int(n) for n in hits_without(logits, targets, ())] == [3, 4]
