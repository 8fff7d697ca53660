import pytest
import torch

from clipline import LocalAdam, LocalSGD, SettingError
from clipline.errors import ModuleError
from clipline.federated.local_sgd import per_example, takes_reference

LOSSES = torch.tensor([1.0, 2.0, 6.0, 100.0])
KEPT = torch.tensor([True, True, True, False])


def test_the_mean_or_the_sum_of_those_that_are_real():
    assert LocalSGD(0.1).reduced(LOSSES, KEPT).item() == 3.0
    assert LocalSGD(0.1, reduction="sum").reduced(LOSSES, KEPT).item() == 9.0
    nobody = torch.zeros(4, dtype=torch.bool)
    assert LocalSGD(0.1).reduced(LOSSES, nobody).item() == 0.0  # and no division by zero


@pytest.mark.parametrize("filling", [100.0, torch.inf, torch.nan])
def test_what_fills_a_batch_moves_neither_the_loss_nor_its_gradient(filling):
    losses = torch.tensor([1.0, 2.0, 6.0, filling], requires_grad=True)
    reduced = LocalSGD(0.1).reduced(losses, KEPT)
    (gradient,) = torch.autograd.grad(reduced, losses)
    assert reduced.item() == 3.0
    assert gradient.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])


def test_a_loss_is_one_number_or_one_for_each_example():
    assert per_example(torch.zeros(3), 3)
    assert not per_example(torch.zeros(()), 3)
    assert per_example(torch.zeros(1), 1)
    for bad in (torch.zeros(4), torch.zeros(3, 1), torch.zeros(1), 2.0, None):
        with pytest.raises(ModuleError, match="must return a tensor of one number, or of 3, one for each"):
            per_example(bad, 3)


def test_what_is_more_than_plain_sgd():
    assert LocalSGD(0.1, 5, 2, max_examples=7, reduction="sum", lr_schedule="cosine").plain_sgd
    for more in ({"momentum": 0.1}, {"weight_decay": 0.1}, {"proximal": 0.1}, {"clip_norm": 1.0}):
        assert not LocalSGD(0.1, **more).plain_sgd
    assert not LocalAdam(0.1).plain_sgd


@pytest.mark.parametrize("more", [{"betas": (0.9, 1.0)}, {"betas": 0.9}, {"eps": 0.0}, {"clip_norm": 0.0}])
def test_settings_of_adam_outside_their_limits_are_refused(more):
    with pytest.raises(SettingError, match=f"{next(iter(more))}.* must be"):
        LocalAdam(0.1, **more)


def test_a_loss_that_wants_the_rounds_parameters_calls_its_third_argument_so():
    assert takes_reference(lambda model, batch, reference: 0)
    assert not takes_reference(lambda model, batch, scale=2.0: 0)
    assert not takes_reference(lambda model, batch: 0)
    assert not takes_reference(max)
