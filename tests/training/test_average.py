"""The average of released models: what a training with it gives, measures, stores and goes on with."""

import json
import pickle

import numpy as np
import pytest
import torch
from samples import Observer, StopAfter, small_population, small_training

import clipline as cl

PEOPLE, TEST = small_population(90).split(test=0.3, seed=0)


def made(rounds=6, **options):
    return small_training(rounds, **{"server": cl.ServerNormalised(), "population": PEOPLE, **options})


def accuracy(model, batch):
    return (model(batch["x"]).argmax(1) == batch["y"]).float()


def accuracy_of(model):
    x, y = (torch.as_tensor(np.asarray(TEST.fields[name])) for name in ("x", "y"))
    return float(accuracy(model, {"x": x.float(), "y": y}).mean())


def test_a_training_gives_and_measures_the_average_of_its_models_and_has_the_last_beside_it():
    models = []
    result = made().run([cl.Evaluate(TEST, accuracy, every=1), Observer(lambda _, state: models.append(state.params))])
    weights = 0.9 ** torch.arange(5, -1, -1, dtype=torch.float64)
    expected = (weights[:, None] * torch.stack(models)).sum(0) / weights.sum()
    assert result.model.weight.flatten().tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert torch.equal(result.averaged.weight, result.model.weight)
    assert torch.equal(result.last.weight.flatten(), models[-1])
    assert not torch.allclose(result.last.weight, result.model.weight, atol=1e-4)
    assert result.metrics == {
        "accuracy": pytest.approx(accuracy_of(result.model)), "last/accuracy": pytest.approx(accuracy_of(result.last)),
    }  # fmt: skip
    again = pickle.loads(pickle.dumps(result))
    assert torch.equal(again.last.weight, result.last.weight)


def test_only_the_normalised_server_has_an_average_unless_it_is_asked_for():
    for options, average in (
        ({}, True), ({"average": False}, False), ({"server": cl.ServerSGD()}, False),
        ({"server": cl.ServerSGD(), "average": True}, True), ({"server": cl.ServerAdam(0.1), "average": True}, True),
    ):  # fmt: skip
        result = made(3, **options).run([cl.Evaluate(TEST, accuracy)])
        assert (result.averaged is not None) == average
        assert torch.equal(result.model.weight, result.last.weight) != average
        assert result.metrics.keys() == ({"accuracy", "last/accuracy"} if average else {"accuracy"})
        assert ("average" in result.saved, result.model_rounds) == (average, 3)
    with pytest.raises(cl.SettingError, match="average='on' must be True, False or left out"):
        made(average="on")


def test_the_normalised_servers_steps_are_shorter_where_layers_are_wide():
    wide = torch.nn.Sequential(torch.nn.Linear(6, 400), torch.nn.ReLU(), torch.nn.Linear(400, 3))
    assert made(4, model=wide).server.lr == pytest.approx(5 / 20 / 2, rel=1e-12)
    assert made(4).server.lr == pytest.approx(0.37 / 2, rel=1e-12)


def test_the_average_changes_no_round():
    on, off = (made(average=average).run() for average in (True, False))
    assert torch.equal(on.state.params, off.state.params)
    assert on.guarantee == off.guarantee


@pytest.mark.parametrize("noise", [cl.IndependentNoise(), cl.BandedNoise(3)])
def test_a_resumed_run_has_the_same_average_to_the_last_bit(tmp_path, noise):
    whole = made(8, noise=noise).run()
    folder = cl.RunDirectory(tmp_path / "run")
    made(8, noise=noise).run([folder, StopAfter(5)])
    resumed = made(8, noise=noise).resume(tmp_path / "run")
    assert torch.equal(resumed.state.params, whole.state.params)
    assert torch.equal(resumed.model.weight, whole.model.weight)
    assert not torch.equal(whole.model.weight, whole.last.weight)
    made(8, noise=noise).run([cl.RunDirectory(tmp_path / "other"), StopAfter(5)])
    with pytest.raises(cl.CliplineError, match="average = true"):
        made(8, noise=noise, average=False).resume(tmp_path / "other")


def test_the_model_that_is_kept_is_the_one_that_was_measured():
    measured = []

    def shrinking(model):  # the best is that of the first measurement
        measured.append(model.weight.clone())
        return {"accuracy": 1.0 / len(measured)}

    stopping = cl.EarlyStopping("accuracy", patience=1, restore_best=True)
    result = made().run([cl.Evaluate(shrinking, every=2), stopping])
    assert (result.stopped, result.model_rounds, result.metrics["accuracy"]) == ("early", 2, 1.0)
    assert torch.equal(result.model.weight, measured[0])  # the average; the last model is measured after it
    assert torch.equal(result.last.weight.flatten(), result.state.params)
    measured.clear()
    best = made().run([cl.Evaluate(shrinking, every=2, keep_best=True)])
    assert torch.equal(best.model.weight, measured[0])
    with pytest.raises(cl.SettingError, match="must be one that is measured, and those are accuracy"):
        made().run([cl.Evaluate(TEST, accuracy), cl.EarlyStopping("last/accuracy")])


def test_files_say_which_model_was_saved_and_have_the_metrics_of_both(tmp_path):
    folder = cl.RunDirectory(tmp_path / "run")
    result = made().run([folder, cl.Evaluate(TEST, accuracy, every=2)])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"accuracy", "last/accuracy"} < lines[1].keys()
    result.save(tmp_path / "saved")
    card = json.loads((tmp_path / "saved" / "card.json").read_text())
    said = "the exponential average (0.9) of the models released in 6 rounds"
    assert (card["saved"], card["settings"]["average"]) == (said, True)
    assert said in (tmp_path / "saved" / "card.md").read_text()
    assert said in str(result)
    for path in (tmp_path / "run", tmp_path / "saved"):
        saved = cl.load(path, model=torch.nn.Linear(6, 3, bias=False))
        assert torch.equal(saved.model.weight, result.model.weight)


def test_runs_side_by_side_and_by_workers_have_the_averages_that_they_have_alone():
    alone = [made(seed=seed).run().model.weight for seed in (3, 4)]
    for workers in (1, 2):
        together = cl.run_together([made(seed=seed, compute=cl.Compute(workers=workers)) for seed in (3, 4)])
        for one, other in zip(alone, together, strict=True):
            assert torch.allclose(one, other.model.weight, atol=1e-6)
