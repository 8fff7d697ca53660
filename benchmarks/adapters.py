"""How fast do users with LoRA adapters train?

    python benchmarks/adapters.py                    stacked against one by one on a core, by size of the base
    python benchmarks/adapters.py --gpu qwen2        seconds a round and memory on a GPU: 387 million parameters
    python benchmarks/adapters.py --gpu tinyllama    1.1 billion, 100 users a round, 512 tokens

Peer on a core: the same users one by one, by turns, three times each; the least counts. On a GPU there is none yet.
Needs the extra `adapters`. Last results: docs/adapters.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import dataclass
from datetime import date

import numpy as np
import torch

import clipline as cl
from clipline.engine.choose import work_of_a_step

SIZES = ((32, 2, 16), (64, 2, 32), (128, 2, 32), (128, 4, 64))  # width, layers, tokens
USERS, EACH, BATCH, ROUNDS, TURNS = 16, 8, 4, 1, 3


def trainings(width: int, layers: int, tokens: int) -> dict[str, cl.Training]:
    """The same training by both engines, on a Llama of this size with LoRA of rank 8 on queries and values."""
    import peft
    import transformers as hf

    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=4
    )
    lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(hf.LlamaForCausalLM(config), lora)
    ids = np.random.default_rng(0).integers(1, 256, (USERS * EACH, tokens))
    users = cl.Population.from_arrays(np.repeat(np.arange(USERS), EACH), input_ids=ids)

    def made(engine: str) -> cl.Training:
        return cl.Training(
            model, cl.causal_lm_loss, users, rounds=ROUNDS, cohort_size=USERS,
            local=cl.LocalSGD(lr=0.1, batch_size=BATCH), privacy=cl.Privacy(noise_multiplier=1.0, sampling="fixed"),
            compute=cl.Compute(engine=engine), seed=0,
        )  # fmt: skip

    return {engine: made(engine) for engine in ("stacked", "one-by-one")}


@dataclass(frozen=True)
class OnGpu:
    """A base and the work of a round."""

    kind: str  # of transformers
    sizes: dict[str, int]
    users: int
    each: int
    tokens: int


ON_GPU = {
    "qwen2": OnGpu(
        "Qwen2",
        {
            "vocab_size": 32_000, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2,
        },
        32, 16, 128,
    ),
    "tinyllama": OnGpu(
        "Llama",
        {
            "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
            "num_attention_heads": 32, "num_key_value_heads": 4,
        },
        100, 4, 512,
    ),
}  # fmt: skip


class Clock(cl.Callback):
    """When each round ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_round(self, report: object, state: object) -> None:
        """Note the time, once the GPU is done."""
        torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def on_gpu(name: str, rounds: int) -> None:
    """Print seconds a round, to the first round, and memory."""
    import peft
    import transformers as hf

    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    work = ON_GPU[name]
    config = getattr(hf, f"{work.kind}Config")(**work.sizes, tie_word_embeddings=work.kind == "Qwen2")
    base = getattr(hf, f"{work.kind}ForCausalLM")(config).to("cuda", torch.bfloat16)
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.float()
    ids = np.random.default_rng(0).integers(1, config.vocab_size, (work.users * work.each, work.tokens))
    users = cl.Population.from_arrays(np.repeat(np.arange(work.users), work.each), input_ids=ids)
    begun, clock = time.perf_counter(), Clock()
    training = cl.Training(
        model, cl.causal_lm_loss, users, rounds=rounds, cohort_size=work.users,
        local=cl.LocalSGD(lr=0.1, batch_size=BATCH), privacy=cl.Privacy(noise_multiplier=1.0, sampling="fixed"),
        compute=cl.Compute(device="cuda", precision="bf16", engine="stacked"), seed=0,
    )  # fmt: skip
    training.run([clock])
    total = sum(param.numel() for param in model.parameters())
    print(f"{date.today().isoformat()}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{name}: {total / 1e6:.0f}M parameters, {training.dim:,} trained; {training.engine}")
    later = ", ".join(f"{seconds:.3f}" for seconds in np.diff(clock.ends))
    print(f"first round after {clock.ends[0] - begun:.1f} s, then {later} s a round")
    print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=list(ON_GPU))
    parser.add_argument("--rounds", type=int, default=7, help="on a GPU")
    wanted = parser.parse_args()
    if wanted.gpu:
        on_gpu(wanted.gpu, wanted.rounds)
        return
    torch.set_num_threads(1)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread"
    print(f"{date.today().isoformat()}, {machine};")
    print(f"{USERS} users a round with {EACH} sequences each in batches of {BATCH}; processor seconds a round,")
    print(f"least of {TURNS}\n")
    print("| width, layers, tokens | parameters (trained) | tokens x parameters | one by one | stacked | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size in SIZES:
        both = trainings(*size)
        least = dict.fromkeys(both, float("inf"))
        for _ in range(TURNS):
            for engine, training in both.items():
                start = time.process_time()
                training.run()
                least[engine] = min(least[engine], (time.process_time() - start) / ROUNDS)
        problem = both["stacked"].problem
        total = sum(p.numel() for p in problem.model.module.parameters())
        plain, stacked = least["one-by-one"], least["stacked"]
        print(
            f"| {', '.join(map(str, size))} | {total:,} ({problem.model.dim:,}) | {work_of_a_step(problem):.1e} | "
            f"{plain:.2f} | {stacked:.2f} | {plain / stacked:.1f} |"
        )


if __name__ == "__main__":
    main()
