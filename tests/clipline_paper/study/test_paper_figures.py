from made_up_runs import grid_of, quality

from clipline.plotting import ACCENT, ordered_colours
from clipline_paper.study.experiments import fig6, fig7
from clipline_paper.study.figures import _DRAWN
from clipline_paper.study.protocol import protocol_for


def cifar(value=quality, **overrides):
    return grid_of(protocol_for("cifar100", "paper", average_over=1, evaluate_last=1, seeds=3, **overrides), value)


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
