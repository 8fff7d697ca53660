"""Cross entropy of an output layer with frozen weights, a few rows of logits at a time.

A batch of 16 x 512 tokens has 4 GiB of float32 logits over 128k words, and autograd would keep as much again. Here
they are made in both passes and dropped at once. On a GPU rows of all users of a stack are one product.

Plain twin: `F.cross_entropy(rows @ weight.T, labels, reduction="none")`.
Switch: a loss of your own in place of `causal_lm_loss`.
Held equal by: tests/engine/gpu/kernels/test_token_losses.py.
Buys: memory, as computed above and not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_LOGITS = 1 << 24  # held at a time: 64 MiB of float32


@torch.library.custom_op("clipline::token_losses", mutates_args=())
def token_losses(rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """(rows, features) by (words, features) -> (rows,) float32, or float64 for such rows. The weight gets no gradient.

    A label out of range counts as the nearest word: check it elsewhere, as an embedding of the same numbers does.
    """
    losses = rows.new_empty(len(rows), dtype=_wide(rows))
    for part in _parts(rows, weight):
        logits = (rows[part] @ weight.T).to(losses.dtype)
        labelled = logits.gather(1, labels[part, None].clamp(0, len(weight) - 1)).squeeze(1)
        losses[part] = logits.logsumexp(dim=1) - labelled
    return losses


@token_losses.register_fake
def _(rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], dtype=_wide(rows))


@torch.library.custom_op("clipline::token_losses_grad", mutates_args=())
def token_losses_grad(grad: Tensor, rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the rows: (softmax - one at the label) weight, times that of each loss."""
    out = torch.empty_like(rows)
    for part in _parts(rows, weight):
        scores = (rows[part] @ weight.T).to(grad.dtype).softmax(dim=1)
        labelled = labels[part, None].clamp(0, len(weight) - 1)
        scores.scatter_add_(1, labelled, torch.full_like(labelled, -1, dtype=scores.dtype))
        out[part] = (scores * grad[part, None]).to(weight.dtype) @ weight
    return out


@token_losses_grad.register_fake
def _(grad: Tensor, rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return torch.empty_like(rows)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return token_losses_grad(grad, *ctx.saved_tensors), None, None


token_losses.register_autograd(_backward, setup_context=_setup)


@token_losses.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], rows: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    if in_dims[1] is not None:
        raise NotImplementedError("token_losses needs an output layer that all users share")
    rows, labels = (
        one.movedim(dim, 0) if dim is not None else one.expand(info.batch_size, *one.shape)
        for one, dim in ((rows, in_dims[0]), (labels, in_dims[2]))
    )
    if rows.device.type == "cpu":  # user by user, from a multiple of 64 bytes on: rounded alike whoever else is there
        own = [token_losses(of_user.clone(), weight, words) for of_user, words in zip(rows, labels, strict=True)]
        return torch.stack(own), 0
    losses = token_losses(rows.reshape(-1, rows.shape[-1]), weight, labels.reshape(-1))
    return losses.view(labels.shape), 0


def _wide(rows: Tensor) -> torch.dtype:
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def _parts(rows: Tensor, weight: Tensor) -> Iterator[slice]:
    """Slices of the rows whose logits fit into `_LOGITS`."""
    size = max(1, _LOGITS // max(1, len(weight)))
    return (slice(start, start + size) for start in range(0, len(rows), size))
