import math
from dataclasses import replace

import matplotlib.image
import pytest
from made_up_runs import grid_of, quality

from clipline.plotting import ACCENT, ordered_colours
from clipline_paper.study import figures
from clipline_paper.study.experiments import Table, fig3, fig6, fig7
from clipline_paper.study.figures import _DRAWN, draw_fig3_all, draw_summary
from clipline_paper.study.protocol import protocol_for
from clipline_paper.study.rules import ClipComparison, Interval


def compared(label, low, mean, high, word):
    return label, ClipComparison(word, "", Interval(mean, low, high, 5))


def cifar(value=quality, **overrides):
    return grid_of(protocol_for("cifar100", "paper", average_over=1, evaluate_last=1, seeds=3, **overrides), value)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are written from now on."""
    written = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: written.append(figure))
    return written


def test_c_star_has_the_colour_and_marker_of_that_clip_on_both_sides_of_figure_7_and_in_figure_6():
    # The clips are 0.2, 0.4, 0.8, 1.6, 3.2, of which 0.8, the third, is best.
    third = ordered_colours(5)[2]
    left, right = _DRAWN["fig7"](fig7(cifar()))[0].axes
    (line,) = [line for line in left.lines if line.get_color() == third]
    (alone,) = [line for line in _DRAWN["fig6"](fig6(cifar()))[0].axes[0].lines if line.get_color() == third]
    means = [line for line in right.lines if line.get_marker() not in ("None", "_", None) and line.get_color() != "0.8"]
    assert [mean.get_color() for mean in means] == [ACCENT, third]
    assert means[1].get_marker() == line.get_marker() == alone.get_marker()
    assert line.get_ydata()[2] == max(ys[2] for ys in (one.get_ydata() for one in left.lines[:5]))  # at z* = 0.03
    assert {text.get_text() for text in left.texts} >= {"fixed 0.8", "median"}


def test_both_runs_of_a_seed_are_joined():
    right = _DRAWN["fig7"](fig7(cifar()))[0].axes[1]
    pairs = sorted(tuple(line.get_ydata()) for line in right.lines if line.get_color() == "0.8")
    # A seed is worth 0.001 and the median is 0.001 ahead: 0.77 + 0.001 seed, as Figure 7 by hand.
    assert pairs == [pytest.approx((0.77 + 0.001 * seed, 0.769 + 0.001 * seed)) for seed in (1, 2, 3)]


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_figure_3_of_several_tasks_has_a_panel_each_and_bars_where_there_are_seeds(drawn, tmp_path, count):
    found = fig3(cifar())
    table = found.tables[""]
    rows = [{**row, "low": row["value"] - 0.01, "high": row["value"] + 0.02} for row in table.rows]
    seeded = replace(found, tables={"": Table((*table.columns, "low", "high"), rows)})
    draw_fig3_all(tmp_path / "all.png", [found] * (count - 1) + [seeded])
    (figure,) = drawn
    shown = [axis for axis in figure.axes if axis.get_visible()]
    assert [("one seed" in a.get_title(), "95%" in a.get_title()) for a in shown] == [(True, False)] * (count - 1) + [
        (False, True)
    ]
    assert len(shown[-1].containers) == 6  # no clipping and five quantiles, a bar each
    assert len({axis.get_position().y0 for axis in shown}) == (1 if count < 4 else 2)


def test_the_summary_has_a_row_a_task_the_margin_and_an_arrow_for_what_is_too_far(drawn, tmp_path):
    rows = [
        compared("emnist_cr", -0.1, 0.05, 0.2, "equivalent"),
        compared("so_lr", -8.8, -4.3, -0.3, "worse"),
        compared("emnist_ae", -555.0, -551.4, -548.0, "worse"),
        compared("lost", math.nan, math.nan, math.nan, "undecided"),
    ]
    draw_summary(tmp_path / "summary.png", rows)
    (axis,) = drawn[0].axes
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["emnist_cr", "so_lr", "emnist_ae", "lost"]
    texts = [text.get_text() for text in axis.texts if text.get_text()]
    assert texts == ["equivalent", "worse", "−551%", "worse", "a run diverged", "undecided"]
    low, high = axis.get_xlim()
    assert low < -8.8
    assert high < 50
    (band,) = axis.patches
    assert (band.get_x(), band.get_x() + band.get_width()) == (-5.0, 5.0)
    assert [line.get_xdata()[0] for line in axis.lines[1:]] == [0.05, -4.3]


def test_an_interval_that_leaves_the_summary_ends_in_an_arrow(drawn, tmp_path):
    draw_summary(tmp_path / "summary.png", [compared("so_nwp", -3.0, 4.0, 60.0, "undecided")])
    (axis,) = drawn[0].axes
    arrows = {text.xy[0]: text.arrow_patch.get_arrowstyle() for text in axis.texts if text.arrow_patch is not None}
    assert set(arrows) == {-3.0, axis.get_xlim()[1]}
    assert type(arrows[-3.0]) is not type(arrows[axis.get_xlim()[1]])


def test_both_are_written_as_png(tmp_path):
    draw_fig3_all(tmp_path / "a.png", [fig3(cifar())])
    draw_summary(tmp_path / "b.png", [compared("so_lr", -8.8, -4.3, -0.3, "worse")])
    assert all(matplotlib.image.imread(tmp_path / name).std() > 0.05 for name in ("a.png", "b.png"))
