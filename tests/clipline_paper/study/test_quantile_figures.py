import csv
import math

import matplotlib.image
import numpy as np
import pytest

from clipline_paper.study.without_training import FIGURE1_VALUES, QUANTILES, figure1, figure2, quantile_loss


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_loss_by_hand():
    # median of {15, ...}: half the mean distance. At 28: (13 + 3 + 0 + 12 + 17 + 20) / 12
    assert quantile_loss(np.array([28.0]), FIGURE1_VALUES, 0.5)[0] == pytest.approx(65 / 12)


def test_the_losses_are_least_where_the_paper_says(tmp_path):
    table, picture = figure1(tmp_path)
    loss = {}
    for row in rows(table):
        loss.setdefault(float(row["quantile"]), {})[float(row["clip"])] = float(row["loss"])
    lowest = {q: [c for c, v in curve.items() if v <= min(curve.values()) + 1e-9] for q, curve in loss.items()}
    assert (min(lowest[0.5]), max(lowest[0.5])) == (28.0, 40.0)  # any value in [28, 40]
    assert lowest[0.75] == [45.0]
    assert lowest[0.01] == [15.0]
    assert lowest[0.99] == [48.0]
    assert matplotlib.image.imread(picture).std() > 0.05  # something is drawn


def test_the_clip_tracks_five_quantiles_of_three_populations(tmp_path):
    table, picture = figure2(tmp_path, seed=3)
    found = rows(table)
    assert list(found[0])[:6] == ["log_mean", "log_stddev", "quantile", "round", "clip", "true_quantile"]
    assert len(found) == 3 * 5 * 200
    ends, between = 1.2815515655446004, 0.5244005127080407
    normal = {0.1: -ends, 0.3: -between, 0.5: 0.0, 0.7: between, 0.9: ends}
    for row in found:
        truth = math.exp(float(row["log_mean"]) + float(row["log_stddev"]) * normal[float(row["quantile"])])
        assert float(row["true_quantile"]) == pytest.approx(truth, rel=1e-12)
        if row["round"] == "0":
            assert float(row["clip"]) == 0.1
    for row in (row for row in found if row["round"] == "199"):
        slow = row["quantile"] == "0.1" and float(row["log_mean"]) > 0  # still on its way up, as in the paper's plot
        # one deviation of the clip's logarithm is about 0.08 at the widest, so a third is 4 deviations
        assert float(row["clip"]) == pytest.approx(float(row["true_quantile"]), rel=0.4 if slow else 0.33)
    assert set(QUANTILES) == {float(row["quantile"]) for row in found}
    assert matplotlib.image.imread(picture).std() > 0.05


def test_reproduce_from_the_command_line(tmp_path, clipline):
    code, out, _ = clipline("reproduce", "fig1", "--out", "r")
    assert (code, "fig1.csv" in out, (tmp_path / "r" / "fig1.png").exists()) == (0, True, True)
    code, _, err = clipline("reproduce", "fig2", "--seed", "-1", "--out", "s")
    assert (code, len(err.splitlines()), (tmp_path / "s").exists()) == (2, 1, False)
