"""How much faster users with LoRA adapters train stacked than one by one, on one processor core, by size of the base.

python benchmarks/adapters.py

Both ways in one process, by turns, three times each; the least counts. Needs the extra `adapters`. A minute or two.
"""

from __future__ import annotations

import os
import platform
import time
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


def main() -> None:
    """Print the table."""
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
