"""Parameters that stay with their user: trained locally, kept from round to round, never in the sum."""

import itertools
import tomllib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import Gone, GoneAfter, Observer, flat_training, opened
from torch import nn

from clipline import Evaluate, FixedClip, LocalAdam, LocalSGD, Population, RunDirectory, ServerSGD, load, run_together
from clipline.errors import ModuleError, RunError, SettingError
from clipline.federated.backend import CohortRequest
from clipline.federated.sampling import Cohort

ENGINES = ["one-by-one", "stacked"]


class Two(nn.Module):
    """x is about shared + own."""

    def __init__(self, own=0.0):
        super().__init__()
        self.own = nn.ParameterDict({"shift": nn.Parameter(torch.tensor(own))})  # before what is shared
        self.shared = nn.Parameter(torch.zeros(1))


def pull(model, batch):
    return 0.5 * (model.shared[0] + model.own["shift"] - batch["x"]).square()


def people(*values, **options):
    ids = np.array([f"u{place}" for place in range(len(values))])
    return Population.from_arrays(ids, x=np.array(values, np.float32), **options)


def training(population, engine="one-by-one", **changes):
    settings = {
        "rounds": 2, "cohort_size": len(population), "local": LocalSGD(0.5), "clip": FixedClip(100.0),
        "server": ServerSGD(1.0, momentum=0.0), "noise_multiplier": 0.0, "seed": 0, "personal": ["own.*"],
    }  # fmt: skip
    return flat_training(changes.pop("model", Two()), pull, population, engine=engine, **{**settings, **changes})


def rows_of(run):
    return {user: round(float(own["own.shift"]), 6) for user, own in run.unprivate_personal().items()}


@pytest.mark.parametrize(("engine", "workers"), [("one-by-one", 1), ("stacked", 1), ("one-by-one", 2)])
def test_two_rounds_by_hand(engine, workers):
    # Round 0: both err by 4 and -2, and half of it goes into each parameter; the mean of 2 and -1 is released.
    # Round 1: 4 - 0.5 - 2 = 1.5 and -2 - 0.5 + 1 = -1.5, half of it into each; the mean is 0.
    run = training(people(4.0, -2.0), engine, workers=workers)
    assert (run.dim, type(run.trainer).__name__) == (1, "OneByOne" if engine == "one-by-one" else "Stacked")
    measured = Evaluate(lambda model: {"shared": model.shared.item(), "own": model.own["shift"].item()}, every=1)
    result = run.run([measured])
    assert [(report.metrics["shared"], report.metrics["own"]) for report in result.reports] == [(0.5, 0.0)] * 2
    assert rows_of(run) == {"u0": 2.75, "u1": -1.75}
    # What is given away has the initial values for everybody.
    assert result.model.own["shift"].item() == 0.0
    assert result.model.shared.item() == pytest.approx(0.5)
    assert len(result.state.params) == 1


def test_a_loaded_model_predicts_for_one_user_with_that_users_own_parameters_and_for_others_without(tmp_path):
    run = training(people(4.0, -2.0))
    folder = run.run().save(tmp_path / "saved")
    saved = load(folder, Two(), predict=lambda model, batch: model.shared[0] + model.own["shift"] + 0 * batch["x"])
    own = run.unprivate_personal()
    mine = saved.with_personal(own["u0"])
    assert str(mine).endswith("; it does not cover the personal parameters of one user, which this model holds")
    assert str(saved.with_personal({})) == str(saved)  # a user who never took part
    assert mine.predict({"x": [0.0]}).tolist() == [3.25]  # 0.5 of everybody and 2.75 of the user's own, see above
    assert saved.predict({"x": [0.0]}).tolist() == [0.5]
    save_file({"own.shift": own["u1"]["own.shift"]}, tmp_path / "u1.safetensors")
    assert saved.with_personal(tmp_path / "u1.safetensors").predict({"x": [0.0]}).tolist() == [-1.25]
    for wrong, words in (
        ({"shared": torch.ones(1)}, "'shared' is no personal parameter of the training: "),
        ({"own.shift": torch.ones(2)}, r"'own.shift' is float32 \(2,\) but must be float32 \(\), as in the model"),
    ):
        with pytest.raises(ModuleError, match=words):
            saved.with_personal(wrong)
    with pytest.raises(RunError, match="nowhere' is no file"):
        saved.with_personal("nowhere")
    with pytest.raises(SettingError, match="values=None must be tensors by name"):
        saved.with_personal(None)
    (tmp_path / "damaged").write_bytes(b"x")
    with pytest.raises(RunError, match="cannot be read as safetensors"):
        saved.with_personal(tmp_path / "damaged")


