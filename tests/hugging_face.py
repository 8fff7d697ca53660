"""Small models of Hugging Face with adapters, made from configs. Imported where they are used: they take seconds."""

import importlib.util

import numpy as np
import pytest
import torch

from clipline import Population

needs_adapters = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "peft")),
    reason='needs transformers and peft: pip install "clipline[adapters]"',
)
WORDS, LENGTH = 60, 8


def base(name, dropout=0.0, **options):
    """A model of two layers of width 32. "gpt2" and "bert" have dropout in attention too."""
    import transformers as hf

    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    wide = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "gpt2":
        dropped = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=WORDS, **sizes, **dropped, **options))
    if name == "bert":
        dropped = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
        return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=WORDS, **wide, **dropped, **options))
    kind = {"llama": "Llama", "qwen2": "Qwen2"}[name]
    config = getattr(hf, f"{kind}Config")(
        vocab_size=WORDS, **wide, num_key_value_heads=2, attention_dropout=dropout, **options
    )
    return getattr(hf, f"{kind}ForCausalLM")(config)


def with_lora(model, **options):
    """The model under LoRA adapters, not at zero: at the start half of their gradients would be."""
    from peft import LoraConfig, get_peft_model

    targets = [name for name in ("c_attn", "q_proj", "v_proj", "query", "value") if name in str(model)]
    options |= {"fan_in_fan_out": "c_attn" in targets}  # GPT-2 stores its weights transposed
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options))


def texts(users=6, padded=True):
    """Users with one to four sequences; padding on the right."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(users), 1 + np.arange(users) % 4)
    ids = rng.integers(1, WORDS, (len(owner), LENGTH))
    mask = np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (len(owner), 1)) if padded else np.ones_like(ids, bool)
    return Population.from_arrays(owner, input_ids=np.where(mask, ids, 0), attention_mask=mask.astype(np.int64))
