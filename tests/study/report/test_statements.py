import numpy as np
import pytest
import torch
from reported_runs import add_rounds, write_run

import clipline as cl
from clipline.study.report.content import basis, cautions, content, shown_settings, warnings, words
from clipline.study.report.reading import collect
from clipline.training.run_directory import resolved_comments


def read(path):
    return collect([path]).runs[0]


def test_a_private_run_has_no_warning_and_says_all_it_rests_on(tmp_path):
    run = read(write_run(tmp_path / "r"))
    assert warnings(run) == []
    assert words(run).startswith("(epsilon ")
    rests_on = dict(basis(run))
    assert rests_on["sampler"] == "no sampling, every user in every round"
    assert rests_on["neighbouring relation"] == "add-or-remove: one user more or one user less"
    assert rests_on["accountant"] in ("privacy loss", "renyi")
    assert (rests_on["delta"], rests_on["rounds charged"]) == ("1e-05", "20")
    assert rests_on["population"] == "100 users, declared beforehand"
    assert content(collect([tmp_path / "r"]))["runs"][0]["delta_text"] == "1e-05"
    assert rests_on["noise of a round, z"] == "1"
    assert rests_on["of it on the updates, z_delta"] == "1.00504"  # (1 - 0.1^2)^-0.5, by Theorem 1
    assert rests_on["and on the count within the clip"] == "5 users"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"z": 0.0}, "no noise was added"),
        ({"z": 0.0, "clip": '"none"'}, "updates were not clipped"),
        ({"relation": "paper"}, "the paper's convention"),
        ({"seed": 7}, "can subtract the noise"),
    ],
)
def test_what_is_not_private_is_warned_of(tmp_path, made, words):
    found = warnings(read(write_run(tmp_path / "r", **made)))
    assert any(words in text for text in found), found


def test_epsilon_and_delta_are_never_rounded_down(tmp_path):
    run = write_run(tmp_path / "r")
    file = run / "settings.toml"
    file.write_text(file.read_text().replace("delta = 1e-05", "delta = 8.661e-06"))
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"delta": 1e-05', '"delta": 8.661e-06'))
    assert dict(basis(read(run)))["delta"] == "8.67e-06"
    shown = content(collect([run]))["runs"][0]
    assert shown["delta_text"] == "8.67e-06"
    assert shown["epsilon"] <= float(shown["epsilon_text"]) < 1.01 * shown["epsilon"]


def test_unprivate_columns_are_warned_of_and_not_shown(tmp_path):
    run = write_run(tmp_path / "r", rounds=0)
    add_rounds(run, 0, 20, unprivate_seconds=0.123456)
    assert any("unprivate_seconds" in text for text in warnings(read(run)))
    assert "0.12346" not in str(content(collect([run])))


def test_metrics_on_the_training_users_are_warned_of(tmp_path):
    run = write_run(tmp_path / "r")
    file = run / "settings.toml"
    insiders = "other examples of the training users, which the guarantee does not cover"
    file.write_text(file.read_text().replace("users outside the training population", insiders))
    assert any("training users" in text for text in warnings(read(run)))


@pytest.mark.parametrize("seed", [7, 1234567890123456789])
def test_a_report_shows_no_seed_of_a_run(tmp_path, seed):
    """One that is easily guessed is warned of; where noise and cohorts came from the system it says nothing of them."""
    drawn = shown_settings(read(write_run(tmp_path / "drawn", seed=seed)))
    assert drawn["seed"] == "not shown: whoever knows it can subtract the noise"
    run = write_run(tmp_path / "system", seed=seed, noise_source='"system"')
    shown = "not shown: cohorts and noise came from the operating system, not from it"
    assert shown_settings(read(run))["seed"] == shown
    assert f"'{seed}'" not in str(content(collect([run, tmp_path / "drawn"])))
    assert warnings(read(run)) == []
    write_run(tmp_path / "none", seed=seed, z=0.0)  # the noise of a run beside it may come from the same seed
    assert f"'{seed}'" not in str(content(collect([tmp_path / "none", tmp_path / "drawn"])))


def test_a_report_promises_what_the_run_promised_for_one_example_and_with_errors_shown(tmp_path):
    examples = cl.Population.one_each(x=np.ones((40, 1), np.float32))
    training = cl.Training(
        torch.nn.Linear(1, 1), lambda model, batch: model(batch["x"]).square()[:, 0], examples,
        rounds=1, cohort_size=20, local=cl.LocalSGD(0.1), on_error="raise",
        privacy=cl.Privacy(noise_multiplier=1.0, delta=1e-5),
    )  # fmt: skip
    file = write_run(tmp_path / "r") / "settings.toml"
    file.write_text(file.read_text().partition("\n# Resolved")[0] + resolved_comments(training))
    run = read(tmp_path / "r")
    for said in (words(run), str(training.planned)):
        assert "where each user is one example" in said
        assert said.endswith("errors of users are shown (on_error='raise'), which it does not cover")
    assert any("errors of users are shown" in text for text in warnings(run))


def test_an_interrupted_run_says_what_was_planned(tmp_path):
    run = write_run(tmp_path / "r", rounds=10)
    told = "it was interrupted: if because of what was seen, quote what was planned: something"
    assert told not in cautions(read(run))  # it may go on
    for file in ("model.safetensors", "checkpoint.safetensors"):
        (run / file).touch()
    assert told in cautions(read(run))
