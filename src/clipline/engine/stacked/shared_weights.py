"""Products with a weight that all users share under vmap, which note what each user's gradient consists of.

vmap keeps users apart: a model sees one user's example, and nothing of the others. A weight that is not batched is the
same for all of them, so a layer's products run as one product over all users. autograd would add up their gradients of
such a weight. The functions here form none: their backward passes note the layer's inputs and the gradients of its
outputs, user by user, and pass on the gradient of the inputs. Convolutions note gradients of the weight.

Plain twin, switch, test and what it buys: see `shared_step.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import Function
from torch.nn.grad import conv2d_input
from torch.overrides import TorchFunctionMode

from ..core.vmap_axis import is_batched
from .aligned import aligned_product, aligned_product_backward, outer_products

_PATCHED = 32  # images whose patches are formed at a time: more do not fit the cache

Kind = Literal["linear", "convolution", "embedding"]


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a weight, by all users: the inputs, and the gradients of what came out. PRIVATE.

    A convolution has no inputs here, and its gradients are those of the weight itself, (users, numbers in it), channels
    last: it has so many positions and so few weights that forming them is less work than anything else.
    """

    kind: Kind
    inputs: Tensor | None = field(repr=False)  # (users, positions, in); for an embedding (users, positions) row numbers
    gradients: Tensor = field(repr=False)  # (users, positions, out)

    def first(self, count: int | None) -> Use:
        """That of the first `count` users, or of all."""
        return Use(self.kind, None if self.inputs is None else self.inputs[:count], self.gradients[:count])


class Notes:
    """What the backward pass of a step notes: the uses of each weight, by name."""

    def __init__(self) -> None:
        self.uses: dict[str, list[Use]] = {}
        self.open = False  # whether the step's own backward pass runs

    def add(self, name: str, use: Use) -> None:
        """Note a use. Refused outside the step's own backward pass, as where a loss takes a gradient itself."""
        if not self.open:
            raise NotImplementedError("a gradient that is taken inside the loss has no version for shared weights")
        inputs = None if use.inputs is None else use.inputs.detach()
        self.uses.setdefault(name, []).append(Use(use.kind, inputs, use.gradients.detach()))


class SharedWeights(TorchFunctionMode):
    """Active while the loss of users is computed under vmap: products with the weights in `shared` are noted.

    Names of weights that are used so, shared or not, are added to `seen`. `zero` is a 0 that is batched over users.
    """

    def __init__(self, named: Mapping[str, Tensor], shared: frozenset[str], notes: Notes, zero: Tensor) -> None:
        super().__init__()
        self._names = {id(weight): name for name, weight in named.items()}
        self._shared, self._notes, self._zero = shared, notes, zero
        self.seen: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """`func`, or a product that is noted."""
        noted = _NOTED.get(func)
        name = self._names.get(id(args[1])) if noted is not None and len(args) > 1 else None
        prepared = None if noted is None or name is None else noted(*args, **(kwargs or {}))
        if prepared is None or name is None:
            return func(*args, **(kwargs or {}))
        self.seen.add(name)
        if name not in self._shared:
            return func(*args, **(kwargs or {}))
        values, function, more, bias, squeezed = prepared
        # What no user's data enter, such as positions, is batched too: its gradient would else be a sum over users.
        values = values if is_batched(values) else values + self._zero.to(values.dtype)
        out = _for_all_users(function, values, args[1], self._notes, name, *more)
        for axis in squeezed:
            out = out.squeeze(axis)
        return out if bias is None else out + bias


# A function's inputs; the function below that notes it and what that takes; the bias, in shape to be added; axes of
# size 1 to remove from the output.
Prepared = tuple[Tensor, type[Function], tuple[Any, ...], Tensor | None, Sequence[int]]


def _linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Prepared:
    return values, _Linear, (), bias, ()


