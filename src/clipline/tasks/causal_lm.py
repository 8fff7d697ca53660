"""The loss and the perplexity of causal language models of Hugging Face, alone or under PEFT adapters."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.population import Population
from ..engine.core.batches import Examples
from ..engine.core.vmap_axis import is_batched
from ..engine.gpu.kernels.token_losses import token_losses
from ..errors import SettingError, check_whole
from ..federated.local_sgd import Batch

IGNORED = -100  # a label that does not count, as in transformers
# Models whose logits are those of the output layer on the last hidden states, and nothing more.
_PLAIN_HEADS = frozenset(
    ["GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)


def causal_lm_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of the next token for each sequence. Use it as the `loss` of a `Training`.

    If the output layer is frozen and the model is GPT-2, Llama, Mistral or Qwen 2 or 3, its logits are made a few rows
    at a time and never held whole.

    Args:
      model: A Hugging Face causal language model, with adapters or without.
      batch: Has "input_ids" (sequences, length). Padding is on the right, where "attention_mask" is 0; without a mask
        "input_ids_length" says how many tokens count. "labels" may say what to predict at each place; -100 does not
        count.

    Returns:
      One number for each sequence, 0 for one without tokens to predict.

    Raises:
      KeyError: If the batch lacks "input_ids".

    Example:
      >>> cl.Training(model, cl.causal_lm_loss, people, ...)
    """
    sums, counts = _sums(model, batch)
    return sums / counts.clamp(min=1)


class Perplexity:
    """Perplexity on users outside the training: exp of the mean loss of a token.

    Every token weighs the same, so that a user weighs by the number of tokens. Metrics have no noise.

    Args:
      population: Users who do not take part in the training.
      batch_size: Sequences of a batch.

    Raises:
      SettingError: If the population has no "input_ids", or `batch_size` is not positive.

    Example:
      >>> training.run([cl.Evaluate(cl.Perplexity(test))])
    """

    def __init__(self, population: Population, *, batch_size: int = 64) -> None:
        if not isinstance(population, Population) or population.examples == 0:
            raise SettingError("population must be one with examples: give users outside the training")
        self.population = population
        self.batch_size = check_whole("batch_size", batch_size, at_least=1, way_out="64 is a usual choice")

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        """{"perplexity": ...}, infinite beyond what a float holds."""
        device = next(model.parameters()).device
        examples = Examples(self.population, device, torch.float32)
        total, tokens = 0.0, 0
        for start in range(0, self.population.examples, self.batch_size):
            stop = min(start + self.batch_size, self.population.examples)
            sums, counts = _sums(model, examples.between(start, stop))
            total, tokens = total + float(sums.double().sum()), tokens + int(counts.sum())
        mean = total / max(tokens, 1)
        return {"perplexity": math.exp(mean) if mean < 700 else math.inf}


def _sums(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The sum of the losses of all tokens of each sequence, and how many there are: (sequences,) each."""
    ids = batch["input_ids"].long()
    labels = batch.get("labels", ids).long()[:, 1:]
    given: dict[str, Any] = {"input_ids": ids}
    counted = labels != IGNORED
    if (mask := _mask(batch)) is not None:
        given["attention_mask"] = mask
        counted = counted & (mask[:, 1:] != 0)
    elif is_batched(ids):  # without one, transformers looks at values, which a stack of users cannot
        given["attention_mask"] = torch.ones(ids.shape, dtype=torch.long, device=ids.device)
    labels = torch.where(counted, labels, 0)
    inner = _with_plain_head(model)
    if inner is None:
        logits = model(**given).logits
        logits = logits[:, -ids.shape[1] :]  # prompts of adapters come first
        losses = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), labels, reduction="none")
    else:
        hidden = inner.get_decoder()(**given).last_hidden_state[:, :-1]
        weight = inner.get_output_embeddings().weight
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        losses = token_losses(hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1)).view(labels.shape)
    return torch.where(counted, losses, 0.0).sum(dim=1), counted.sum(dim=1)


def _mask(batch: Batch) -> Tensor | None:
    """(sequences, length) whole numbers, 0 where there is padding; None if nothing says where."""
    if "attention_mask" in batch:
        return batch["attention_mask"].long()
    if "input_ids_length" in batch:
        lengths, width = batch["input_ids_length"], batch["input_ids"].shape[1]
        return (torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)).long()
    return None


def _with_plain_head(model: nn.Module) -> Any:
    """The model inside adapters whose hidden states can be taken to the output layer here; None if there is none."""
    inner: Any = model
    if hasattr(model, "peft_config"):
        if any(getattr(one, "is_prompt_learning", True) for one in model.peft_config.values()):  # type: ignore[operator]
            return None
        inner = model.get_base_model()  # type: ignore[operator]
    if type(inner).__name__ not in _PLAIN_HEADS:
        return None
    head = inner.get_output_embeddings()
    plain = isinstance(head, nn.Linear) and head.bias is None and not head.weight.requires_grad
    plain = plain and type(head.weight) in (Tensor, nn.Parameter)  # a quantisation library's own class knows no others
    return inner if plain and not is_batched(head.weight) else None
