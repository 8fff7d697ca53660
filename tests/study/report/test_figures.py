import json

from reported_runs import write_record

from clipline.study.report.content import content
from clipline.study.report.reading import collect
from clipline.study.report.tables import read_figures

OF_RUN = "method,quantile,clip,noise_at_100,noise_multiplier,client_lr,server_lr"
FIG5 = f"""{OF_RUN},value,outcome,chosen,runs
adaptive,0.5,,0.0,0.0,0.1,1,0.80,finished,no,a
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
best fixed clip,fixed,,2.0,0.3,0.12,0.1,1,0.83,0.82,0.84,2,i j
median,adaptive,0.5,,0.3,0.12,0.1,1,0.84,0.83,0.85,2,k l
"""


def write(folder, metric="accuracy", **tables):
    for name, text in tables.items():
        figure, _, suffix = name.partition("_")
        (folder / f"{figure}-emnist_cr{'-' + suffix if suffix else ''}.csv").write_text(text)
    figures, problems = read_figures(folder, {"emnist_cr": metric})
    assert problems == []
    assert {figure.task for figure in figures} == {"emnist_cr"}
    return {figure.name: figure for figure in figures}


def values(figure):
    return {label: {figure.ticks[p.x]: p.value for p in points} for label, points in figure.lines}


def test_of_several_server_rates_the_best_counts(tmp_path):
    figure = write(tmp_path, fig5=FIG5)["fig5"]
    assert figure.ticks == ("0", "0.1")
    assert figure.x_label == "noise multiplier z at 100 users a round; with 40 users, 0.4 times that"
    assert values(figure) == {"quantile 0.1": {"0": 0.7}, "quantile 0.5": {"0": 0.84, "0.1": 0.75}}
    assert [p.runs for _, points in figure.lines for p in points] == ["c", "b", "d"]


def test_the_lower_error_is_the_better_one(tmp_path):
    figure = write(tmp_path, "mean_squared_error", fig5=FIG5)["fig5"]
    assert values(figure)["quantile 0.5"]["0"] == 0.8
    assert figure.lower_is_better


def test_median_against_best_and_worst_fixed_clip_at_each_noise(tmp_path):
    figure = write(tmp_path, fig5=FIG5, fig6=FIG6)["fixed-against-adaptive"]
    assert values(figure) == {
        "median clip": {"0": 0.84, "0.1": 0.75},
        "best fixed clip, in hindsight": {"0": 0.85, "0.1": 0.7},
        "worst fixed clip tried": {"0": 0.6, "0.1": 0.4},
    }
    assert [p.note for p in figure.lines[1][1]] == ["clip 2", "clip 0.1"]
    assert [p.runs for p in figure.lines[1][1]] == ["f", "g"]


def test_the_choice_of_figure_7_will_do_for_that_comparison(tmp_path):
    rows = [line for line in (FIG5 + FIG6).splitlines() if line.split(",")[-2] != "no" and "adaptive,0.1" not in line]
    figures = write(tmp_path, fig7=FIG7, fig7_choice="\n".join(rows))
    assert values(figures["fixed-against-adaptive"])["best fixed clip, in hindsight"] == {"0": 0.85, "0.1": 0.7}
    assert figures["fig7 choice"].lines == ()


def test_intervals_and_the_adaptive_clip_first(tmp_path):
    figure = write(tmp_path, fig7=FIG7)["fig7"]
    assert figure.ticks == ("median, quantile 0.5", "best fixed clip, clip 2")
    assert [(p.value, p.low, p.high) for p in figure.lines[0][1]] == [(0.84, 0.83, 0.85), (0.83, 0.82, 0.84)]


def test_no_clipping_stands_first_and_a_run_that_diverged_is_named(tmp_path):
    text = "quantile,value\n0.9,0.85\n,0.86\n0.1,\n"
    figure = write(tmp_path, fig3=text)["fig3"]
    assert figure.ticks == ("no clipping", "0.1, diverged", "0.9")
    assert values(figure) == {"accuracy": {"no clipping": 0.86, "0.9": 0.85}}
    assert [p.look for p in figure.lines[0][1]] == ["plain", (1, 2)]


def test_c_star_has_the_place_of_that_clip_on_the_scale_and_the_median_is_apart(tmp_path):
    figures = write(tmp_path, fig6=FIG6, fig7=FIG7)
    assert (figures["fig6"].lines[1][0], figures["fig6"].looks) == ("clip 2", ((0, 2), (1, 2)))
    assert [p.look for p in figures["fig7"].lines[0][1]] == ["accent", (1, 2)]


def test_the_metric_of_a_paper_task_is_known_and_stands_first(tmp_path):
    columns = {"accuracy_with_oov": [0.9] * 20, "accuracy_no_oov_or_eos": [0.1] * 20}  # as original programs list them
    record = write_record(tmp_path, 1, rounds=20, **columns)
    record["identity"]["task"] = "so_nwp"
    record["final"] = {"accuracy_with_oov": 0.9, "accuracy_no_oov_or_eos": 0.1}
    (tmp_path / "runs" / f"{record['id']}.json").write_text(json.dumps(record))
    (tmp_path / "fig5-so_nwp.csv").write_text(FIG5)
    found = collect([tmp_path])
    assert found.runs[0].metrics[0] == "accuracy_no_oov_or_eos"
    assert {figure.metric for figure in found.figures} == {"accuracy_no_oov_or_eos"}
    (shown,) = content(found)["runs"]
    assert next(iter(shown["metrics"])) == next(iter(shown["final"])) == "accuracy_no_oov_or_eos"
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "fig5-emnist_ae.csv").write_text(FIG5)
    (figure,) = collect([tmp_path / "alone"]).figures
    assert (figure.metric, figure.lower_is_better) == ("mean_squared_error", True)


def test_a_table_of_unknown_columns_is_shown_as_a_table_and_cut(tmp_path):
    figure = write(tmp_path, fig4="round,clip\n" + "".join(f"{t},0.1\n" for t in range(500)))["fig4"]
    assert (figure.lines, len(figure.rows), figure.rows_in_file) == ((), 200, 500)


def test_a_file_that_is_no_text_is_a_problem(tmp_path):
    (tmp_path / "fig5-x.csv").write_bytes(b"\xff\xfe\x00")
    figures, problems = read_figures(tmp_path, {})
    assert (figures, len(problems)) == ([], 1)


def test_what_a_task_says_of_its_metric_goes_before_the_name(tmp_path):
    write_record(tmp_path, 1)
    protocol = {"task": "emnist_cr", "own_metric": "accuracy", "own_lower": True}  # as of a task file with BETTER
    experiments = {"fig5-emnist_cr": {"protocol": protocol, "data": "made-up users"}}
    (tmp_path / "study.json").write_text(json.dumps({"experiments": experiments}))
    (tmp_path / "fig5-emnist_cr.csv").write_text(FIG5)
    (tmp_path / "fig6-emnist_cr.csv").write_text(FIG6)
    found = {figure.name: figure for figure in collect([tmp_path]).figures}
    assert values(found["fig5"])["quantile 0.5"]["0"] == 0.8
    assert values(found["fixed-against-adaptive"])["best fixed clip, in hindsight"] == {"0": 0.6, "0.1": 0.4}
