"""A result can be stored, holds no data and no loss, and says who can subtract the noise."""

import io
import json
import pickle

import pytest
import torch
from samples import LOCAL, flat_training, small_population, small_training

from clipline import Curves, Evaluate, RunDirectory, SettingError

MODEL = torch.nn.Linear(6, 3)


def result(callbacks=(), **changes):
    settings = {"rounds": 3, "cohort_size": 20, "noise_multiplier": 0.5, "local": LOCAL, **changes}
    loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])  # noqa: E731
    return flat_training(MODEL, loss, small_population(), **settings).run(callbacks)


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("stored", [lambda value: pickle.loads(pickle.dumps(value)), saved])
@pytest.mark.parametrize("watched", [False, True])
def test_a_result_is_stored_whole_though_the_loss_is_a_lambda(stored, watched, tmp_path):
    before = result([Curves(tmp_path / "c.png")] if watched else ())  # curves have epsilon accounted in the background
    after = stored(before)
    assert torch.equal(after.model.weight, before.model.weight)
    assert torch.equal(after.state.params, before.state.params)
    assert (after.state.clip, after.state.ledger) == (before.state.clip, before.state.ledger)
    assert (after.guarantee, after.stopped) == (before.guarantee, before.stopped)
    assert [one.guarantee.epsilon for one in after.reports] == [one.guarantee.epsilon for one in before.reports]
    assert len(pickle.dumps(after)) < 20_000  # the users' examples alone are 50 kB


@pytest.mark.parametrize(
    ("changes", "from_seed"),
    [({"seed": 0}, True), ({"seed": None}, False), ({"seed": 0, "noise_source": "system"}, False),
     ({"seed": 0, "noise_multiplier": 0.0}, False)],
)  # fmt: skip
def test_a_result_says_that_whoever_knows_the_seed_can_subtract_the_noise(changes, from_seed):
    found = result(**changes)
    words = "noise from a seed: whoever knows it can subtract the noise"
    assert (words in str(found)) == str(found.guarantee).endswith(words) == from_seed
    assert str(found.reports[0].guarantee).endswith(words) == from_seed


def test_noise_from_a_seed_needs_one():
    with pytest.raises(SettingError, match="seed=None must be given where noise_source='seed': give seed=7, or leave"):
        result(seed=None, noise_source="seed")


def run(*callbacks):
    evaluate = Evaluate(lambda model: {"accuracy": 0.25}, every=2)
    return small_training(3).run([evaluate, *callbacks])


def test_the_history_is_what_the_run_directory_has_as_columns(tmp_path):
    result = run(RunDirectory(tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    columns = result.history()
    assert list(columns) == ["round", "clip", "fraction_within", "epsilon", "delta", "accuracy"]
    assert columns["accuracy"] == [None, 0.25, 0.25]  # after every second round and after the last
    for number, line in enumerate(lines):
        assert {name: column[number] for name, column in columns.items() if name in line} == line
    assert all(seconds > 0 for seconds in result.history(unprivate_timing=True)["unprivate_seconds"])


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_the_history_makes_a_dataframe_in_one_call(library):
    frames = pytest.importorskip(library)
    frame = frames.DataFrame(run().history())
    assert frame.shape == (3, 6)
    assert list(frame["round"]) == [0, 1, 2]