def _embedding(
    numbers: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Prepared | None:
    """Within `StackSafe`, which takes care of `padding_idx` and of numbers out of range."""
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    return numbers, _Embedding, (), None, ()


def _convolution(
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Prepared | None:
    """`conv1d` and `conv2d`, the former as a convolution of images of height 1. Not in groups, not padded unevenly."""
    axes = weight.ndim - 2
    if groups != 1:
        return None
    steps, dilations = _each(stride, axes), _each(dilation, axes)
    if isinstance(padding, str):
        needed = [each * (size - 1) for each, size in zip(dilations, weight.shape[2:], strict=True)]
        if padding == "same" and any(zeros % 2 for zeros in needed):
            return None
        padding = [0] * axes if padding == "valid" else [zeros // 2 for zeros in needed]
    zeros = _each(padding, axes)
    squeezed = [] if values.ndim == axes + 2 else [0]
    values = values if not squeezed else values.unsqueeze(0)
    if axes == 1:
        values, squeezed = values.unsqueeze(2), [2, *squeezed]
        steps, zeros, dilations = (1, *steps), (0, *zeros), (1, *dilations)
    bias = bias if bias is None else bias.reshape(-1, *[1] * axes)
    return values, _Convolution, (steps, zeros, dilations), bias, squeezed


_NOTED: dict[Any, Callable[..., Prepared | None]] = {
    F.linear: _linear,
    torch.conv1d: _convolution,
    torch.conv2d: _convolution,
    F.embedding: _embedding,
}


def _each(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * axes if len(numbers) == 1 else numbers


def _for_all_users(function: type[Function], values: Tensor, *arguments: Any) -> Tensor:
    """`function` of the values of all users at once, (users, ...), where `values` are one user's under vmap.

    Below vmap, as a rule of vmap for `function` would run, but without its search for tensors among all arguments,
    which takes longer than a small product. Within a further transform, as of a loss, `function` refuses to run.
    """
    level, axis = _functorch.maybe_get_level(values), _functorch.maybe_get_bdim(values)
    rows = _functorch.get_unwrapped(values).movedim(axis, 0)
    with temporarily_pop_interpreter_stack():
        out = function.apply(rows, *arguments)  # type: ignore[no-untyped-call]
    batched: Tensor = _functorch._add_batch_dim(out, 0, level)
    return batched


class _Linear(Function):
    """(users, ..., in) by (out, in) -> (users, ..., out)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, notes: Notes, name: str) -> Tensor:
        """One product over all users."""
        ctx.save_for_backward(values, weight)
        ctx.notes, ctx.name = notes, name
        return aligned_product(values, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Note inputs and gradients."""
        values, weight = ctx.saved_tensors
        ctx.notes.add(ctx.name, Use("linear", _rows(values), _rows(gradient)))
        return aligned_product_backward(gradient, weight) if ctx.needs_input_grad[0] else None, None, None, None


class _Embedding(Function):
    """(users, ...) numbers of rows of (height, out) -> (users, ..., out)."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, weight: Tensor, notes: Notes, name: str) -> Tensor:
        """One look-up for all users."""
        ctx.save_for_backward(numbers)
        ctx.notes, ctx.name = notes, name
        return F.embedding(numbers, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        """Note numbers and gradients."""
        (numbers,) = ctx.saved_tensors
        users, positions = len(numbers), numbers[0].numel()
        ctx.notes.add(
            ctx.name, Use("embedding", numbers.reshape(users, positions), gradient.reshape(users, positions, -1))
        )
        return None, None, None, None


class _Convolution(Function):
    """(users, images, channels, height, width) by (out, channels, [1,] height, width), as `F.conv2d`.

    Channels are last in memory, in which torch pools several times faster.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, notes: Notes, name: str, *how: Any) -> Tensor:
        """One convolution of all users' images."""
        sizes, images = images.shape[:2], images.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        kernel = (weight if weight.ndim == 4 else weight.unsqueeze(2)).contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(images, kernel)
        ctx.notes, ctx.name, ctx.sizes, ctx.how = notes, name, sizes, how
        out = F.conv2d(images, kernel, None, *how).contiguous(memory_format=torch.channels_last)
        return out.reshape(*sizes, *out.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Note the users' gradients of the weight, (users, out * height * width * channels)."""
        images, kernel = ctx.saved_tensors
        gradient = gradient.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        images_each = ctx.sizes[1]
        step, formed = max(1, _PATCHED // images_each) * images_each, []
        for some, outputs in zip(torch.split(images, step), torch.split(gradient, step), strict=True):
            rows = (_patches(some, kernel.shape, *ctx.how), outputs.permute(0, 2, 3, 1).flatten(1, 2))
            inputs, outputs = (one.reshape(-1, images_each * one.shape[1], one.shape[2]) for one in rows)
            formed.append(outer_products(outputs, inputs))
        ctx.notes.add(ctx.name, Use("convolution", None, torch.cat(formed)))
        found = None
        if ctx.needs_input_grad[0]:
            found = conv2d_input(images.shape, kernel, gradient, *ctx.how).unflatten(0, ctx.sizes)  # type: ignore[no-untyped-call]
        return found, None, None, None, None, None, None


def _patches(
    images: Tensor, kernel: torch.Size, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """(images, channels, ...) -> (images, places, height * width * channels): what the kernel sees at each place."""
    (down, right), zeros = padding, any(padding)
    maps = (F.pad(images, (right, right, down, down)) if zeros else images).permute(0, 2, 3, 1)
    for axis in (0, 1):
        covered = dilation[axis] * (kernel[2 + axis] - 1) + 1
        maps = maps.unfold(1 + axis, covered, stride[axis])[..., :: dilation[axis]]
    return maps.permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(1, 2)


def _rows(values: Tensor) -> Tensor:
    """(users, ..., width) -> (users, positions, width)."""
    return values.reshape(len(values), -1, values.shape[-1])
