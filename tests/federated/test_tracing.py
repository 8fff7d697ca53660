"""One traced program for any number of users."""

import pytest
import torch

from clipline.federated.tracing import traced


def halved(stack, rates):
    """Something whose traced constants depend on the number of users in several ways."""
    (weights,) = stack
    users, width = weights.shape
    table = torch.arange(users * width).view(users, width)
    weights.sub_(table.reshape(-1, 1).expand(users * width, 2).sum(dim=1).view(users, width) * rates.view(-1, 1))


@pytest.mark.filterwarnings("ignore")
def test_a_program_traced_for_two_numbers_of_users_serves_all():
    program = traced(halved, ([torch.zeros(3, 4)], torch.ones(3)))
    for users in (1, 2, 5, 13, 40):
        ours, expected = torch.zeros(users, 4), torch.zeros(users, 4)
        rates = torch.linspace(0, 1, users)
        program([ours], rates)
        halved([expected], rates)
        assert torch.equal(ours, expected)
        assert users == 1 or ours.abs().sum() > 0


@pytest.mark.filterwarnings("ignore")
def test_a_step_whose_course_depends_on_the_number_of_users_is_refused():
    def branching(stack, rates):
        stack[0].sub_(rates.view(-1, 1) if len(rates) < 15 else rates.view(-1, 1).exp())

    with pytest.raises(ValueError, match=r"another course|argument"):
        traced(branching, ([torch.zeros(3, 4)], torch.ones(3)))

    def squared(stack, rates):
        stack[0].sub_(torch.zeros(len(rates) ** 2).sum())

    with pytest.raises(ValueError, match="evenly"):
        traced(squared, ([torch.zeros(3, 4)], torch.ones(3)))
