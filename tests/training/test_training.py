import math
import warnings

import pyarrow as pa
import pytest
import torch
from samples import LOCAL, cross_entropies, flat_training, linear_model, small_population

from clipline import (
    Evaluate,
    FixedClip,
    LocalSGD,
    QuantileClip,
    Relation,
    ScheduledClip,
    SecureSum,
    ServerAdam,
    ServerSGD,
)
from clipline.errors import ModuleError, SettingError
from clipline.federated.sampling import DeclaredUsersWarning
from clipline.privacy.accountant import account
from clipline.privacy.events import GaussianEvent, PoissonSampling
from clipline.privacy.ledger import Ledger


def training(population=None, model=None, loss=cross_entropies, **changes):
    settings = {"rounds": 6, "cohort_size": 20, "local": LOCAL, "seed": 0, "noise_multiplier": 0.5, **changes}
    return flat_training(
        model or linear_model(dtype=torch.float32),
        loss,
        small_population() if population is None else population,
        **settings,
    )


def accuracy(population):
    x = torch.from_numpy(population.fields["x"]).float()
    y = torch.from_numpy(population.fields["y"])
    return lambda model: {"accuracy": float((model(x).argmax(dim=1) == y).float().mean())}


def test_a_training_shows_what_is_planned():
    made = training(rounds=7)
    assert repr(made) == f"<Training of {made.dim} parameters, 20 users a round: {made.planned}>"
    assert "7 rounds" in repr(made)


def test_training_learns_privately_and_leaves_the_callers_model_alone():
    population = small_population(2000)
    model = linear_model(dtype=torch.float32)
    others = small_population(200, seed=0)
    made = training(
        population, model, rounds=60, cohort_size=200, population_size=2000, noise_multiplier=None, epsilon=4.0
    )
    result = made.run([Evaluate(accuracy(others))])
    assert result.guarantee.epsilon <= 4.0
    assert result.metrics["accuracy"] > 0.65  # a third by chance; the data's own noise allows about 0.8
    assert model.weight.abs().max() == 0
    assert result.model.weight.abs().max() > 0
    assert result.stopped == "finished"
    assert str(result).startswith("accuracy 0.")
    assert "add-or-remove one user" in str(result)


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    first, again, other = (training(seed=seed).run() for seed in (1, 1, 2))
    assert torch.equal(first.state.params, again.state.params)
    assert [r.clip for r in first.reports] == [r.clip for r in again.reports]
    assert not torch.equal(first.state.params, other.state.params)


def test_with_system_entropy_neither_noise_nor_cohorts_can_be_replayed():
    first, again = (training(noise_source="system").run() for _ in range(2))
    assert not torch.equal(first.state.params, again.state.params)
    quiet = [training(noise_source="system", noise_multiplier=0).run().state.params for _ in range(2)]
    assert not torch.equal(*quiet)


@pytest.mark.parametrize(
    "changes",
    [
        {"clip": FixedClip(0.5)}, {"clip": ScheduledClip({0: 1.0, 3: 0.1})}, {"server": ServerAdam(0.05)},
        {"clip": QuantileClip(quantile=0.9, rule="linear")}, {"sampling": "fixed"}, {"noise_multiplier": 0.0},
        {"noise_multiplier": 0.0, "clip": FixedClip(math.inf)}, {"cohort_size": 60},
    ],
)  # fmt: skip
def test_parts_fit_the_place_of_any_other_of_their_kind(changes):
    result = training(**changes).run()
    assert result.state.params.isfinite().all()
    assert result.guarantee.rounds == 6
    assert len(result.reports) == 6


def test_the_ledger_has_one_event_a_round_at_z_and_the_samplers_own_rate():
    result = training(rounds=5, noise_multiplier=0.8).run()
    assert list(result.state.ledger) == [GaussianEvent(PoissonSampling(20 / 60), 0.8)] * 5
    for t, report in enumerate(result.reports):
        ledger = Ledger().add(GaussianEvent(PoissonSampling(20 / 60), 0.8), t + 1)
        expected = account(ledger, delta=60**-1.1, relation=Relation.ZERO_OUT)
        assert report.guarantee.epsilon == expected.epsilon


