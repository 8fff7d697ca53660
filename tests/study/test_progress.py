from clipline.study.study import StudyProgress


def words(progress, now):
    """What stands before the bar, below it and after it."""
    head, tail, below = progress.words(now)
    return "  ".join(filter(None, (head, below, tail)))


def test_time_left_is_that_of_the_rounds_left_at_the_speed_so_far(monkeypatch):
    # 4 runs of 10 rounds, one done before. After the first round 11 in 5.5 s: 18 of 30 are left, half a second each.
    monkeypatch.setattr("clipline.study.study.time.perf_counter", lambda: 100.5)
    progress = StudyProgress(shown=False)
    progress.begin(dict.fromkeys("abcd", 10), ["d"])
    progress.start(["a", "b"])
    assert words(progress, 100.0) == "runs 1/4 done  2 running"
    for run in "aaaaaabbbbbb":
        progress.round(run)
    assert "left" not in words(progress, 100.6)  # too early to tell
    assert words(progress, 106.0) == "runs 1/4 done  2 running  0:00:09 left"
    progress.end(["a"])  # early: 4 rounds of b and 10 of c are left
    assert words(progress, 106.0) == "runs 2/4 done  1 running  0:00:07 left"


def test_lines_say_what_is_done_running_and_failed(capsys):
    progress = StudyProgress("fig9")
    progress.begin({"a": 2, "b": 2, "c": 2}, ["a"])
    progress.start(["b", "c"])
    for _ in range(2):
        progress.round("c")
    progress.fail("seed 1", "b", "ValueError: no such luck")
    progress.end(["c"])
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fig9  runs 1/3 done  0 running"
    assert lines[1] == "run b (seed 1) failed: ValueError: no such luck"
    assert lines[2] == "fig9  runs 2/3 done  0 running  1 failed"
    assert len(lines) == 3


def test_one_bar_goes_over_all_stages_and_names_the_one_at_work(capsys, monkeypatch):
    places = []
    monkeypatch.setattr(
        "clipline.study.study.Bar.show", lambda bar, done, head, *_, **__: places.append((done / bar.total, head))
    )
    progress = StudyProgress("tune", ("rates", "noise"))
    progress.next_stage()
    progress.begin({"a": 2, "b": 2}, [])
    progress.round("a")
    assert places[-1] == (0.125, "tune, 1 of 2: rates")  # 1 of 4 rounds, of half of the bar
    progress.end("ab")
    progress.begin({"c": 4}, [])  # more of the same stage: the bar does not go back
    assert places[-1] == (0.5, "tune, 1 of 2: rates")
    progress.next_stage()
    progress.begin({"d": 1}, [])
    progress.end("d")
    assert places[-1] == (1.0, "tune, 2 of 2: noise")
