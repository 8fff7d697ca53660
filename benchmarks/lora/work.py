"""The work of a round that every system does: a base with LoRA, users, their sequences; and how a system tells of it.

    out  {"ready": "387M parameters, 540,672 trained; loop, torch 2.11.0"}
    out  {"round": 15.2, "peak_memory_bytes": 23500000000}     after each: seconds since the model was on the device

What libraries print goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

BATCH, CLIENT_LR, START_CLIP, NOISE_MULTIPLIER = 4, 0.1, 0.1, 1.0
SERVER_LR, SERVER_MOMENTUM = 1.0, 0.9


@dataclass(frozen=True)
class Work:
    """A base and the work of a round."""

    kind: str  # of transformers
    sizes: dict[str, int]
    users: int
    each: int  # sequences of a user
    tokens: int


WORKS = {
    "qwen2": Work(
        "Qwen2",
        {
            "vocab_size": 32_000, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2,
        },
        32, 16, 128,
    ),
    "tinyllama": Work(
        "Llama",
        {
            "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
            "num_attention_heads": 32, "num_key_value_heads": 4,
        },
        100, 4, 512,
    ),
    "tiny": Work(
        "Qwen2",
        {
            "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        },
        4, 8, 16,
    ),
}  # fmt: skip


def arguments() -> argparse.Namespace:
    """What every system is started with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", choices=list(WORKS), required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def model_and_ids(name: str, device: str) -> tuple[Any, np.ndarray]:
    """The base in bfloat16 on the device with LoRA of rank 8 in float32; ids, (users, sequences, tokens) int64.

    Every system gets the same numbers. On a processor the base is float32.
    """
    import peft
    import transformers as hf

    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    work = WORKS[name]
    config = getattr(hf, f"{work.kind}Config")(**work.sizes, tie_word_embeddings=work.kind == "Qwen2", use_cache=False)
    base = getattr(hf, f"{work.kind}ForCausalLM")(config)
    base = base.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.float()
    ids = np.random.default_rng(0).integers(1, config.vocab_size, (work.users, work.each, work.tokens))
    return model.train(), ids


class Rounds:
    """Tells when rounds end."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # a library that prints must not answer for us
        self._begun = time.perf_counter()

    def start(self) -> None:
        """The model is on the device: start the clock."""
        self._begun = time.perf_counter()

    def ready(self, model: torch.nn.Module, versions: str) -> None:
        """Say what trains."""
        sizes = [(param.numel(), param.requires_grad) for param in model.parameters()]
        total, trained = sum(size for size, _ in sizes), sum(size for size, wanted in sizes if wanted)
        self._say({"ready": f"{total / 1e6:.0f}M parameters, {trained:,} trained; {versions}"})

    def done(self) -> None:
        """A round is over, once the device is done; also say the most memory so far, the GPU's or the process's."""
        if self.cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._say({"round": time.perf_counter() - self._begun, "peak_memory_bytes": peak})

    def _say(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)
