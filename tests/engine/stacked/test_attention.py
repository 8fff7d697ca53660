"""Attention that stacks: equal to torch's own, and in Hugging Face models to the model as the caller gave it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hugging_face import base, needs_adapters, texts, with_lora
from samples import one_by_one, rows_of

from clipline import LocalSGD, causal_lm_loss
from clipline.engine.choose import choose_trainer
from clipline.engine.core.working_model import WorkingModel
from clipline.engine.stacked.trainer import Stacked
from clipline.engine.stacked.vmap_layers import explicit_attention, make_stackable, use_stackable_attention
from clipline.random.streams import Streams

USERS = np.arange(6)


def classes(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits, batch["input_ids"][:, 0] % 2, reduction="none")


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "additive"])
def test_explicit_attention_is_torchs_with_zeros_for_who_may_look_nowhere(kind):
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 5, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 1, 5, 5, generator=generator) < 0.5
    mask[0, 0, 2] = False
    given = {"none": None, "causal": None, "bool": mask, "additive": mask.double()}[kind]
    options = {"attn_mask": given, "is_causal": kind == "causal", "scale": 0.7}
    found = explicit_attention(query, key, value, **options)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(query, key, value, **options))
    assert kind != "bool" or not found[0, :, 2].any()


def test_without_transformers_models_nothing_is_changed():
    model = torch.nn.Linear(2, 2)
    assert use_stackable_attention(model) == ""
    assert not list(model.children())


@needs_adapters
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "bert"])
def test_the_working_copy_answers_as_the_callers_model_does(name, attention):
    model = base(name, attn_implementation=attention).eval()
    working = WorkingModel(model, make_stackable=make_stackable)
    assert working.attention == "attention as explicit products"
    assert model.config._attn_implementation == attention  # the caller's
    ids = torch.arange(1, 17).view(2, 8)
    for mask in (None, torch.ones_like(ids), (torch.arange(8) < torch.tensor([[3], [8]])).long()):
        given = {"input_ids": ids, "attention_mask": mask}
        torch.testing.assert_close(working.module.eval()(**given).logits, model(**given).logits)


@needs_adapters
@pytest.mark.parametrize(("name", "dropout"), [("gpt2", 0.2), ("llama", 0.2), ("qwen2", 0.0), ("bert", 0.2)])
def test_users_with_adapters_get_the_same_update_stacked_and_one_by_one(name, dropout):
    model = with_lora(base(name, dropout), lora_dropout=0.1)
    loss = classes if name == "bert" else causal_lm_loss
    plain = one_by_one(model, loss, texts(), LocalSGD(0.5, batch_size=2), Streams(0))
    stack = Stacked(plain, 6)
    assert not plain.problem.draws_globally
    expected, found = rows_of(plain, USERS), rows_of(stack, USERS)
    assert expected.shape == (6, sum(p.numel() for p in model.parameters() if p.requires_grad))
    lengths = expected.norm(dim=1)
    assert (lengths > 1e-3).all()
    assert ((found - expected).norm(dim=1) <= 1e-4 * lengths).all()


@needs_adapters
def test_with_gradient_checkpointing_users_train_one_by_one_to_the_same_update():
    def plain(model):
        return one_by_one(model, causal_lm_loss, texts(), LocalSGD(0.5, batch_size=2), Streams(0))

    model = with_lora(base("llama"))
    model.gradient_checkpointing_enable()
    checkpointed = choose_trainer("auto", plain(model), 6)
    assert checkpointed.in_words.startswith("one by one: ")
    assert "(gradient checkpointing has no version for a stack)" in checkpointed.in_words
    expected = rows_of(plain(with_lora(base("llama"))), USERS[:2])
    torch.testing.assert_close(rows_of(checkpointed, USERS[:2]), expected)


@needs_adapters
@pytest.mark.filterwarnings("ignore")  # of torch's own tracing
def test_the_program_that_a_gpu_compiles_is_the_same_step(uncompiled, monkeypatch):
    def token_losses(rows, weight, labels):  # our own operation goes user by user on cores
        return F.cross_entropy(rows @ weight.T, labels, reduction="none")

    monkeypatch.setattr("clipline.tasks.causal_lm.token_losses", token_losses)
    model = with_lora(base("qwen2"))
    plain = one_by_one(model, causal_lm_loss, texts(), LocalSGD(0.5, batch_size=2), Streams(0))
    stack = Stacked(plain, 6, compiled=True)
    expected = rows_of(plain, USERS)
    assert ((rows_of(stack, USERS) - expected).norm(dim=1) <= 1e-4 * expected.norm(dim=1)).all()
    assert "compiled and recorded" in stack.in_words  # it was traced, for any number of users
