"""The loss of language models by sequence, their perplexity, and adapters from training to PEFT's own format."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hugging_face import LENGTH, WORDS, base, needs_adapters, texts, with_lora
from samples import ROOT, load_script
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from clipline import (
    Compute,
    Evaluate,
    FixedClip,
    LocalSGD,
    Perplexity,
    Population,
    Privacy,
    SettingError,
    Training,
    causal_lm_loss,
    load,
)
from clipline.engine.core.working_model import WorkingModel
from clipline.engine.stacked.vmap_layers import make_stackable
from clipline.tasks import causal_lm


class Answer:
    def __init__(self, logits):
        self.logits = logits


class Bigrams(nn.Module):
    """Logits of the next word from a table; with all zeros every one of the four words has probability 1/4."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 4))

    def forward(self, input_ids, attention_mask=None):
        return Answer(self.table[input_ids])


IDS = torch.tensor([[1, 2, 3, 0], [2, 2, 0, 0], [3, 0, 0, 0]])


def test_the_loss_is_the_mean_over_the_tokens_that_count():
    model = Bigrams()
    with torch.no_grad():
        model.table[1, 2] = math.log(5)  # after 1 comes 2 with probability 5/8
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
    first = (-math.log(5 / 8) + math.log(4)) / 2
    found = causal_lm_loss(model, {"input_ids": IDS, "attention_mask": mask})
    torch.testing.assert_close(found, torch.tensor([first, math.log(4), 0.0]))  # the last has nothing to predict
    lengths = {"input_ids_length": torch.tensor([3, 2, 1], dtype=torch.int32)}  # as `lengths=` makes them
    assert torch.equal(causal_lm_loss(model, {"input_ids": IDS, **lengths}), found)
    assert torch.equal(causal_lm_loss(model, {"input_ids": IDS, **lengths, "attention_mask": mask}), found)
    labels = torch.tensor([[-100, -100, 3, -100], [-100, 2, -100, -100], [0, 0, 0, 0]])
    found = causal_lm_loss(model, {"input_ids": IDS, "labels": labels})
    torch.testing.assert_close(found, torch.full((3,), math.log(4)))


def test_the_perplexity_of_a_model_that_knows_nothing_is_the_number_of_words():
    ids = IDS.numpy().astype(np.uint8)
    users = Population.from_arrays([0, 0, 1], input_ids=ids, attention_mask=(ids != 0).astype(np.uint8))
    assert Perplexity(users, batch_size=2)(Bigrams())["perplexity"] == pytest.approx(4)
    model = Bigrams()
    with torch.no_grad():
        model.table[1, 2] = math.log(5)
    # three tokens count, one of them of probability 5/8: a token weighs the same in whichever sequence it stands
    assert Perplexity(users)(model)["perplexity"] == pytest.approx((4 * 4 * 8 / 5) ** (1 / 3))
    with pytest.raises(SettingError, match="users outside the training"):
        Perplexity([1])
    local, privacy = LocalSGD(0.1), Privacy(noise_multiplier=1.0)
    training = Training(Bigrams(), causal_lm_loss, users, rounds=1, cohort_size=2, local=local, privacy=privacy)
    with pytest.raises(SettingError, match="test is the population that trains"):
        training.run([Evaluate(Perplexity(users))])


@needs_adapters
@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_without_whole_logits_the_loss_and_its_gradient_are_those_of_the_model(name, monkeypatch):
    model = with_lora(base(name))
    batch = {key: torch.tensor(field[:4]) for key, field in texts().fields.items()}
    params = [p for p in model.parameters() if p.requires_grad]
    found = causal_lm_loss(model, batch)
    gradients = torch.autograd.grad(found.sum(), params)
    assert causal_lm._with_plain_head(model) is model.get_base_model()
    logits = model(**batch).logits[:, :-1]
    labels = batch["input_ids"][:, 1:].masked_fill(batch["attention_mask"][:, 1:] == 0, -100)
    summed = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)
    expected = summed / (labels != -100).sum(1)
    torch.testing.assert_close(found, expected)
    for ours, wanted in zip(gradients, torch.autograd.grad(expected.sum(), params), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)
    assert causal_lm._with_plain_head(base("llama")) is None  # its output layer trains


