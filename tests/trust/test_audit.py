import json
import math
import warnings
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.special import betainc
from scipy.stats import beta, binom

from clipline.cli.parser import app
from clipline.errors import SettingError
from clipline.federated.mechanism import GaussianMechanism
from clipline.trust import audit as module
from clipline.trust.audit import (
    audit,
    draw_audit,
    log_null_tail,
    made_up_training,
    one_run_bound,
    one_run_p_value,
    one_shot_bound,
)


# From the tests of google-research/federated, one_shot_epe/empirical_privacy_estimation_lib_test.py (Apache-2.0).
@pytest.mark.parametrize(("dim", "epsilon"), [(200, 1.394838), (2000, 1.3880321)])
def test_one_shot_bounds_of_the_papers_authors(dim, epsilon):
    cosines = np.random.default_rng(0xBAD5EED).normal(dim**-0.5, dim**-0.5, 100)
    assert one_shot_bound(cosines, dim, alpha=1e-2, delta=1e-2) == pytest.approx(epsilon, rel=1e-6)


def test_the_law_of_other_directions_is_that_of_drawn_ones():
    rng, dim = np.random.default_rng(1), 6
    rows = rng.normal(size=(200_000, dim))
    cosines = rows[:, 0] / np.linalg.norm(rows, axis=1)
    for place in (-0.5, 0.0, 0.3, 0.8):
        chance = np.exp(log_null_tail(np.array([place]), dim))[0]
        assert abs(np.mean(cosines >= place) - chance) < 5 * math.sqrt(0.25 / 200_000)
    above = np.linspace(0.01, 0.2, 20)  # from 1000 on by another law, which is never below by more than 0.001
    assert (log_null_tail(above, 1000) > np.log(betainc(999 / 2, 0.5, 1 - above**2) / 2) - 1e-3).all()


def test_a_single_threshold_by_hand():
    cosines = np.array([0.5, 0.5, 0.5])
    missed = beta.ppf(0.95, 0.5, 3.5)
    wanted = math.log(1 - 1e-3 - missed) - math.log(betainc(4.5, 0.5, 0.75) / 2)
    assert one_shot_bound(cosines, 10, alpha=0.05, delta=1e-3) == pytest.approx(wanted)


def test_the_theorem_of_one_run_by_plain_sums():
    def chances(epsilon, guesses):
        right = math.exp(epsilon) / (1 + math.exp(epsilon))
        return [math.comb(guesses, k) * right**k * (1 - right) ** (guesses - k) for k in range(guesses + 1)]

    for guesses, correct, epsilon, delta in ((10, 9, 0.5, 0.0), (20, 17, 1.0, 1e-3), (30, 30, 2.0, 1e-2)):
        chance = chances(epsilon, guesses)
        pure = sum(chance[correct:])
        near = max(sum(chance[correct - i : correct]) / i for i in range(1, correct + 1))
        wanted = min(1.0, pure + 2 * 40 * delta * near)
        assert one_run_p_value(40, guesses, correct, epsilon, delta) == pytest.approx(wanted)


def test_the_bound_of_coins_that_are_all_guessed():
    """(e^epsilon / (1 + e^epsilon))^guesses is the level, a quarter of alpha: solved by hand."""
    inside, outside = np.arange(1.0, 101.0), -np.arange(1.0, 101.0)
    level = 0.05 / 4
    assert one_run_bound(inside, outside, alpha=0.05, delta=0.0) == pytest.approx(
        -math.log(level ** (-1 / 200) - 1), abs=1e-5
    )
    assert one_run_bound(outside, inside, alpha=0.05, delta=0.0) == 0.0


def test_both_bounds_are_rarely_above_the_truth():
    """Randomised response tells epsilon 1 of each coin exactly; 200 audits at 5% fail more than 24 times by 1e-4."""
    rng, epsilon, failed = np.random.default_rng(2), 1.0, 0
    for _ in range(200):
        coins = rng.random(100) < 0.5
        told = np.where(rng.random(100) < 1 / (1 + math.exp(epsilon)), ~coins, coins) + rng.random(100) / 2
        failed += one_run_bound(told[coins], told[~coins], alpha=0.05, delta=0.0) > epsilon
    assert binom.sf(24, 200, 0.05) < 1e-4
    assert failed <= 24


@pytest.fixture(scope="module")
def sound():
    return audit(made_up_training(epsilon=4.0, rounds=3), canaries=400, seed=1)


