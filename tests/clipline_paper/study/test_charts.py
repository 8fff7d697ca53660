"""Charts of a report from tables written by hand."""

import csv
import io
import math

from clipline_paper.study.charts import report_figures
from clipline_paper.study.experiments import Findings, Table
from clipline_paper.study.protocol import protocol_for

OF_RUN = "method,quantile,clip,noise_at_100,noise_multiplier,client_lr,server_lr"
FIG5 = f"""{OF_RUN},value,outcome,chosen,runs
adaptive,0.5,,0.0,0.0,0.1,1,0.80,finished,,a
adaptive,0.5,,0.0,0.0,0.1,3,0.84,finished,yes,b
adaptive,0.1,,0.0,0.0,0.1,1,0.70,finished,yes,c
adaptive,0.5,,0.1,0.04,0.1,1,0.75,finished,yes,d
"""
FIG6 = f"""{OF_RUN},value,outcome,chosen,runs
fixed,,0.1,0.0,0.0,0.1,1,0.60,finished,yes,e
fixed,,2.0,0.0,0.0,0.1,1,0.85,finished,yes,f
fixed,,0.1,0.1,0.04,0.1,1,0.70,finished,yes,g
fixed,,2.0,0.1,0.04,0.1,1,0.40,finished,yes,h
"""
FIG7 = f"""side,{OF_RUN},mean,low,high,seeds,runs
median,adaptive,0.5,,0.3,0.12,0.1,1,0.84,0.83,0.85,2,k l
best fixed clip,fixed,,2.0,0.3,0.12,0.1,1,0.83,0.82,0.84,2,i j
"""


def table(text):
    """Numbers as numbers; what is not there is None, or NaN as a metric."""

    def typed(name, text):
        if not text:
            return math.nan if name == "value" else None
        try:
            return float(text)
        except ValueError:
            return text

    rows = [{name: typed(name, cell) for name, cell in row.items()} for row in csv.DictReader(io.StringIO(text))]
    return Table(tuple(rows[0]), rows)


def charts(task="emnist_cr", **tables):
    protocol = protocol_for(task, "small", cohort_size=40)
    found = {}
    for name, text in tables.items():
        what, _, suffix = name.partition("_")
        found.setdefault(what, {})[suffix] = table(text)
    if "fig7" in found:
        found["fig7"].setdefault("choice", table(FIG6))
    figures = report_figures([Findings(what, protocol, of_what) for what, of_what in found.items()])
    assert {figure.task for figure in figures} == {task}
    return {figure.name: figure for figure in figures}


def values(figure):
    return {label: {figure.ticks[p.x]: p.value for p in points} for label, points in figure.lines}


def test_of_several_server_rates_the_chosen_one_counts():
    figure = charts(fig5=FIG5)["fig5"]
    assert figure.ticks == ("0", "0.1")
    assert figure.x_label == "noise multiplier z at 100 users a round; with 40 users, 0.4 times that"
    assert values(figure) == {"quantile 0.1": {"0": 0.7}, "quantile 0.5": {"0": 0.84, "0.1": 0.75}}
    assert [p.runs for _, points in figure.lines for p in points] == ["c", "b", "d"]
    assert len(figure.rows) == 4  # the table has all


def test_median_against_best_and_worst_fixed_clip_at_each_noise():
    figure = charts(fig5=FIG5, fig6=FIG6)["fixed-against-adaptive"]
    assert values(figure) == {
        "median clip": {"0": 0.84, "0.1": 0.75},
        "best fixed clip, in hindsight": {"0": 0.85, "0.1": 0.7},
        "worst fixed clip tried": {"0": 0.6, "0.1": 0.4},
    }
    assert [p.note for p in figure.lines[1][1]] == ["clip 2", "clip 0.1"]
    assert [p.runs for p in figure.lines[1][1]] == ["f", "g"]


def test_figure_7_has_intervals_and_c_star_the_place_of_that_clip_on_the_scale():
    figures = charts(fig6=FIG6, fig7=FIG7)
    assert (figures["fig6"].lines[1][0], figures["fig6"].looks) == ("clip 2", ((0, 2), (1, 2)))
    figure = figures["fig7"]
    assert figure.ticks == ("median, quantile 0.5", "best fixed clip, clip 2")
    assert [(p.value, p.low, p.high) for p in figure.lines[0][1]] == [(0.84, 0.83, 0.85), (0.83, 0.82, 0.84)]
    assert [p.look for p in figure.lines[0][1]] == ["accent", (1, 2)]