def test_lists_of_tokens_train_as_padded_ones_with_a_mask_do():
    ids = IDS.numpy()
    masked = Population.from_arrays([0, 0, 1], input_ids=ids, attention_mask=(ids != 0).astype(np.int64))
    listed = Population.from_arrays([0, 0, 1], input_ids=[[1, 2, 3], [2, 2], [3]], lengths={"input_ids": 4})
    terms = {"rounds": 2, "cohort_size": 2, "local": LocalSGD(0.5), "privacy": Privacy(noise_multiplier=0.0), "seed": 0}
    by_name = Compute(engine="stacked")  # "auto" trains a table that is indexed one by one on cores
    trainings = [Training(Bigrams(), causal_lm_loss, users, **terms, compute=by_name) for users in (masked, listed)]
    first, second = (training.run() for training in trainings)
    assert first.model.table.any()
    torch.testing.assert_close(second.model.table, first.model.table)
    assert Perplexity(listed)(first.model) == pytest.approx(Perplexity(masked)(first.model))


@needs_adapters
def test_the_base_is_the_callers_memory_in_its_own_type_and_adapters_train_in_float32():
    model = _bf16_adapted()
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    working = WorkingModel(model, make_stackable=make_stackable)
    ours = dict(working.module.named_parameters())
    assert all(ours[name].data_ptr() == p.data_ptr() and ours[name] is not p for name, p in frozen.items())
    assert {p.dtype for p in frozen.values()} == {torch.bfloat16}
    assert working.vector.dtype == torch.float32
    read = dict(working.evaluated(working.initial).named_parameters())
    assert all(read[name].data_ptr() == p.data_ptr() for name, p in frozen.items())
    before = {name: p.clone() for name, p in model.named_parameters()}
    local, privacy = LocalSGD(0.5, batch_size=2), Privacy(noise_multiplier=0.0)
    training = Training(model, causal_lm_loss, texts(), rounds=1, cohort_size=6, local=local, privacy=privacy, seed=0)
    assert training.engine.startswith("stacked")
    result = training.run()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    own = dict(result.model.named_parameters())
    assert all(own[name].data_ptr() != p.data_ptr() for name, p in frozen.items())  # to merge into, say
    assert any(not torch.equal(own[name], p) for name, p in before.items() if name not in frozen)


@needs_adapters
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_a_step_of_a_stack_looks_at_no_values_so_that_it_can_be_compiled_and_recorded(name):
    model = with_lora(base(name))
    local, privacy = LocalSGD(0.5, batch_size=2), Privacy(noise_multiplier=0.0)
    training = Training(model, causal_lm_loss, texts(), rounds=1, cohort_size=6, local=local, privacy=privacy, seed=0)
    step, shapes = training.trainer._step, training.problem.model.named_shapes
    batch = {"input_ids": torch.zeros(2, 2, LENGTH, dtype=torch.long)}
    keys = torch.zeros(2, step.random_keys, 2, dtype=torch.int32)
    stack = [torch.zeros(2, *shape) for shape in shapes.values()]
    graph = make_fx(lambda *given: step(*given))(stack, keys, batch, torch.ones(2, 2, dtype=torch.bool), torch.ones(2))
    assert not any("scalar_dense" in str(node.target) for node in graph.graph.nodes)


def _bf16_adapted():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(base("llama").bfloat16(), config, autocast_adapter_dtype=False)


@needs_adapters
def test_adapters_are_saved_in_pefts_own_format_and_answer_the_same(tmp_path):
    from peft import PeftModel

    local, privacy = LocalSGD(0.5, batch_size=2), Privacy(noise_multiplier=0.0)
    model = with_lora(base("llama"))
    training = Training(model, causal_lm_loss, texts(), rounds=2, cohort_size=6, local=local, privacy=privacy, seed=0)
    result = training.run()
    result.save(tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "card.json", "card.md", "model.safetensors"}
    loaded = PeftModel.from_pretrained(base("llama"), tmp_path / "saved").eval()
    ids = torch.arange(1, WORDS - 1).view(2, -1)
    trained, untrained = result.model.eval()(ids).logits, model.eval()(ids).logits
    assert torch.equal(loaded(ids).logits, trained)
    assert not torch.allclose(trained, untrained)
    assert torch.equal(load(tmp_path / "saved", model=with_lora(base("llama"))).model(ids).logits, trained)
    result.save(tmp_path / "adapters", frozen=False)
    few = load(tmp_path / "adapters", model=lambda: with_lora(base("llama")))
    assert torch.equal(few.model(ids).logits, trained)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("adapters", "saved")]
    assert sizes[0] < sizes[1]
    merged = result.model.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, trained, rtol=1e-4, atol=1e-5)


