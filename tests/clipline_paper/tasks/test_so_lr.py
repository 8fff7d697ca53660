import math

import pytest
import torch

from clipline import LocalSGD
from clipline_paper.tasks.so_lr import TASK, TagRegression, count, loss, multi_hot


class Scores(torch.nn.Module):
    """Logits that do not look at the words."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, words, weights):
        return self.logits


def posts(tags):
    count = len(tags)
    return {"words": torch.zeros(count, 128), "weights": torch.zeros(count, 128), "tags": torch.tensor(tags)}


def test_sparse_posts_equal_dense_rows_through_a_linear_layer():
    torch.manual_seed(0)
    model = TagRegression()
    words = torch.full((3, 128), 10_000, dtype=torch.int16)
    weights = torch.zeros(3, 128)
    words[0, :3], weights[0, :3] = torch.tensor([5, 9_999, 17], dtype=torch.int16), torch.tensor([0.5, 0.2, 0.1])
    words[1, :1], weights[1, :1] = 5, 1.0  # the third post has no known word
    dense = torch.zeros(3, 10_000)
    dense[0, [5, 9_999, 17]] = torch.tensor([0.5, 0.2, 0.1])
    dense[1, 5] = 1.0
    linear = torch.nn.Linear(10_000, 500)
    linear.weight.data, linear.bias.data = model.tags.weight.data.T.clone(), model.tags.bias.data.clone()
    torch.testing.assert_close(model(words, weights), linear(dense))
    batch = {"words": words, "weights": weights, "tags": torch.tensor([[3, -1], [4, 9], [-1, -1]])}
    expected = torch.nn.functional.binary_cross_entropy(torch.sigmoid(linear(dense)), multi_hot(batch["tags"], dense))
    torch.testing.assert_close(loss(model, batch).sum(), 3 * expected)
    loss(model, batch).sum().backward()
    (3 * expected).backward()
    torch.testing.assert_close(model.tags.weight.grad, linear.weight.grad.T, rtol=1e-4, atol=1e-7)
    touched = model.tags.weight.grad.abs().sum(dim=1).nonzero().flatten().tolist()
    assert touched == [5, 17, 9_999]  # rows of words that the posts do not hold stay where they are


def test_the_loss_is_a_mean_over_tags_and_a_sum_over_posts():
    model = Scores(torch.full((3, 500), math.log(3.0)))  # probability 3/4 of every tag
    batch = posts([[1, 2], [7, -1], [-1, -1]])
    expected = [(hits * math.log(4 / 3) + (500 - hits) * math.log(4)) / 500 for hits in (2, 1, 0)]
    losses = loss(model, batch)
    assert losses.tolist() == pytest.approx(expected, rel=1e-6)
    task = TASK.load(TASK.settings.overridden({"population_size": 2, "test_users": 2, "cohort_size": 1}, "here"))
    local = LocalSGD(1.0, reduction=task.reduction)
    assert local.reduced(losses, torch.ones(3, dtype=torch.bool)).item() == pytest.approx(sum(expected), rel=1e-6)


def test_recall_at_5_pools_all_true_tags_and_precision_all_guesses():
    logits = torch.full((2, 500), -9.0)
    logits[0, [1, 2, 3, 4, 5]] = torch.tensor([3.0, 2.0, 1.0, -1.0, -2.0])  # three above a half
    logits[1, [10, 11, 12, 13, 14]] = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0])
    counted = count(Scores(logits), posts([[1, 5, 6, 7], [499, -1, -1, -1]]))
    top, true = counted["recall_at_5"]
    assert (int(top), int(true)) == (2, 5)  # 1 and 5 of 1, 5, 6, 7 and 499: 0.4; a mean over posts would be 0.25
    right, guessed = counted["precision"]
    assert (int(right), int(guessed)) == (1, 3)
