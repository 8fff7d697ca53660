"""Several runs in one program: each is what it would be alone."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from samples import Mixed, Observer, cross_entropies, cross_entropy, flat_training, linear_model, population_of
from torch import nn

from clipline import FixedClip, LocalSGD, QuantileClip, SettingError, run_together, task_named, train_many
from clipline.errors import ModuleError
from clipline.training.side_by_side import SharedNoiseWarning

POPULATION = population_of([6, 3, 9, 1, 0, 14, 7, 5], features=16)
LOCAL = LocalSGD(0.3, batch_size=4)


def training(seed=0, model=None, loss=cross_entropies, population=POPULATION, **changes):
    torch.manual_seed(seed)
    model = Mixed().double() if model is None else model
    usual = {"rounds": 3, "cohort_size": 4, "local": LOCAL, "seed": seed, "noise_multiplier": 0.1}
    return flat_training(model, loss, population, **{**usual, **changes})


VARIANTS = [
    {},
    {"seed": 1},
    {"seed": 2, "local": replace(LOCAL, lr=0.05)},
    {"seed": 3, "noise_multiplier": 0.0, "clip": FixedClip(0.2)},
    {"seed": 4, "clip": QuantileClip(0.9, 0.01), "sampling": "fixed"},
    {"seed": 5, "cohort_size": 7, "rounds": 5},
    {"seed": 6, "rounds": 1},
]


def observers(runs, observe):
    """A callback for each run that calls `observe(number, report, state)` after every round."""
    return [[Observer(partial(observe, number))] for number in range(len(runs))]


def test_each_of_many_runs_is_what_it_would_be_alone():
    seen = []
    together = run_together(
        [training(**variant) for variant in VARIANTS],
        observers(VARIANTS, lambda n, report, _: seen.append((n, report.round_index))),
    )
    alone = [training(**variant, engine="one-by-one").run() for variant in VARIANTS]
    assert len({float(result.state.params[0]) for result in alone}) == len(VARIANTS)
    for ours, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(ours.state.params, theirs.state.params, rtol=1e-11, atol=1e-12)
        assert [r.clip for r in ours.reports] == pytest.approx([r.clip for r in theirs.reports], rel=1e-12)
        assert ours.guarantee == theirs.guarantee
        assert ours.state.ledger == theirs.state.ledger
    for number, variant in enumerate(VARIANTS):
        assert [t for n, t in seen if n == number] == list(range(variant.get("rounds", 3)))


def test_the_next_round_of_all_runs_is_trained_before_any_clip_of_it_is_read():
    """On a GPU reading the clip waits for the round before: training is launched first, as in a run alone."""
    read = []

    class Watched:
        def __init__(self, trainer):
            self.trainer = trainer

        def train(self, requests):
            for block in self.trainer.train(requests):
                read.append([request.round_index for request in requests if "clip" in vars(request)])
                yield block

    run_together([training(seed=1), training(seed=2)], unprivate_watch=Watched)
    assert read == [[]] * 3  # a block in each of three rounds


def test_an_error_in_the_shared_training_reaches_the_caller():
    def loss(model, batch):
        losses = cross_entropies(model, batch)
        if len(batch["x"]) == 3:  # the short batch of one user: not in the trial
            raise ModuleError("cannot")
        return losses.mean()

    with pytest.raises(ModuleError, match="cannot"):
        run_together([training(seed=seed, loss=loss, rounds=9, on_error="raise") for seed in (1, 2)])


def half_frozen(seed):
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 3)).double()
    layers[0].requires_grad_(False)
    return layers


def test_private_runs_that_share_their_noise_are_warned_of():
    with pytest.warns(SharedNoiseWarning, match="2 private runs have the seed 1"):
        run_together([training(1), training(1, local=replace(LOCAL, lr=0.2)), training(2)])
    run_together([training(1, noise_multiplier=0.0), training(1, noise_multiplier=0.0, local=replace(LOCAL, lr=0.2))])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("population", {"population": population_of([6, 3, 9], features=16)}),
        ("model", {"model": linear_model(16)}),
        ("loss", {"loss": cross_entropy}),
        ("local", {"local": replace(LOCAL, batch_size=5)}),
        ("precision", {"precision": "bf16"}),
    ],
)
def test_runs_that_cannot_share_a_stack_are_refused(name, change):
    with pytest.raises(SettingError, match=f"{name} of training 1 differs"):
        run_together([training(), training(seed=1, cohort_size=2, **change)])


def test_runs_that_differ_in_what_is_not_trained_or_are_watched_in_several_processes_are_refused():
    with pytest.raises(SettingError, match="what is not trained in the model of training 1"):
        run_together([training(seed, half_frozen(seed)) for seed in (1, 2)])
    with pytest.raises(SettingError, match="workers=2 must be 1 where updates are watched"):
        run_together([training(1, workers=2), training(2)], unprivate_watch=lambda trainer: trainer)


def test_settings_of_a_task_train_side_by_side(monkeypatch):
    monkeypatch.setattr("clipline.tasks.handwriting.TEST_WRITERS", 50)
    fewer = {"population_size": 60, "cohort_size": 5, "rounds": 2, "epsilon": None, "noise_multiplier": 0.3}
    base = replace(task_named("handwriting").settings, **fewer)
    several = [replace(base, seed=seed, quantile=0.2 + 0.3 * seed, client_lr=0.1 + 0.2 * seed) for seed in range(2)]
    results = train_many(several)
    task = task_named("handwriting")
    loaded = task.load(base)
    for one, result in zip(several, results, strict=True):
        alone = task.training(replace(one, workers=1)).run()
        torch.testing.assert_close(result.state.params, alone.state.params, rtol=1e-4, atol=1e-6)
        accuracy = loaded.evaluate(result.model)["accuracy"]
        assert accuracy == pytest.approx(loaded.evaluate(alone.model)["accuracy"], abs=0.01)
    with pytest.raises(SettingError, match="batch_size of settings 1=7 must be 20 as in settings 0"):
        train_many([base, replace(base, batch_size=7)])
    with pytest.raises(SettingError, match="one-by-one"):
        train_many([replace(base, engine="one-by-one")])
    assert run_together([]) == train_many([]) == []


def test_models_start_from_their_own_parameters():
    first, second = nn.Linear(16, 3).double(), nn.Linear(16, 3).double()
    runs = [training(seed=s, model=m, rounds=1, noise_multiplier=0.0) for s, m in ((0, first), (0, second))]
    a, b = run_together(runs)
    gap = (a.state.params - b.state.params).norm()
    assert gap > 0.1  # the same seed, cohort and data: only where they began differs
