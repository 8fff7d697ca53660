import math

import made_up_runs
import matplotlib.image
import pytest
from made_up_runs import grid_of, quality

from clipline.errors import RunError
from clipline_paper.study.experiments import EXPERIMENTS, fig3, fig4, fig5, fig6, fig7, learning_rates, run_experiment
from clipline_paper.study.figures import draw
from clipline_paper.study.protocol import protocol_for


def cifar(value=quality, **overrides):
    """The paper's protocol; made-up runs are measured in the last of their four rounds."""
    return grid_of(protocol_for("cifar100", "paper", average_over=1, evaluate_last=1, **overrides), value)


def test_figure_7_by_hand():
    found = fig7(cifar())
    numbers = found.numbers
    # Without noise 0.8, so that 0.76 is tolerable: noise 0.03 costs 0.03, noise 0.1 costs 0.2.
    assert numbers["z_star"] == 0.03
    assert (numbers["clip_min"], numbers["clip_max"]) == (0.2, 3.2)
    assert numbers["clips"] == [0.2, 0.4, 0.8, 1.6, 3.2]
    assert numbers["c_star"] == 0.8
    # Seeds 1 to 20 at the best rate: 0.77 + 0.001 * 10.5 on average; the fixed clip is 0.001 behind.
    assert numbers["median"].mean == pytest.approx(0.7805)
    assert numbers["fixed"].mean == pytest.approx(0.7795)
    assert numbers["median"].low == pytest.approx(0.7805 - 1.96 * 0.00577 / math.sqrt(20), abs=3e-4)
    # Every pair differs by 0.001, which is 0.13% of 0.7795.
    assert numbers["comparison"].verdict == "equivalent (0.13% better)"
    assert numbers["verdict"] == (
        "the median clip is equivalent to the best fixed clip (0.13% better): difference +0.13%, 95% interval "
        "[+0.13%, +0.13%] (20 seeds, paired), all of it inside the margin of 5%"
    )
    assert found.summary[-1] == numbers["verdict"]
    assert not numbers["median_is_worst"]
    assert numbers["noise_helps"] is None
    rates = {row["side"]: row["server_lr"] for row in found.tables[""].rows}
    assert rates == pytest.approx({"median": 1.0, "best fixed clip": 1.0})  # 10^-0.5 times 10^0.5
    assert [len(row["runs"].split()) for row in found.tables[""].rows] == [20, 20]


@pytest.mark.parametrize(("rounds", "said"), [(None, False), (30, True)])
def test_few_rounds_are_said_to_show_no_finding(rounds, said):
    protocol = protocol_for("handwriting", "smoke", rounds=rounds, average_over=4, evaluate_every=1)
    found = run_experiment("fig3", grid_of(protocol, lambda settings: 0.5))
    assert (found.summary[-1].startswith("this shows that it runs, not the finding")) == said


def test_the_final_comparison_is_on_other_users_and_other_seeds():
    grid = cifar(seeds=3)
    fig7(grid)
    parts = {}
    for spec in grid.study.asked.values():
        parts.setdefault(spec.settings.evaluate_on, []).append(spec)
    assert {spec.settings.seed for spec in parts["validation"]} == {0}
    assert sorted(spec.settings.seed for spec in parts["test"]) == [1, 1, 2, 2, 3, 3]
    assert {spec.settings.evaluate_every for spec in parts["test"]} == {4000}  # the final model alone
    original = cifar(seeds=3, original_splits=True)
    fig7(original)
    assert {spec.settings.evaluate_on for spec in original.study.asked.values()} == {"original"}


def test_how_many_runs_the_papers_protocol_asks_for():
    counts = {}
    for what in EXPERIMENTS:
        grid = cifar()
        run_experiment(what, grid)
        counts[what] = len(grid.study.asked)
    # 25 pairs and 5 rates; 5 quantiles x 5 rates and the baseline; 5 x 4 x 5; that and the two quantiles of the range;
    # the median and five clips x 4 x 5, two quantiles of the range x 5, and two sides of 20 seeds.
    assert counts == {"learning-rates": 30, "fig3": 26, "fig4": 25, "fig5": 100, "fig6": 110, "fig7": 170}