@pytest.mark.parametrize("engine", ENGINES)
def test_removing_a_user_moves_every_rounds_sum_by_that_users_clipped_update_alone(engine):
    clip, params = 0.3, [torch.tensor([0.1]), torch.tensor([-0.4]), torch.tensor([0.7])]

    def sums(population, drawn):
        """The private sums of three rounds in which these users are drawn."""
        run = training(population, engine, clip=FixedClip(clip), cohort_size=1, rounds=3, local=LocalSGD(0.1))
        totals = []
        for t, users in enumerate(drawn):
            ids = sorted(set(users) & set(population.user_ids.tolist()))
            places = np.searchsorted(population.user_ids, ids)
            cohort = Cohort(places, run.algorithm.sampler.sampling)
            rows = run.personal.request(t, places)
            (total,) = run.backend.sums([CohortRequest(params[t], cohort, t, lambda: clip, personal=rows)])
            run.personal.add(t, places, rows)
            totals.append(opened(total))
        return totals

    drawn = [("u0", "u1", "u2"), ("u1", "u2"), ("u0", "u2")]
    everybody = people(4.0, -2.0, 1.0)
    alone, rest = (everybody.subset(chosen) for chosen in ([0], [1, 2]))
    with_all, without, own = (sums(population, drawn) for population in (everybody, rest, alone))
    for t, users in enumerate(drawn):
        expected = own[t] if "u0" in users else torch.zeros(2)
        torch.testing.assert_close(with_all[t] - without[t], expected.to(with_all[t]), rtol=0, atol=1e-6)
        assert float(expected[:-1].norm()) <= clip * (1 + 1e-9)
    # u0 keeps 0.1 (4 - 0.1) = 0.39 from round 0, clipped in the sum only: 0.1 (4 - 0.7 - 0.39) in round 2, not 0.33.
    assert [float(total[0]) for total in own] == pytest.approx([0.3, 0.0, 0.291], abs=1e-6)
    assert float(sums(alone, [(), (), ("u0",)])[2][0]) == pytest.approx(0.3)


@pytest.mark.parametrize("engine", ENGINES)
def test_who_fails_keeps_what_was_there(engine):
    population = people(4.0, np.nan, missing="zero-update")
    run = training(population, engine, model=Two(own=1.0))
    run.run()
    assert rows_of(run)["u1"] == 1.0
    assert rows_of(run)["u0"] != 1.0


@pytest.mark.parametrize("local", [LocalSGD(0.3, 3, 2), LocalAdam(0.1, 3, 2, proximal=0.5, clip_norm=1.0)])
def test_sparse_rows_and_both_engines_keep_the_same_rows(local):
    class Likes(nn.Module):
        def __init__(self):
            super().__init__()
            self.taste, self.films = nn.Parameter(torch.full((4,), 0.1)), nn.Embedding(30, 4)
            nn.init.normal_(self.films.weight, generator=torch.Generator().manual_seed(0))

    def loss(model, batch):
        return (model.films(batch["film"]) @ model.taste - batch["stars"]).square()

    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(5), [4, 1, 7, 3, 2])
    fields = {"film": rng.integers(0, 30, len(users)), "stars": rng.normal(size=len(users)).astype(np.float32)}
    population, found = Population.from_arrays(users, **fields), []
    for engine, row_fields in itertools.product(ENGINES, ({}, {"films.weight": "film"})):
        run = flat_training(
            Likes(), loss, population, rounds=3, cohort_size=3, local=local, noise_multiplier=0.0, seed=1,
            personal=["taste"], engine=engine, row_fields=row_fields,
        )  # fmt: skip
        params = run.run().state.params
        found.append((params, {user: own["taste"] for user, own in run.unprivate_personal().items()}))
    (params, tastes), *others = found
    assert max(float((taste - 0.1).abs().max()) for taste in tastes.values()) > 0.01
    for other, theirs in others:
        torch.testing.assert_close(other, params, rtol=1e-4, atol=1e-6)
        assert theirs.keys() == tastes.keys()
        for user, taste in tastes.items():
            torch.testing.assert_close(theirs[user], taste, rtol=1e-4, atol=1e-6)


