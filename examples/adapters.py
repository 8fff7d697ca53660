"""A Hugging Face language model with LoRA adapters: trained privately on users' texts, saved, reloaded and asked.

`python examples/adapters.py` makes a small Llama from a config and trains it on public sentences first, so that
nothing is downloaded; it takes seconds. A comment shows the line for a real checkpoint. Needs the extra `adapters`.
"""

import copy
import tempfile

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import clipline

rng = np.random.default_rng(0)
LENGTH, EOS = 24, 256  # bytes of a text, longer ones are cut; after the bytes 0 to 255, the token that ends a text


def tokenised(texts: list[str]) -> dict[str, np.ndarray]:
    """A byte is a token. The first EOS ends the text and counts; what follows is padding."""
    ids = np.full((len(texts), LENGTH), EOS)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = list(text.encode()[: LENGTH - 1])
    return {"input_ids": ids, "attention_mask": (np.cumsum(ids == EOS, axis=1) <= 1).astype(np.int64)}


def sentences(verb: str, things: str, count: int) -> list[str]:
    """Made-up texts: replace them by yours."""
    return [f"{verb} the {rng.choice(things.split())} {rng.choice(['on', 'off'])}" for _ in range(count)]


torch.manual_seed(0)
base = LlamaForCausalLM(LlamaConfig(vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                    num_attention_heads=4, bos_token_id=EOS, eos_token_id=EOS))  # fmt: skip
# base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")  # a real one, with its tokeniser; leave out the loop
optimiser = torch.optim.Adam(base.parameters(), lr=5e-3)
for _ in range(150):
    public = tokenised(sentences("switch", "lamp radio heater oven fan", 32))
    clipline.causal_lm_loss(base, {name: torch.tensor(field) for name, field in public.items()}).mean().backward()
    optimiser.step(), optimiser.zero_grad()
owner = np.repeat(np.arange(5_500), rng.integers(1, 5, 5_500))
texts = sentences("turn", "lamp radio alarm", len(owner))
users, others = clipline.Population.from_arrays(owner, **tokenised(texts)).split(test=500, seed=0)
lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
training = clipline.Training(
    get_peft_model(copy.deepcopy(base), lora), clipline.causal_lm_loss, users, rounds=60, cohort_size=100,
    local=clipline.LocalSGD(lr=0.2, batch_size=4), clip=clipline.QuantileClip(start=0.3),
    server=clipline.ServerSGD(0.3), privacy=clipline.Privacy(epsilon=4.0, population_size=5_000), seed=0,
)  # fmt: skip
print(f"perplexity {clipline.Perplexity(others)(base)['perplexity']:.2f} before; users train {training.engine}")
result = training.run([clipline.Evaluate(clipline.Perplexity(others), every=20), clipline.Progress()])
print(result)
with tempfile.TemporaryDirectory() as folder:
    result.save(folder)  # adapter_config.json and adapter_model.safetensors, as PEFT has them, and a card
    model = PeftModel.from_pretrained(base, folder).eval()
answer = model.generate(input_ids=torch.tensor([list(b"turn the r")]), max_new_tokens=20, do_sample=False)
print(bytes(token for token in answer[0].tolist() if token < EOS).decode(errors="replace"))
