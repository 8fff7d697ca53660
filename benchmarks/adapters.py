"""How fast do users with LoRA adapters train?

    python benchmarks/adapters.py                    stacked against one by one on a core, by size of the base
    python benchmarks/adapters.py --gpu qwen2        seconds a round and memory on a GPU: 387 million parameters
    python benchmarks/adapters.py --gpu tinyllama    1.1 billion, 100 users a round, 512 tokens
    python benchmarks/adapters.py --gpu qwen2 --peer loop --peer pfl      beside a hand-written loop and pfl-research
    python benchmarks/adapters.py --gpu tiny --device cpu --peer loop     to try the script

Peer on a core: the same users one by one, by turns, three times each; the least counts. On a GPU every system has a
process of its own, one after the other (benchmarks/lora); pfl is looked for in benchmarks/.carry (peers/carry.py) too.
Needs the extra `adapters`. Last results: docs/howto/adapters.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
from lora.work import BATCH, WORKS

import clipline as cl
from clipline.engine.choose import work_of_a_step

SIZES = ((32, 2, 16), (64, 2, 32), (128, 2, 32), (128, 4, 64))  # width, layers, tokens
USERS, EACH, ROUNDS, TURNS = 16, 8, 1, 3
BENCHMARKS, OURS, PEERS = Path(__file__).resolve().parent, "clipline", ("loop", "pfl")


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


def measure(system: str, wanted: argparse.Namespace) -> str:
    """A row of the table: what one system took, in a process of its own that is ended after `wanted.timeout` seconds.

    What it had done by then counts; the row says that it was ended.
    """
    rounds = wanted.rounds if system == OURS else wanted.peer_rounds
    flags = ["--base", wanted.gpu, "--rounds", str(rounds), "--device", wanted.device]
    paths = [str(BENCHMARKS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if wanted.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    ready, ends, peak = "", [], 0
    command = [sys.executable, str(BENCHMARKS / "lora" / f"{system}_rounds.py"), *flags]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        timer = threading.Timer(wanted.timeout, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            ready, peak = answer.get("ready", ready), answer.get("peak_memory_bytes", peak)
            ends += [answer["round"]] if "round" in answer else []
            print(f"   {system} {line.strip()}", file=sys.stderr, flush=True)
        code = process.wait()
        timer.cancel()
        errors.seek(0)
        said = [text for text in errors.read().splitlines() if text.strip()]
    if code and not ends:
        reason = f"no round within {wanted.timeout:g} s" if code < 0 else (said[-1] if said else f"code {code}")
        return f"| {system} | - | - | - | {ready} ({reason}) |"
    later = np.diff(ends)
    seconds = f"{np.median(later):.3g} ({later.min():.3g} to {later.max():.3g})" if len(later) else "-"
    memory = f"{peak / 2**30:.1f} GiB" if peak else "-"
    why = f": {said[-1]}" if code > 0 and said else ""
    ended = f" (ended after {len(ends)} of {rounds} rounds{why})" if code else ""
    return f"| {system} | {ends[0]:.1f} | {seconds} | {memory} | {ready}{ended} |"


def beside_peers(wanted: argparse.Namespace) -> None:
    """Print a row for each system, as soon as it is there."""
    work = WORKS[wanted.gpu]
    device = torch.cuda.get_device_name() if wanted.device == "cuda" else "processor"
    print(f"{date.today().isoformat()}, {device}, torch {torch.__version__}; {wanted.gpu}: {work.users} users a round,")
    print(f"{work.each} sequences of {work.tokens} tokens each in batches of {BATCH}; seconds: to the end of the first")
    print("round, from when the model was on the device; of later rounds the median and the range\n")
    print("| system | first round | later rounds | memory at most | what ran |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for system in (OURS, *wanted.peer):
        print(measure(system, wanted), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=list(WORKS), metavar="BASE", help=", ".join(WORKS))
    parser.add_argument("--rounds", type=int, default=7, help="of clipline, on a GPU")
    parser.add_argument("--peer", action="append", choices=PEERS, default=[], help="once for each")
    parser.add_argument("--peer-rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each system")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="with --gpu")
    wanted = parser.parse_args()
    if wanted.gpu:
        beside_peers(wanted)
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
