from clipline.study.report.figures import read_figures

FIG5 = """quantile,noise_multiplier,server_lr,value,metric,runs
0.5,0.0,1,0.80,accuracy,a
0.5,0.0,3,0.84,accuracy,b
0.1,0.0,1,0.70,accuracy,c
0.5,0.1,1,0.75,accuracy,d
"""
FIG6 = """fixed_clip,noise_multiplier,server_lr,value,metric,runs
0.1,0.0,1,0.60,accuracy,e
2.0,0.0,1,0.85,accuracy,f
0.1,0.1,1,0.70,accuracy,g
2.0,0.1,1,0.40,accuracy,h
"""
FIG7 = """quantile,fixed_clip,value,low,high,metric,runs
,2.0,0.83,0.82,0.84,accuracy,i j
0.5,,0.84,0.83,0.85,accuracy,k l
"""


def write(folder, **tables):
    for name, text in tables.items():
        (folder / f"{name}-emnist_cr.csv").write_text(text)
    figures, problems = read_figures(folder)
    assert problems == []
    return {figure.name: figure for figure in figures}


def values(figure):
    return {label: {figure.ticks[p.x]: p.value for p in points} for label, points in figure.lines}


def test_of_several_server_rates_the_best_counts(tmp_path):
    figure = write(tmp_path, fig5=FIG5)["fig5"]
    assert figure.ticks == ("0.1", "0.5")
    assert values(figure) == {"z = 0": {"0.1": 0.7, "0.5": 0.84}, "z = 0.1": {"0.5": 0.75}}
    assert [p.runs for _, points in figure.lines for p in points] == ["c", "b", "d"]


def test_the_lower_error_is_the_better_one(tmp_path):
    figure = write(tmp_path, fig5=FIG5.replace("accuracy", "mean_squared_error"))["fig5"]
    assert values(figure)["z = 0"]["0.5"] == 0.8


def test_median_against_best_and_worst_fixed_clip_at_each_noise(tmp_path):
    figure = write(tmp_path, fig5=FIG5, fig6=FIG6)["fixed-against-adaptive"]
    assert values(figure) == {
        "median clip, not tuned": {"0": 0.84, "0.1": 0.75},
        "best fixed clip, in hindsight": {"0": 0.85, "0.1": 0.7},
        "worst fixed clip tried": {"0": 0.6, "0.1": 0.4},
    }
    assert [p.note for p in figure.lines[1][1]] == ["clip 2", "clip 0.1"]


def test_intervals_and_the_adaptive_clip_first(tmp_path):
    figure = write(tmp_path, fig7=FIG7)["fig7"]
    assert figure.ticks == ("median, adaptive", "fixed 2")
    assert [(p.value, p.low, p.high) for p in figure.lines[0][1]] == [(0.84, 0.83, 0.85), (0.83, 0.82, 0.84)]


def test_unclipped_stands_first(tmp_path):
    text = "quantile,value,metric\n0.9,0.85,accuracy\n,0.86,accuracy\n0.1,nan,accuracy\n"
    figure = write(tmp_path, fig3=text)["fig3"]
    assert figure.ticks == ("unclipped", "0.1", "0.9")
    assert values(figure) == {"accuracy": {"unclipped": 0.86, "0.9": 0.85}}


def test_a_table_of_unknown_columns_is_shown_as_a_table_and_cut(tmp_path):
    figure = write(tmp_path, fig4="round,clip\n" + "".join(f"{t},0.1\n" for t in range(500)))["fig4"]
    assert (figure.lines, len(figure.rows), figure.rows_in_file) == ((), 200, 500)


def test_a_file_that_is_no_text_is_a_problem(tmp_path):
    (tmp_path / "fig5-x.csv").write_bytes(b"\xff\xfe\x00")
    figures, problems = read_figures(tmp_path)
    assert (figures, len(problems)) == ([], 1)
