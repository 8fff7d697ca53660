import json
import threading
from unittest.mock import Mock
from uuid import UUID

import numpy as np
import pytest
import torch
from samples import Observer, cross_entropies, cross_entropy, population_of, small_population, small_training
from samples import linear_float32 as linear

from clipline import Population, RunDirectory
from clipline.data.population import share_users
from clipline.engine.core.precision import PRECISIONS
from clipline.errors import ModuleError, SettingError
from clipline.training.evaluation import Evaluate
from clipline.training.options import Compute
from clipline.training.run_files import METRICS

TEST = population_of([3, 0, 9, 1, 40], seed=9)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def training(rounds=5, **options):
    return small_training(rounds, **{"loss": cross_entropy, **options})  # with a server of which no average is measured


def accuracy(model, batch):
    return model(batch["x"]).argmax(dim=1) == batch["y"]


def test_a_metric_is_the_mean_over_all_examples_whatever_the_batches():
    for batch_size in (1, 7, 1000):
        result = training().run([Evaluate(TEST, accuracy, every=5, batch_size=batch_size)])
        guess = (np.float32(TEST.fields["x"]) @ result.model.weight.detach().numpy().T).argmax(axis=1)
        assert result.metrics == {"accuracy": pytest.approx((guess == TEST.fields["y"]).mean(), abs=1e-12)}


def test_metrics_may_be_several_by_name_and_a_loss_is_one():
    def both(model, batch):
        return {"accuracy": accuracy(model, batch), "loss": cross_entropies(model, batch)}

    result = training().run([Evaluate(TEST, both)])
    x, y = torch.tensor(TEST.fields["x"]).float(), torch.tensor(TEST.fields["y"])
    loss = torch.nn.functional.cross_entropy(result.model(x), y)
    assert result.metrics.keys() == {"accuracy", "loss"}
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert training(rounds=1).run([Evaluate(TEST, lambda model, batch: batch["y"])]).metrics.keys() == {"metric"}


def test_by_user_each_counts_once_and_the_tenth_for_whom_it_is_worst_is_shown(tmp_path):
    people = population_of([3, 0, 9, 1, 40, *[2] * 18], seed=9)  # 22 with examples: the worst tenth are two

    def both(model, batch):
        return {"accuracy": batch["y"], "loss": batch["y"]}

    evaluate = Evaluate(people, both, by="user", batch_size=7, keep_best="worst_tenth_accuracy")
    result = training(rounds=1).run([evaluate, RunDirectory(tmp_path / "run")])
    means = sorted(float(np.mean(fields["y"])) for fields in people if len(fields["y"]))
    assert len(means) == 22
    expected = {
        "user_accuracy": np.mean(means), "worst_tenth_accuracy": np.mean(means[:2]),
        "user_loss": np.mean(means), "worst_tenth_loss": np.mean(means[-2:]),
    }  # fmt: skip
    assert result.metrics == pytest.approx(expected, abs=1e-12)
    last = json.loads((tmp_path / "run" / METRICS).read_text().splitlines()[-1])
    assert {name: last[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    with pytest.raises(SettingError, match="average in that function"):
        Evaluate(lambda model: {}, by="user")


def test_rounds_are_measured_at_their_turn_and_after_the_last():
    seen = []

    def evaluate(model):
        seen.append(model.weight.detach().clone())
        return {"loss": float(len(seen))}

    result = training().run([Evaluate(evaluate, every=2)])
    assert [dict(report.metrics) for report in result.reports] == [{}, {"loss": 1.0}, {}, {"loss": 2.0}, {"loss": 3.0}]
    assert result.metrics == {"loss": 3.0}
    assert torch.equal(seen[-1], result.model.weight)


def test_the_model_is_a_copy_in_eval_mode_without_gradients_in_another_thread():
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), linear())
    modes = []

    def evaluate(own):
        modes.append((own.training, torch.is_grad_enabled(), threading.current_thread() is threading.main_thread()))
        own[1].weight.fill_(1e6)  # it may do what it likes: nobody else has this model
        return {"loss": 0.0}

    with_metric = training(model=model).run([Evaluate(evaluate, every=1)])
    assert modes == [(False, False, False)] * 5
    assert torch.equal(with_metric.state.params, training(model=model).run().state.params)
    assert not (model[1].weight != 0).any()


def test_the_next_rounds_train_while_one_is_measured():
    trained = threading.Event()

    class Noting(Evaluate):
        def measure(self, state, *, last):
            if state.round_index == 4:
                trained.set()
            return super().measure(state, last=last)

    result = training().run([Noting(lambda model: {"waited": float(trained.wait(60))}, every=2)])
    assert result.reports[1].metrics == {"waited": 1.0}  # the metrics of round 1 came when round 3 had been trained


