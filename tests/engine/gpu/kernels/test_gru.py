"""The GRU's recurrence for a stack, there and back, against torch's own cell step by step."""

import torch
from torch import nn
from torch.library import opcheck

from clipline.engine.gpu.kernels.gru import gru, stacked_gru

USERS, TIME, BATCH, HIDDEN = 2, 5, 3, 4


def made(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def test_outputs_and_gradients_are_those_of_torchs_cell():
    inputs, weight = made(USERS, TIME, BATCH, 3 * HIDDEN, seed=0), made(USERS, 3 * HIDDEN, HIDDEN, seed=1)
    bias = made(USERS, 3 * HIDDEN, seed=2)
    wanted = made(USERS, TIME, BATCH, HIDDEN, seed=3).detach()
    outputs = stacked_gru(inputs, weight, bias)[0]
    found = torch.autograd.grad((outputs * wanted).sum(), [inputs, weight, bias])
    for user in range(USERS):
        cell = nn.GRUCell(3 * HIDDEN, HIDDEN, dtype=torch.float64)
        with torch.no_grad():  # what goes in is the product with the inputs already
            cell.weight_ih.copy_(torch.eye(3 * HIDDEN))
            cell.bias_ih.zero_()
            cell.weight_hh.copy_(weight[user])
            cell.bias_hh.copy_(bias[user])
        own, state, steps = inputs[user].detach().requires_grad_(), torch.zeros(BATCH, HIDDEN, dtype=torch.float64), []
        for t in range(TIME):
            state = cell(own[t], state)
            steps.append(state)
        torch.testing.assert_close(outputs[user], torch.stack(steps))
        grads = torch.autograd.grad((torch.stack(steps) * wanted[user]).sum(), [own, cell.weight_hh, cell.bias_hh])
        for mine, theirs in zip(found, grads, strict=True):
            torch.testing.assert_close(mine[user], theirs)


def test_one_user_is_a_stack_of_one_and_the_operation_is_declared_rightly():
    inputs, weight = made(TIME, BATCH, 3 * HIDDEN, seed=0).detach(), made(3 * HIDDEN, HIDDEN, seed=1).detach()
    bias = made(3 * HIDDEN, seed=2).detach()
    alone = stacked_gru(inputs[None], weight[None], bias[None])[0][0]
    assert torch.equal(gru(inputs, weight, bias), alone)
    opcheck(stacked_gru, (inputs[None], weight[None], bias[None]), test_utils=("test_schema", "test_faketensor"))