def test_a_budget_too_small_for_one_round_trains_nothing():
    result = training(max_epsilon=1e-3).run()
    assert (result.stopped, result.guarantee.epsilon, result.reports) == ("budget", 0.0, ())


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_a_plan_calibrated_to_its_budget_is_not_cut_short(sampling):
    settings = {"cohort_size": 20, "rounds": 12, "noise_multiplier": None, "epsilon": 4.0, "sampling": sampling}
    result = training(small_population(200), **settings).run()
    assert (result.stopped, len(result.reports)) == ("finished", 12)
    assert 3.999 <= result.guarantee.epsilon <= 4.0
    epsilons = [report.guarantee.epsilon for report in result.reports]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == result.guarantee.epsilon


def test_the_budget_stops_before_the_round_that_would_pass_it():
    settings = {"rounds": 12, "noise_multiplier": 1.0}
    epsilons = [report.guarantee.epsilon for report in training(**settings).run().reports]
    limit = (epsilons[6] + epsilons[7]) / 2
    stopped = training(**settings, max_epsilon=limit).run()
    assert (stopped.stopped, len(stopped.reports)) == ("budget", 7)
    assert stopped.guarantee.epsilon == epsilons[6] <= limit
    resumed = training(**settings, max_epsilon=limit).run(state=stopped.state)
    assert (resumed.stopped, len(resumed.reports)) == ("budget", 0)


def test_without_noise_nothing_is_called_private_and_a_budget_is_never_enough():
    result = training(noise_multiplier=0.0).run()
    assert result.guarantee.epsilon == math.inf
    assert "not private" in str(result)
    assert "not private" in str(training(noise_multiplier=0.0).planned)
    with pytest.raises(SettingError, match=r"max_epsilon=5.0 must be left out where there is no noise"):
        training(noise_multiplier=0.0, max_epsilon=5.0)


