"""The studies of federations: what drops out, what intervals mean, and where Flower's own clip goes."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from samples import ROOT, load_script

pytest.importorskip("flwr", reason="the extra federation is not installed")

from federations import UPDATES, USERS, training

import clipline as cl

uploads = load_script(ROOT / "studies" / "uploads.py")


@pytest.mark.parametrize(("share", "stay"), [(0.0, 1), (1.0, 0)])
def test_users_who_drop_out_are_not_in_the_sum(share, stay):
    made = training(uploads.Dropping(cl.RandomMask(1.0), share), rounds=1)
    made.algorithm = replace(made.algorithm, server=cl.ServerSGD(1.0, momentum=0.0))
    result = made.run()
    clipped = UPDATES * (0.3 / UPDATES.norm(dim=1, keepdim=True)).clamp(max=1)  # 0.3 is the first clip
    assert torch.allclose(result.state.params, stay * clipped.mean(dim=0), atol=1e-6)
    within = float((UPDATES.norm(dim=1) <= 0.3).double().mean())
    assert result.reports[0].fraction_within == pytest.approx(0.5 + stay * (within - 0.5))


def test_a_sum_of_too_few_shares_is_not_simulated():
    short = uploads.Dropping(cl.SecureSum(18, least_survivors=USERS), share=0.9)
    made = training(short, noise_multiplier=1.0, rounds=1)
    with pytest.raises(AssertionError, match="abandon"):
        made.run()


def test_flowers_clip_runs_away_from_the_median_and_ours_does_not(monkeypatch):
    flower_clip = load_script(ROOT / "studies" / "flower_clip.py")
    monkeypatch.setattr(flower_clip, "ROUNDS", 6)
    monkeypatch.setattr(logging.getLogger("flwr"), "level", logging.ERROR)
    assert flower_clip.UPDATES.norm(dim=1).median() == pytest.approx(1, abs=0.05)
    for start, away in ((0.1, -1), (5.0, 1)):
        flower, ours = np.log(flower_clip.flowers(start)), np.log(flower_clip.ours(start))
        assert (away * np.diff(flower) > 0).all()
        assert (away * np.diff(ours) < 0).all()