@pytest.mark.parametrize("precision", PRECISIONS)
def test_products_of_a_metric_are_rounded_as_the_precision_says_whatever_trains_meanwhile(precision):
    def switches():
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    def metric(model, batch):
        seen.append(switches())
        return cross_entropies(model, batch)

    seen, before = [], switches()
    assert before not in ((False, False), (True, True))  # as torch comes: neither of what is expected below
    between = Observer(lambda report, state: seen.append(switches()))
    training(rounds=3, compute=Compute(precision=precision)).run([Evaluate(TEST, metric, every=1), between])
    del seen[0]  # of the trial, before training
    assert len(seen) == 6  # three of each
    assert set(seen) == {(precision != "float32",) * 2}
    assert switches() == before


@pytest.mark.parametrize(
    ("evaluate", "words"),
    [
        (lambda: Evaluate(fails, every=1), "test function 'fails' fails (ZeroDivisionError: no test users): mend"),
        (
            lambda: Evaluate(TEST, lambda model, batch: batch["labels"]),
            "metric 'metric' fails (KeyError: 'labels'); the batch has the fields x, y: choose among x, y",
        ),
        (
            lambda: Evaluate(TEST, lambda model, batch: cross_entropy(model, {**batch, "y": batch["y"] + 9})),
            "metric 'metric' fails (IndexError: Target ",
        ),
    ],
)
def test_an_error_in_a_metric_ends_the_run_and_is_told_with_what_the_batch_has(evaluate, words):
    with pytest.raises(ModuleError) as got:
        training().run([evaluate()])
    assert words in str(got.value)
    assert got.value.__cause__ is not None


def fails(model):
    raise ZeroDivisionError("no test users")


def test_a_function_of_the_model_that_gives_no_named_numbers_is_refused():
    with pytest.raises(SettingError, match="result of the test function='list' must be a mapping from names to num"):
        training().run([Evaluate(lambda model: [0.9])])


def test_the_population_that_trains_is_refused():
    population = small_population()
    with pytest.raises(SettingError, match="test is the population that trains but must hold other users"):
        training(population=population).run([Evaluate(population, accuracy)])


def people(ids, **options):
    x = np.random.default_rng(1).normal(size=(len(ids), 6))
    return Population.from_arrays(ids, x=x, y=np.arange(len(ids)) % 3, **options)


ONE, OTHER = [f"{k:03}" for k in range(40)], [f"{k:03}" for k in range(39, 60)]


@pytest.mark.parametrize("kind", [str, int, float, str.encode, lambda text: UUID(int=int(text))])
def test_a_test_user_whose_id_trains_is_refused_whatever_the_kind_of_ids(kind):
    train, test = people(list(map(kind, ONE))), people(list(map(kind, OTHER)))
    with pytest.raises(SettingError, match=r"some user ids are in both populations.*population\.split") as got:
        training(population=train).run([Evaluate(test, accuracy)])
    assert "39" not in str(got.value)  # neither who nor how many
    others = people(list(map(kind, OTHER[1:])), known_users=list(map(kind, OTHER)))  # 39 has no example to measure on
    assert training(population=train, rounds=1).run([Evaluate(others, accuracy)]).metrics.keys() == {"accuracy"}


def test_ids_are_compared_when_the_training_is_opened_from_a_store_or_a_table(tmp_path):
    rows = ["user,x,y", *(f"{user},0.5,1" for user in ONE)]
    (tmp_path / "rides.csv").write_text("\n".join(rows))
    table = Population.from_table(tmp_path / "rides.csv", "user")
    store = Population.open(table.save(tmp_path / "store"))
    for train in (table, store):
        assert share_users(store.subset([39]), train)
        assert not share_users(people(OTHER[1:]), train)
        assert not share_users(people(list(range(40))), train)  # 7 is not "007"


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int32])
def test_a_number_in_a_dataframe_is_the_user_that_is_text_in_csv(kind):
    numbers, texts = people(np.arange(40, dtype=kind)), people([str(k) for k in range(39, 60)])
    assert share_users(texts, numbers)
    assert share_users(numbers, texts)
    assert not share_users(texts.subset(range(1, 21)), numbers)
    assert not share_users(numbers.subset(range(39)), texts)


def test_halves_of_a_split_are_measured_also_where_users_have_no_ids():
    for whole in (small_population(), population_of([5] * 60)):
        train, test = whole.split(0.3, seed=1)
        assert training(population=train, rounds=1).run([Evaluate(test, accuracy)]).metrics.keys() == {"accuracy"}
        with pytest.raises(SettingError, match="some user ids are in both"):
            training(population=train).run([Evaluate(train.subset([0, 1]), accuracy)])


