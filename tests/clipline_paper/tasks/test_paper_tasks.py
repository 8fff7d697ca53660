"""The six tasks together: Table 1 as settings, stand-ins with the right fields, and training that trains."""

import numpy as np
import pytest
import torch

from clipline import Population, task_named
from clipline.errors import PopulationError
from clipline_paper.facts import FACTS
from clipline_paper.paper_task import check_fields

PAPER = list(FACTS)
# Table 1 and Figure 7 of the paper, as printed: users, rounds, learning rates, clip range, z*, C*.
PRINTED = {
    "cifar100": (500, 4000, "0.1", "0.32", 0.75, 2.2, 0.03, 0.98),
    "emnist_cr": (3400, 1500, "0.032", "1", 0.28, 0.85, 0.1, 0.37),
    "emnist_ae": (3400, 3000, "3.2", "1.78", 0.22, 0.95, 0.03, 0.32),
    "shakespeare": (715, 1200, "1", "0.32", 0.25, 3.6, 0.1, 0.95),
    "so_nwp": (342_477, 1500, "0.18", "1.78", 0.3, 1.6, 0.01, 0.3),
    "so_lr": (342_477, 1500, "320", "1.78", 16.0, 135.0, 0.01, 16.0),
}


def settings_of(name, **changes):
    small = {"population_size": 5, "cohort_size": 5, "test_users": 2, "rounds": 2, "max_examples": 4}
    small["sampling"] = "fixed"
    return task_named(name).settings.overridden({**small, **changes}, "the test")


@pytest.fixture(scope="module")
def loaded():
    cache = {}

    def load(name):
        if name not in cache:
            cache[name] = task_named(name).load(settings_of(name))
        return cache[name]

    return load


@pytest.mark.parametrize("name", PAPER)
def test_facts_are_those_that_the_paper_prints(name):
    facts = FACTS[name]
    users, rounds, client_lr, server_lr, *rest = PRINTED[name]
    assert (facts.users, facts.rounds) == (users, rounds)
    for value, printed in ((facts.client_lr, client_lr), (facts.server_lr, server_lr)):
        assert value == pytest.approx(float(printed), rel=0.02)
        assert np.log10(value) * 4 == pytest.approx(round(np.log10(value) * 4), abs=1e-12)  # a power 10^(k/4)
    assert [facts.clip_min, facts.clip_max, facts.noise_at_100, facts.best_clip] == rest


@pytest.mark.parametrize("name", PAPER)
def test_settings_are_the_papers(name):
    task, facts = task_named(name), FACTS[name]
    settings = task.settings
    assert (settings.cohort_size, settings.server_momentum, settings.client_epochs) == (100, 0.9, 1)
    assert (settings.quantile, settings.clip_start, settings.clip_lr) == (0.5, 0.1, 0.2)
    assert (settings.noise_multiplier, settings.fixed_clip) == (facts.noise_at_100, facts.best_clip)
    assert (settings.rounds, settings.client_lr, settings.server_lr) == (facts.rounds, facts.client_lr, facts.server_lr)
    assert (settings.batch_size, settings.max_examples) == (facts.batch_size, facts.max_examples)
    assert settings.evaluate_on == "validation"
    assert task.metric_name == facts.metric_name
    assert task.data == "stand-in"
    assert task.title.startswith("stand-in")


@pytest.mark.parametrize("name", PAPER)
def test_parameters_are_those_of_the_facts(name, loaded):
    assert sum(p.numel() for p in loaded(name).make(0).parameters()) == FACTS[name].parameters


@pytest.mark.usefixtures("narrow_resnet")
@pytest.mark.parametrize("name", PAPER)
def test_two_rounds_of_five_users_train_and_measure(name, monkeypatch):
    for limit in ("so_nwp.VALIDATION_SENTENCES", "so_lr.VALIDATION_POSTS"):
        monkeypatch.setattr(f"clipline_paper.tasks.{limit}", 50)
    task = task_named(name)
    settings = settings_of(name, max_examples=2)
    loaded = task.load(settings)
    training = task.training(settings, loaded)
    assert training.local.reduction == ("sum" if name in ("emnist_ae", "so_lr") else "mean")
    before = training.init().params.clone()
    result = training.run()
    assert len(result.reports) == 2
    with torch.no_grad():
        assert np.isfinite(loaded.evaluate(result.model.eval())[task.metric_name])
    assert torch.isfinite(result.state.params).all()
    assert not torch.equal(result.state.params, before)


def test_a_population_without_the_right_fields_is_refused():
    fields = {"tokens": ((21,), "whole")}
    good = Population(np.array([0, 2]), {"tokens": np.zeros((2, 21), np.uint16)})
    assert check_fields(good, fields) is good
    with pytest.raises(PopulationError, match="no field 'tokens' but words"):
        check_fields(Population(np.array([0, 2]), {"words": np.zeros((2, 21))}), fields)
    for bad in (np.zeros((2, 20), np.int16), np.zeros((2, 21), np.float32), np.zeros(2, np.int16)):
        with pytest.raises(PopulationError, match="field 'tokens' is"):
            check_fields(Population(np.array([0, 2]), {"tokens": bad}), fields)