def test_an_error_is_chosen_low_and_a_diverged_run_never():
    def error(settings):
        if settings.server_lr > 10:
            return None
        return 1 - quality(settings) if settings.clip != 3.2 else None

    protocol = protocol_for("emnist_ae", "paper", average_over=1, evaluate_last=1, server_lr=10**-0.5)
    found = fig7(grid_of(protocol, error))
    assert found.numbers["c_star"] == 0.8
    # Without noise the error is 0.2, of which 5% are 0.01: noise 0.01 costs 0.01.
    assert found.numbers["z_star"] == 0.01
    assert found.numbers["median"].mean == pytest.approx(0.2105 - 0.011)
    worst = [row for row in found.tables["choice"].rows if row["clip"] == 3.2]
    assert all(math.isnan(row["value"]) and not row["best_at_noise"] for row in worst)


def test_figures_3_to_6_choose_the_best_server_rate():
    third = fig3(cifar())
    chosen = [row for row in third.tables[""].rows if row["chosen"]]
    assert [row["method"] for row in chosen] == ["unclipped"] + ["adaptive"] * 5
    assert [row["value"] for row in chosen] == pytest.approx([0.79, 0.76, 0.78, 0.8, 0.78, 0.78])
    assert third.summary[-1] == (
        "clipping to the median without noise is better than no clipping by 0.01 (1.3%; one seed, one server rate "
        "without clipping, the best of 5 with it)"
    )
    fourth = fig4(cifar())
    assert [row["clip"] for row in fourth.tables[""].rows if row["quantile"] == 0.9] == [0.1, 9.0, 3.2, 3.0]
    assert [row["clip"] for row in fourth.tables["clips"].rows] == [0.2, 3.2, 0.2, 0.4, 0.8, 1.6, 3.2]
    fifth, sixth = fig5(cifar()), fig6(cifar())
    assert fifth.summary[-1] == "noise z = 0.1: quantile 0.5 is best, accuracy 0.6"
    assert sixth.summary[0] == "noise z = 0: clip 0.8 is best, accuracy 0.799"


def test_the_search_finds_table_1s_rates_where_they_are_best():
    found = learning_rates(cifar())
    assert (found.numbers["client_lr"], found.numbers["server_lr"]) == pytest.approx((0.1, 10**-0.5))
    assert "these are the base rates of the other figures" in found.summary
    # 0.8 with the median clip, 0.79 without clipping.
    assert found.summary[-1].endswith("accuracy 0.8, better than no clipping at the best of 25 rates by 0.01 (1.3%)")
    # A client rate ten times the best costs 1 of 0.79; the search has no rate of 1, and one of 0.316, which costs 0.5.
    other = learning_rates(cifar(client_lr=1.0))
    assert any("--client-lr 0.1 --server-lr 0.3162" in line for line in other.summary)
    tried = learning_rates(cifar(client_lr=0.0316227766017))
    assert "server rate 0.316, which are worse than the best by 0.5 (63.3%): give" in tried.summary[1]
    edge = learning_rates(cifar(lambda settings: quality(settings) + math.log10(settings.client_lr)))
    assert "client rate 0.1 and server rate 0.316 are best of 25, at the edge of the grid" in edge.summary[0]


def test_a_clip_that_never_arrives_stops_the_figures_that_need_the_range(monkeypatch, tmp_path):
    monkeypatch.setitem(made_up_runs.FRACTIONS, 0.1, [0.0, 0.0, 0.0, 0.0])
    with pytest.raises(RunError, match="raise --rounds, or raise --clip-start"):
        fig6(cifar())
    found = fig4(cifar())
    assert "raise --rounds, or raise --clip-start" in found.summary[0]
    draw(found, tmp_path / "fig4.png", "made-up users")


def test_pictures_are_drawn_with_diverged_runs_too(tmp_path):
    for what in EXPERIMENTS:
        grid = cifar(lambda settings: None if settings.server_lr > 1.5 else quality(settings), server_rates=(1.0, 10.0))
        findings = run_experiment(what, grid)
        draw(findings, tmp_path / f"{what}.png", "made-up users")
        assert matplotlib.image.imread(tmp_path / f"{what}.png").std() > 0.05