def test_a_resumed_run_ends_as_the_whole_one_and_what_is_saved_has_no_users_parameters(tmp_path):
    def made(**changes):
        return training(people(4.0, -2.0, 1.0), rounds=6, cohort_size=2, noise_multiplier=0.5, **changes)

    whole, kept = made(), []
    expected = whole.run([RunDirectory(tmp_path / "whole")])
    with pytest.raises(Gone):
        made().run([RunDirectory(tmp_path / "r", checkpoint_every=2), GoneAfter(5)])
    stored = load_file(tmp_path / "r" / "checkpoint.safetensors")
    assert stored["unprivate personal.rows"].shape == (len(stored["unprivate personal.users"]), 1)
    assert tomllib.loads((tmp_path / "r" / "settings.toml").read_text())["personal"] == ["own.*"]
    with pytest.raises(RunError, match="personal"):
        made(personal=["shared"]).resume(tmp_path / "r")
    cut = tmp_path / "r" / "checkpoint.safetensors.partial"  # what a write that was killed leaves
    cut.write_bytes((tmp_path / "r" / "checkpoint.safetensors").read_bytes())
    resumed = made(model=Two(own=9.0))  # other values of personal parameters: those of the first start count
    again = resumed.resume(tmp_path / "r", [Observer(lambda report, state: kept.append(cut.exists()))])
    assert torch.equal(again.state.params, expected.state.params)
    assert rows_of(resumed) == rows_of(whole)
    assert kept
    assert not any(kept)
    assert not [left for left in (tmp_path / "r").iterdir() if "checkpoint" in left.name]
    expected.save(tmp_path / "saved")
    for folder in ("whole", "saved"):
        assert load_file(tmp_path / folder / "model.safetensors")["own.shift"].item() == 0.0
    with pytest.raises(RunError, match=r"round_index=6 must be that of the last state of this training"):
        made().run(state=expected.state)


def test_runs_side_by_side_keep_their_users_apart():
    def made(lr):
        return training(people(4.0, -2.0, 1.0), "stacked", local=LocalSGD(lr), rounds=3)

    first, second = made(0.5), made(0.1)
    second.population = second.problem.examples.population = first.population
    apart = []
    for lr in (0.5, 0.1):
        run = made(lr)
        apart.append((run.run().state.params, rows_of(run)))
    results = run_together([first, second])
    for run, result, (params, rows) in zip((first, second), results, apart, strict=True):
        torch.testing.assert_close(result.state.params, params)
        assert rows_of(run) == pytest.approx(rows, abs=1e-5)


def test_what_cannot_be_personal_is_refused():
    population = people(4.0, -2.0)
    for changes, error, words in (
        ({"personal": ["owns.*"]}, ModuleError, r"personal names 'owns.\*', and no trainable parameter is called so"),
        ({"personal": ["*"]}, ModuleError, "matches all 2 trainable parameters"),
        ({"personal": "own"}, SettingError, "personal='own' must be a list"),
        ({"sampling": "fixed"}, SettingError, "left out where sampling='fixed'"),
    ):
        with pytest.raises(error, match=words):
            training(population, **changes)
    assert training(population, personal=()).unprivate_personal() == {}
    assert repr(training(population).personal) == "PersonalStore(private)"