def test_ids_that_only_number_the_rows_of_a_table_are_not_compared():
    x, y = np.random.default_rng(1).normal(size=(60, 6)), np.arange(60) % 3
    train, test = Population.one_each(x=x, y=y), Population.one_each(x=x[:9], y=y[:9])
    assert training(population=train, rounds=1).run([Evaluate(test, accuracy)]).metrics.keys() == {"accuracy"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: Evaluate(TEST), "metric=None must be given where test is a population"),
        (lambda: Evaluate(lambda model: {}, accuracy), "must be left out where test is a function of the model"),
        (lambda: Evaluate(7), "test=7 must be a Population or a function of the model"),
        (lambda: Evaluate(TEST, accuracy, every=0), "every=0 must be a whole number at least 1"),
        (lambda: Evaluate(TEST, accuracy, batch_size=0), "batch_size=0 must be a whole number at least 1"),
        (lambda: Evaluate(Population(np.array([0, 0]), {"x": np.zeros((0, 6))}), accuracy), "test has 0 examples but"),
    ],
)
def test_what_cannot_be_measured_is_refused_when_it_is_made(given, words):
    with pytest.raises(SettingError, match=words):
        given()


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (cross_entropy, r"metric 'cross_entropy' returned shape \(\) but must return a tensor of shape \(8,\)"),
        (lambda model, batch: 0.5, "metric 'metric' returned float but must return a tensor of shape"),
        (lambda model, batch: {"epsilon": batch["y"]}, "metric='epsilon' must be named other than round, clip"),
    ],
)
def test_a_metric_of_another_form_is_refused(metric, words):
    with pytest.raises(SettingError, match=words):
        training(rounds=1).run([Evaluate(TEST, metric)])


def test_names_that_change_between_batches_are_refused():
    def odd(model, batch):
        return {f"at most {len(batch['y'])}": batch["y"]}

    with pytest.raises(SettingError, match="must be the same in every batch"):
        training(rounds=1).run([Evaluate(TEST, odd, batch_size=50)])


def test_one_object_serves_one_run_at_a_time_and_another_afterwards():
    evaluate = Evaluate(TEST, accuracy)
    run = training()
    evaluate.on_start(run, run.init())
    with pytest.raises(SettingError, match="serves one at a time"):
        training().run([evaluate])
    evaluate.close()
    evaluate.close()  # twice is once
    assert training(rounds=2).run([evaluate]).metrics == training(rounds=2).run([evaluate]).metrics


def test_what_is_no_number_is_null_in_the_files(tmp_path):
    training(rounds=1).run([RunDirectory(tmp_path / "r"), Evaluate(lambda model: {"loss": float("nan")})])
    assert json.loads((tmp_path / "r" / METRICS).read_text())["loss"] is None


@needs_gpu
def test_on_a_gpu_a_state_is_measured_as_it_was_when_its_round_ended():
    run, states = training(rounds=12, compute=Compute(device="cuda")), []
    keep = Observer(lambda report, state: states.append(state))
    result = run.run([Evaluate(TEST, cross_entropies, every=1), keep])
    x, y = torch.tensor(TEST.fields["x"]).float(), torch.tensor(TEST.fields["y"])
    for report, state in zip(result.reports, states, strict=True):
        loss = torch.nn.functional.cross_entropy(run.model_at(state)(x), y).item()
        assert report.metrics["cross_entropies"] == pytest.approx(loss, rel=1e-5)


@needs_gpu
def test_on_a_gpu_a_test_function_may_train_and_measure_itself():
    def made():
        return training(rounds=1, compute=Compute(device="cuda"))

    def fine_tuned(model):
        return made().run([Evaluate(TEST, accuracy, every=1)]).metrics

    assert 0 <= made().run([Evaluate(fine_tuned, every=1)]).metrics["accuracy"] <= 1


def test_a_metric_that_fails_is_told_before_the_first_round_and_no_run_directory_is_made(tmp_path):
    def wrong(model, batch):
        return batch["z"]

    released = Mock()
    with pytest.raises(ModuleError, match=r"metric 'wrong'.*'z'"):
        training(rounds=250).run([RunDirectory(tmp_path / "run"), Observer(released), Evaluate(TEST, wrong, every=200)])
    released.assert_not_called()
    assert not (tmp_path / "run").exists()


def test_trying_a_metric_draws_nothing_that_training_would_draw():
    def random(model, batch):
        return torch.rand(len(batch["y"]))

    torch.manual_seed(3)
    evaluate, trained = Evaluate(TEST, random, every=2), training(rounds=1)
    before = torch.get_rng_state()
    evaluate.on_start(trained, trained.init())
    evaluate.close()
    assert torch.equal(torch.get_rng_state(), before)