class RowScaled(nn.Module):
    """A layer in 8 bit that anybody could write: whole numbers, and a scale for each row."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, values):
        return F.linear(values, self.codes.to(values.dtype) * self.scale)


def _eight_bit(model, kind):
    """Puts layers of the base into 8 bit; gives the numbers that these stand for, by the names of weights."""
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
        return {name: p.dequantize() for name, p in model.named_parameters() if hasattr(p, "qdata")}
    meant = {}
    for layer, decoder in enumerate(model.model.layers):
        for name in ("up_proj", "down_proj"):
            quantised = RowScaled(getattr(decoder.mlp, name))
            setattr(decoder.mlp, name, quantised)
            meant[f"model.layers.{layer}.mlp.{name}.weight"] = quantised.codes * quantised.scale
    return meant


def _addresses(model):
    """Of the whole numbers of torchao."""
    return {name: p.qdata.data_ptr() for name, p in model.named_parameters() if hasattr(p, "qdata")}


@needs_adapters
@pytest.mark.filterwarnings("ignore")  # of torchao's own imports
@pytest.mark.parametrize("kind", ["own", "torchao"])
def test_a_base_in_8_bit_trains_in_both_engines_as_one_with_the_numbers_that_it_stands_for(kind, tmp_path):
    if kind == "torchao":
        pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
    quantised, plain = base("llama", initializer_range=0.5), base("llama", initializer_range=0.5)
    meant = _eight_bit(quantised, kind)

    def trained(model, engine):
        """The result, and how it differs from the start."""
        torch.manual_seed(0)
        adapted = with_lora(copy.deepcopy(model))
        training = Training(
            adapted, causal_lm_loss, texts(), rounds=1, cohort_size=6, seed=0, compute=Compute(engine=engine),
            local=LocalSGD(0.01, batch_size=2), privacy=Privacy(noise_multiplier=0.0, sampling="fixed"),
            clip=FixedClip(1e3),
        )  # fmt: skip
        assert _addresses(training.problem.model.module) == _addresses(adapted)  # shared
        result = training.run()
        ends, starts = ([p for p in one.parameters() if p.requires_grad] for one in (result.model, adapted))
        return result, torch.cat([(end - start).detach().flatten() for end, start in zip(ends, starts, strict=True)])

    _, coarse = trained(plain, "one-by-one")
    plain.load_state_dict(plain.state_dict() | meant)
    _, wanted = trained(plain, "one-by-one")
    assert (coarse - wanted).norm() > 5e-3 * wanted.norm()  # rounding to 8 bit shows
    for engine in ("one-by-one", "stacked"):
        result, found = trained(quantised, engine)
        assert found.dtype == torch.float32
        assert (found - wanted).norm() < 1e-4 * wanted.norm()
    result.save(tmp_path / "saved")
    ids = torch.arange(1, WORDS - 1).view(2, -1)
    like = with_lora(plain if kind == "torchao" else quantised)
    loaded = load(tmp_path / "saved", model=like).model.eval()
    torch.testing.assert_close(loaded(ids).logits, result.model.eval()(ids).logits, rtol=1e-3, atol=1e-3)


@needs_adapters
@pytest.mark.filterwarnings("ignore")
def test_the_example_is_short_learns_and_answers(capsys, tmp_path):
    text = (ROOT / "examples" / "adapters.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert text.count("rounds=60") == 1
    (tmp_path / "adapters.py").write_text(text.replace("rounds=60", "rounds=8"), encoding="utf-8")
    script = load_script(tmp_path / "adapters.py")
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("perplexity 60.")  # before
    assert script.result.metrics["perplexity"] < 20
    assert last.startswith("turn the r")
