"""`clipline reproduce` of figures that train; those that train nothing are tested with what makes them."""

import csv

import pytest

TINY = ("--rounds", 3, "--cohort-size", 4, "--quantiles", "0.5", "--server-rates", "1", "--workers", 1)


def test_a_figure_is_trained_once_checked_and_refused_at_another_scale(clipline, tmp_path):
    out, err = clipline.ok("reproduce", "fig3", "--out", "s", *TINY)
    assert "without clipping: accuracy 0." in out
    assert "  this shows that it runs, not the finding" in out  # three rounds
    assert "runs 2/2 done" in err
    runs = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "s" / "runs").iterdir()}
    with (tmp_path / "s" / "fig3-handwriting.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["unclipped", "adaptive"]
    assert {f"{row['runs']}.json" for row in rows} == runs.keys()
    assert (tmp_path / "s" / "fig3-handwriting.png").exists()
    code, checked, _ = clipline("study", "check", "s")
    assert (code, "fig3-handwriting: clipping to the median without noise is" in checked) == (0, True)

    assert clipline("reproduce", "fig3", "--out", "s", *TINY)[1].splitlines()[:4] == out.splitlines()[:4]
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "s" / "runs").iterdir()} == runs
    code, _, err = clipline("reproduce", "fig3", "--out", "s", "--scale", "small")
    assert (code, "holds fig3-handwriting at scale smoke, not small: give another --out" in err) == (2, True)

    table = tmp_path / "s" / "fig3-handwriting.csv"
    table.write_text(table.read_text().replace(rows[1]["value"], "0.99"))
    code, out, err = clipline("study", "check", "s")
    assert (code, "fig3-handwriting.csv, line 3: value is '0.99'" in err) == (1, True)


def test_a_figure_that_is_interrupted_says_how_to_go_on(clipline, monkeypatch):
    from clipline_paper.study import recompute

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(recompute, "reproduce", interrupted)
    code, _, err = clipline("reproduce", "fig3", "--out", "s", *TINY)
    assert code == 130
    assert "interrupted with 0 finished runs in s: give the same command again, and none is repeated" in err


def test_a_task_that_cannot_end_does_not_stop_the_next(clipline, monkeypatch):
    from clipline.errors import RunError
    from clipline_paper.study import recompute

    asked = []

    def fails(what, protocol, *arguments, **options):
        asked.append(protocol.task)
        raise RunError("there is no clip range")

    monkeypatch.setattr(recompute, "reproduce", fails)
    code, _, err = clipline("reproduce", "fig7", "--task", "handwriting,emnist_cr", "--out", "s")
    assert (code, asked) == (2, ["handwriting", "emnist_cr"])
    assert "fig7, handwriting: there is no clip range" in err
    assert "fig7 of 2 of 2 tasks did not end" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fig8",), "WHAT 'fig8' must be one of fig1, fig2"),
        (("fig7", "--task", "emnist_cr,emnist"), "task='emnist' must be one of"),
        (("fig7", "--scale", "large"), "--scale 'large' must be one of smoke, small, paper"),
        (("fig7", "--quantiles", "half"), "quantiles='half' must be numbers separated by commas"),
        (("fig7", "--noises", "0.1"), "noises=[0.1] must be a list with 0"),
        (("fig7", "--noises", "-0.5,0"), "noises=[-0.5, 0.0] must be different numbers at least 0 and below 10"),
        (("fig7", "--seeds", "1000000000000"), "--seeds 1000000000000 must be at most 100000"),
        (("fig7", "--overwrite"), "--overwrite must be left out for fig7"),
        (("fig1", "--task", "all"), "task='all' must be left out for fig1, which trains nothing"),
        (("fig7", "--task", "emnist_cr", "--data", "nowhere"), "--data 'nowhere' must be a folder"),
    ],
)
def test_what_cannot_be_reproduced_is_refused_before_anything_is_written(clipline, tmp_path, arguments, message):
    code, out, err = clipline("reproduce", *arguments, "--out", "s")
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
