"""Attention that `torch.func.vmap` batches: explicit products and a softmax in place of torch's fused kernels.

vmap has no rule for `F.scaled_dot_product_attention` and would loop over the users. Models of Hugging Face also look
at the values of their padding mask to choose a kernel, which a stack of users cannot do, and drop attention weights
with numbers from torch's global generator, which users would share.

Plain twin: `F.scaled_dot_product_attention`, and the model's own choice of attention.
Switch: `engine="one-by-one"`.
Held equal by: tests/engine/stacked/test_attention.py.
Buys: a Llama of width 64 with LoRA, 16 users on one core: 0.24 s a round one by one, 0.10 stacked (adapters.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.user_random import UserRandom
from ..core.vmap_axis import in_vmap

_PREFIX = "clipline_"  # of these forms of attention in transformers' registry
_FORMS = ("sdpa", "eager")
_SOURCE = "clipline_dropout"  # the submodule that draws what attention drops


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    weighed: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention`: softmax(query key^T scale + mask) value, the softmax in float32 or more.

    A query with all keys masked gives zeros, as in torch. The weights are dropped by `F.dropout`, which has no version
    for a stack unless `_DropoutFrom` gives one. `weighed` is a function of the weights, after the softmax.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = (query @ key.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    nowhere = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        nowhere = ~attn_mask.any(dim=-1, keepdim=True)
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    elif attn_mask is not None:
        scores = scores + attn_mask
    wide = torch.float32 if scores.dtype in (torch.bfloat16, torch.float16) else scores.dtype
    weights = scores.softmax(dim=-1, dtype=wide).to(value.dtype)
    if nowhere is not None:
        weights = weights.masked_fill(nowhere, 0.0)
    weights = weights if weighed is None else weighed(weights)
    return (F.dropout(weights, dropout_p) if dropout_p > 0 else weights) @ value


def use_stackable_attention(module: nn.Module) -> str:
    """Let the transformers models in `module`, a working copy, attend in a way that stacks; in words, or "" if none do.

    The code stays the model's own, "sdpa" or "eager". Masks are made without looking at the values of stacked users,
    and what dropout drops comes from the user's own numbers, in both engines. Models with another attention, or whose
    attention is not chosen by name, are left alone.
    """
    library: Any = sys.modules.get("transformers")
    if "transformers.modeling_utils" not in sys.modules or not hasattr(library, "AttentionMaskInterface"):
        return ""  # no model is of it, or the library is older than these registries
    configs: dict[int, Any] = {id(part.config): part.config for part in module.modules() if _chooses(library, part)}
    for name in _FORMS:
        library.AttentionInterface.register(_PREFIX + name, partial(_attention, name))
        library.AttentionMaskInterface.register(_PREFIX + name, partial(_mask, name))
    for part in list(module.modules()):
        if id(getattr(part, "config", None)) in configs and "attention" in type(part).__name__.lower():
            part.add_module(_SOURCE, UserRandom())
    for config in configs.values():
        config._attn_implementation = _PREFIX + config._attn_implementation
        config.use_cache = False  # keys and values of a training step are not used again
    return "attention as explicit products" if configs else ""


def _chooses(library: Any, part: nn.Module) -> bool:
    """Whether it is a transformers model whose attention is chosen by name, and one of `_FORMS` is."""
    return (
        isinstance(part, library.PreTrainedModel)
        and part.config._attn_implementation in _FORMS
        and getattr(part, "_can_set_attn_implementation", bool)()
        and _eager_of(part) is not None
        and not getattr(part.config, "reorder_and_upcast_attn", False)  # of GPT-2, with a form of its own
    )


def _eager_of(part: nn.Module) -> Callable[..., Any] | None:
    """The eager attention of the file that defines this module, as transformers' files have one."""
    eager: Callable[..., Any] | None = getattr(sys.modules.get(type(part).__module__), "eager_attention_forward", None)
    return eager


def _attention(form: str, module: nn.Module, *args: Any, dropout: float = 0.0, **kwargs: Any) -> Any:
    """The attention of `module` in this form, with dropout from the module's own source."""
    attend = (_eager_of(module) if form == "eager" else None) or sys.modules["transformers"].AttentionInterface()[
        "sdpa"
    ]
    source = getattr(module, _SOURCE, None)
    if dropout == 0 or source is None:
        return attend(module, *args, dropout=dropout, **kwargs)
    with _DropoutFrom(source):
        return attend(module, *args, dropout=dropout, **kwargs)


def _mask(form: str, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The mask of this form; in a stack in full, as whether it can be left out depends on values."""
    if attention_mask is not None and in_vmap():
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    make = sys.modules["transformers"].AttentionMaskInterface()[form]
    mask: Tensor | None = make(*args, attention_mask=attention_mask, **kwargs)
    return mask


class _DropoutFrom(TorchFunctionMode):
    """Within, `F.dropout` draws from this source, and attention with dropout is explicit."""

    def __init__(self, source: UserRandom) -> None:
        super().__init__()
        self._source = source

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """`func`, or its version with this source."""
        if func is F.scaled_dot_product_attention:
            with self:  # a mode is off while it handles a call
                return explicit_attention(*args, **(kwargs or {}))
        return (self._dropout if func is F.dropout else func)(*args, **(kwargs or {}))

    def _dropout(self, values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return values
        return values * 0 if p == 1 else values * self._source.kept(values, p)