def test_running_twice_starts_twice_from_the_model_as_given():
    # else the second run would go on from a trained model with an empty ledger, and understate what was spent
    run = training()
    first, second = run.run(), run.run()
    assert torch.equal(first.state.params, second.state.params)
    assert first.guarantee == second.guarantee


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rounds": 0}, "rounds=0 must be a whole number at least 1"),
        ({"rounds": -3}, "rounds=-3"),
        ({"cohort_size": 61}, "cohort_size=61 must be at most the population, 60 users"),
        ({"noise_multiplier": -0.1}, "noise_multiplier=-0.1"),
        ({"noise_multiplier": math.nan}, "noise_multiplier=nan"),
        ({"noise_multiplier": None}, "one of them must be set"),
        ({"epsilon": 3.0}, "drop one of them"),
        ({"noise_multiplier": None, "epsilon": -1.0}, "epsilon=-1.0"),
        ({"noise_multiplier": None, "epsilon": math.inf}, "epsilon=inf"),
        ({"max_epsilon": 0.0}, "max_epsilon=0.0"),
        ({"delta": 0.0}, "delta=0.0 must be a finite number above 0 and at most 0.1"),
        ({"delta": 0.11}, "delta=0.11"),
        ({"delta": -1e-5}, "delta=-1e-05"),
        ({"sampling": "shuffle"}, "sampling='shuffle' must be one of poisson, fixed"),
        ({"seed": -1}, "seed=-1"),
        ({"clip": 5.0}, "clip=5.0 must be a clip object: give FixedClip(1.0)"),
        ({"server": "sgd"}, "server='sgd' must be a server object"),
        ({"server": ServerSGD}, "server=<type> must be a server object: give ServerSGD(1.0)"),
        ({"clip": QuantileClip}, "clip=<type> must be a clip object: give FixedClip(1.0)"),
        ({"upload": SecureSum}, "upload=<type> must be SecureSum"),
        ({"local": 0.1}, "local=0.1 must be a LocalSGD or LocalAdam: give LocalSGD(lr=0.1)"),
        ({"rounds": 10**400}, "rounds='a number of too many digits'"),
        ({"noise_multiplier": 2.5, "count_stddev": 1.0}, "raise count_stddev or cohort_size, or lower noise_mult"),
        ({"clip": FixedClip(math.inf)}, "clip=inf must be finite where noise is added"),
        ({"noise_source": "dice"}, "noise_source='dice'"),
        ({"relation": Relation.PAPER}, "relation='paper' must be one that a guarantee can be given for"),
        ({"relation": "paper", "sampling": "fixed"}, "relation='paper'"),
    ],
)
def test_bad_settings_are_refused_before_any_work(changes, words):
    def loss(model, batch):
        raise AssertionError("nothing may be trained")

    with pytest.raises(SettingError) as error:
        training(loss=loss, **changes)
    assert words in str(error.value)
    assert ":" in str(error.value)  # the way out


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)), "GroupNorm"),
        (torch.nn.LazyLinear(3), "run one made-up batch through the model first"),
        (lambda x: x, "must be a torch.nn.Module"),
        (torch.nn.Linear, r"the class Linear but must be a module: give Linear\(\.\.\.\)"),
        (torch.nn.Identity(), "0 trainable parameters"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_when_the_training_is_made(model, words):
    with pytest.raises(ModuleError, match=words):
        training(model=model)


@pytest.mark.parametrize("engine", ["one-by-one", "stacked"])
def test_a_schedule_that_remembers_its_calls_is_asked_once_a_round_whoever_trains(engine):
    def run(schedules, users):
        local, server = (schedule() for schedule in schedules)
        options = {"local": LocalSGD(0.1, lr_schedule=local), "server": ServerSGD(1.0, lr_schedule=server)}
        settings = {"rounds": 2, "cohort_size": users, "sampling": "fixed", "workers": 1}
        return training(small_population(users), engine=engine, **settings, **options).run().state.params

    def counting():
        calls = []
        return lambda t: calls.append(t) or 0.5 ** len(calls)

    for users in (64, 65):  # one block of users, and two
        assert torch.equal(run([counting] * 2, users), run([lambda: lambda t: 0.5 ** (t + 1)] * 2, users))


def test_a_schedule_that_fails_is_refused_when_the_training_is_made():
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR
    for changes in ({"local": LocalSGD(0.1, lr_schedule=scheduler)}, {"server": ServerSGD(1.0, lr_schedule=scheduler)}):
        with pytest.raises(SettingError, match="lr_schedule=CosineAnnealingLR must give a factor for every round"):
            training(**changes)


def test_far_more_users_declared_than_are_there_are_warned_of_with_the_users_a_round():
    few, many = r"cohort_size=20: raise cohort_size, or leave population_size out", r"less than half .* lower cohort_"
    with pytest.warns(DeclaredUsersWarning, match=few) as caught:
        training(small_population(50), population_size=200)  # 20 of 200 is a tenth, of 50 users
    assert caught[0].filename == flat_training.__code__.co_filename
    with pytest.warns(DeclaredUsersWarning, match=many):
        training(small_population(110), population_size=22)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training(small_population(50), population_size=100)
        training(small_population(50), population_size=25)


def test_data_that_are_no_population_are_refused_by_type_with_how_to_make_one():
    frame = pa.table({"who": [1, 2], "diagnosis": ["SECRET", "SECRET"]})
    with pytest.raises(SettingError) as error:
        training(frame)
    assert str(error.value) == (
        'population=<Table> must be a Population: give Population.from_dataframe(frame, user="...")'
    )
    with pytest.raises(SettingError, match=r"give Population.from_dataset\(loader.dataset, user_ids\)"):
        training(torch.utils.data.DataLoader([1]))
