"""Which models stack, train one by one or are refused, and why: each is tried, and docs/results/models.md says so.

python studies/models.py [--write]

Every model is small, made here, and trains a round of made-up users. Needs the extra `adapters`; a minute on a core.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "docs"))
from wrap import wrapped

import clipline as cl
from clipline.engine.stacked.probe import CannotStack
from clipline.errors import ModuleError

PAGE = Path(__file__).parents[1] / "docs" / "results" / "models.md"
WORDS, LENGTH, SIDE = 60, 8, 8
Batch = dict[str, Tensor]


class Case(NamedTuple):
    """A model to try, on "images" (1, 8, 8), "rows" of 16 numbers, or "texts" of 8 tokens, all with 3 classes."""

    name: str
    make: Callable[[], nn.Module]
    data: str = "rows"
    loss: str = "classes"  # or "language": the next token


class Row(NamedTuple):
    """What came of it."""

    name: str
    answer: str  # "stacks", "trains one by one", "refused"
    words: str


class Residual(nn.Module):
    """Two convolutions with group norm, and what came in added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return torch.relu(x + self.parts(x))


class Recurrent(nn.Module):
    """Word vectors, a layer over the sequence, and three classes from its last or mean state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layer, self.out = nn.Embedding(WORDS, 16), layer, nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        """(texts, 3)."""
        states = self.layer(self.embedding(ids))
        return self.out((states[0] if isinstance(states, tuple) else states).mean(dim=1))


class Tied(nn.Module):
    """Word vectors that are also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """(texts, 3)."""
        return self.out(self.embedding(ids).mean(dim=1))[:, :3]


def mlp() -> nn.Module:
    """A perceptron with dropout."""
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def image_model(*parts: nn.Module) -> nn.Module:
    """A convolution, these parts and three classes."""
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *parts, nn.Flatten(), nn.Linear(4 * SIDE * SIDE, 3))


def hugging_face(kind: str) -> nn.Module:
    """A model of Hugging Face with two layers of width 32, and its usual dropout."""
    import transformers as hf

    hf.logging.set_verbosity_error()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "GPT2":
        small = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=WORDS, **small))
    if kind == "Bert":
        return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=WORDS, num_labels=3, **sizes))
    config = getattr(hf, f"{kind}Config")(vocab_size=WORDS, num_key_value_heads=2, **sizes)
    model: nn.Module = getattr(hf, f"{kind}ForCausalLM")(config)
    return model


def adapted(kind: str, **options: Any) -> nn.Module:
    """A Llama under adapters of PEFT."""
    import peft

    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **options)
    model: nn.Module = peft.get_peft_model(hugging_face("Llama"), config)
    return model


def checkpointed() -> nn.Module:
    """A Llama with LoRA that computes its layers again in the backward pass."""
    model = adapted("Lora", r=4, target_modules=ATTENTION)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