def test_a_sound_training_is_not_refuted(sound):
    assert not sound.refuted
    assert sound.claim.epsilon == pytest.approx(4.0, abs=1e-3)
    assert 0.9 * 3 - 0.2 < sound.took_part < 0.9 * 3 + 0.2
    for view in sound.views:
        assert len(view.inside) + len(view.outside) == 400
        assert 0.3 < view.bound <= 4.0, "an audit that shows nothing is no audit"
        assert abs(view.outside.mean()) < 5 / math.sqrt(sound.dim * len(view.outside))


def test_noise_that_is_scaled_wrongly_is_refuted():
    real = GaussianMechanism.delta_stddev
    with mock.patch.object(GaussianMechanism, "delta_stddev", lambda self, bound: real(self, bound) / 16):
        found = audit(made_up_training(epsilon=1.0, rounds=3), canaries=400, seed=1)
    assert found.refuted
    for view in found.views:  # the noise is not seeded: over 25 runs none was below 1.9
        assert view.one_run > 1.0
        assert view.one_shot > 1.0


def test_a_clip_that_is_not_applied_is_refuted():
    def unclipped(norms, clip):
        scale, within = real(norms, clip)
        return scale.new_ones(scale.shape), within

    from clipline.federated import clipping

    real = clipping.clip_factors
    with mock.patch.object(clipping, "clip_factors", unclipped):
        assert audit(made_up_training(epsilon=2.0, rounds=3), canaries=400, seed=1).refuted


def test_canaries_are_told_apart_by_whoever_knows_them_and_the_figure_shows_both(sound, tmp_path):
    for view in sound.views:
        assert view.inside.mean() > view.outside.mean() + 4 / math.sqrt(sound.dim * 100)
    draw_audit(sound, tmp_path / "audit.png")
    assert (tmp_path / "audit.png").read_bytes()[:4] == b"\x89PNG"


RIDES = """
import torch

SETTINGS = dict(rounds=4, cohort_size=20, client_lr=0.1, epsilon=3.0, population_size=30, seed=4, delta=1e-4)

def model():
    return torch.nn.Linear(2, 200)

def loss(model, batch):
    return (model(torch.stack([batch["km"], batch["age"]], 1)).mean(1) - batch["fare"]).square()
"""


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_ones_own_task_is_audited_on_the_command_line(tmp_path, sampling):
    given = RIDES if sampling == "poisson" else RIDES.replace("population_size=30", "sampling='fixed'")
    (tmp_path / "rides.py").write_text(given)
    rows = np.random.default_rng(0).normal(size=(60, 3)).round(3)
    lines = [f"{number % 30},{km},{age},{fare}" for number, (km, age, fare) in enumerate(rows)]
    (tmp_path / "rides.csv").write_text("rider,km,age,fare\n" + "\n".join(lines))
    own = ["--model", str(tmp_path / "rides.py"), "--data", str(tmp_path / "rides.csv"), "--user-column", "rider"]
    with warnings.catch_warnings(action="ignore"):
        run = CliRunner().invoke(
            app, ["audit", *own, "--canaries", "40", "--out", str(tmp_path / "out")], standalone_mode=False
        )
    assert run.exception is None
    assert not run.return_value
    assert "nothing contradicts the claim" in run.stdout
    assert "one shot too few parameters" not in run.stdout
    answer = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert answer["parameters"] == 600
    assert answer["refuted"] is False
    assert all(view["one_run"] <= answer["epsilon"] for view in answer["views"])
    assert (tmp_path / "out" / "audit.png").is_file()


def test_a_refuted_claim_is_an_exit_code(sound, monkeypatch):
    view = module.View("released updates", np.ones(3), np.zeros(3), 99.0, None)
    refuted = module.Audited(sound.claim, (view, view), 10, 1, 1.0)
    monkeypatch.setattr(module, "audit", lambda training, canaries: refuted)
    run = CliRunner().invoke(app, ["audit"], standalone_mode=False)
    assert run.return_value == 1
    assert "Do not rely on it" in run.output


def test_too_few_canaries_are_refused():
    with pytest.raises(SettingError, match="canaries=3 must be"):
        audit(made_up_training(rounds=1), canaries=3)


def test_directions_are_drawn_again_alike_and_of_norm_1():
    flock = module._Canaries(500, 3)
    rows = flock.rows(range(5))
    assert np.allclose(np.linalg.norm(rows, axis=1), 1)
    assert (flock.rows([3])[0] == rows[3]).all()
    assert all(abs(float(one @ other)) < 0.25 for one, other in pairwise(rows))
    assert flock.cosines(5, rows[2].astype(float)) == pytest.approx(rows @ rows[2], abs=1e-6)