ATTENTION = ["q_proj", "v_proj"]
CASES = (
    Case("MLP", mlp),
    Case("CNN", lambda: image_model(nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()), "images"),
    Case("ResNet with group norm", lambda: image_model(Residual(4), Residual(4)), "images"),
    Case("CNN with BatchNorm", lambda: image_model(nn.BatchNorm2d(4), nn.ReLU()), "images"),
    Case("LSTM (`nn.LSTM`)", lambda: Recurrent(nn.LSTM(16, 16, batch_first=True)), "texts"),
    Case("LSTM (`clipline.engine.stacked.layers.MatrixLSTM`)", lambda: Recurrent(_matrix_lstm()), "texts"),
    Case("GRU (`nn.GRU`)", lambda: Recurrent(nn.GRU(16, 16, batch_first=True)), "texts"),
    Case("LSTM in two directions", lambda: Recurrent(nn.LSTM(16, 8, batch_first=True, bidirectional=True)), "texts"),
    Case("RNN (`nn.RNN`)", lambda: Recurrent(nn.RNN(16, 16, batch_first=True)), "texts"),
    Case("`nn.TransformerEncoder`, with dropout", lambda: Recurrent(_encoder()), "texts"),
    Case("tied weights", Tied, "texts"),
    Case("compiled module (`torch.compile`)", lambda: torch.compile(mlp())),
    Case("GPT-2", lambda: hugging_face("GPT2"), "texts", "language"),
    Case("Llama", lambda: hugging_face("Llama"), "texts", "language"),
    Case("Qwen2", lambda: hugging_face("Qwen2"), "texts", "language"),
    Case("BERT, classes", lambda: hugging_face("Bert"), "texts"),
    Case("LoRA on Llama", lambda: adapted("Lora", r=4, target_modules=ATTENTION), "texts", "language"),
    Case("LoRA, gradient checkpointing", checkpointed, "texts", "language"),
    Case("DoRA on Llama", lambda: adapted("Lora", r=4, target_modules=ATTENTION, use_dora=True), "texts", "language"),
    Case(
        "IA3 on Llama",
        lambda: adapted("IA3", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "texts",
        "language",
    ),
    Case("prompt tuning on Llama", lambda: adapted("PromptTuning", num_virtual_tokens=4), "texts", "language"),
)


def _matrix_lstm() -> nn.Module:
    from clipline.engine.stacked.layers import MatrixLSTM

    return MatrixLSTM(16, 16)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def classes(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of three classes."""
    if "input_ids" not in batch:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    if hasattr(model, "config"):
        scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    else:
        scores = model(batch["input_ids"])
    return F.cross_entropy(scores, batch["y"], reduction="none")


def population(data: str) -> cl.Population:
    """Twelve users with one to four examples."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(12), 1 + np.arange(12) % 4)
    fields: Mapping[str, Any]
    if data == "texts":
        mask = np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (len(owner), 1))
        ids = np.where(mask, rng.integers(1, WORDS, (len(owner), LENGTH)), 0)
        fields = {"input_ids": ids, "attention_mask": mask.astype(np.int64)}
    else:
        shape = (1, SIDE, SIDE) if data == "images" else (16,)
        fields = {"x": rng.normal(size=(len(owner), *shape)).astype(np.float32)}
    return cl.Population.from_arrays(owner, **fields, y=rng.integers(0, 3, len(owner)))


def trained(case: Case, engine: str) -> cl.Training:
    """One round, without noise; the parameters must have moved."""
    torch.manual_seed(0)
    loss = cl.causal_lm_loss if case.loss == "language" else classes
    training = cl.Training(
        case.make(), loss, population(case.data), rounds=1, cohort_size=12, local=cl.LocalSGD(lr=0.1, batch_size=2),
        privacy=cl.Privacy(noise_multiplier=0.0, sampling="fixed"), compute=cl.Compute(engine=engine), seed=0,
    )  # fmt: skip
    if torch.equal(training.run().state.params, training.init().params):
        raise RuntimeError(f"{case.name} did not move")
    return training


def tried(case: Case) -> Row:
    """Stacked; where that cannot be, one by one; where that cannot be either, refused with the reason given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            training = trained(case, "stacked")
            one_by_one = training.trainer.rounds_by_company  # see docs/explanation/threat_model.md
            return Row(case.name, "stacks on a GPU" if one_by_one else "stacks", _brief(training.engine))
        except CannotStack as error:
            reason = _brief(str(error))
        except ModuleError as error:
            return Row(case.name, "refused", _brief(str(error)))
        trained(case, "one-by-one")
        return Row(case.name, "trains one by one", reason)


def _brief(words: str) -> str:
    """What differs between models, without addresses of source files or requests to report."""
    words = re.sub(r"^stacked, up to \d+ users at a time, step by step(; )?", "", words)  # of every stack
    words = words.removeprefix("the model or its loss cannot run for many users at once ").strip("()")
    words = words.split(" Please ")[0].replace("|", "/")
    return words[0].lower() + words[1:] if words else ""


def page(rows: list[Row]) -> str:
    """The page, with versions and date."""
    names = ("torch", "transformers", "peft")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    python, machine = platform.python_version(), f"{platform.machine()} processor"
    lines = "".join(f"| {row.name} | {row.answer} | {row.words} |\n" for row in rows)
    return f"""# Models that were tried

`python studies/models.py --write`, {date.today().isoformat()}, {machine}, Python {python}, {versions}.
Each model is small, made here, and trained one round on made-up users. This script has not tried them on a GPU.

- *Stacks*: many users train as one program. A stacked step was compared with plain ones on the model itself.
- *Stacks on a GPU*: the same there. On processor cores `engine="auto"` trains it one by one. It has an operation that
  may be rounded differently depending on the other users of a stack. `engine="stacked"` stacks it.
- *Trains one by one*: users train one after the other, which `engine="auto"` chooses by itself. On a GPU that is
  slower, and a warning says so.
- *Refused*: not trained at all, with what to use instead.

| model | answer | in the engine's words |
| --- | --- | --- |
{lines}
The last column is what `training.engine`, or the error, says of the model in particular.
See [adapters](../tutorials/adapters.md) for language models,
and [the engine](../explanation/engine.md) for what a stack is.
"""


def main() -> None:
    """Print the table, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/results/models.md")
    arguments = parser.parse_args()
    text = page([tried(case) for case in CASES])
    if arguments.write:
        PAGE.write_text(wrapped(text), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
