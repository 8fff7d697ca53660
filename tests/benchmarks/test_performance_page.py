"""docs/results/performance.md is what benchmarks/performance_page.py makes of the recorded results."""

import json

import pytest
from samples import ROOT

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def beside_the_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def generator():
    import performance_page

    return performance_page


def training(system, seconds, load=0.5, **more):
    """A whole training on the machine that the tests compare on."""
    usual = {"kind": "training", "machine": "here", "task": "so_lr", "data": "real", "users": 100, "rounds": 10}
    usual |= {"system": system, "turn": 0, "seconds": seconds, "estimated": system == "pfl", "load": [load, load]}
    return usual | {"device": "cuda", "cores": 2, "date": "2026-11-16", "commit": "abc1234"} | more


def only_row(records):
    from page.comparison import comparisons

    return next(row for row in comparisons(records) if (row.machine, row.task) == ("here", "so_lr"))


def test_the_page_is_what_the_generator_makes(generator):
    """After a change of results or details: python benchmarks/performance_page.py."""
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page()


def test_the_picture_shows_the_numbers_of_the_table(generator):
    from page import chart
    from page.comparison import comparisons
    from trainings.records import read

    assert chart.drawn_in(generator.PICTURE) == chart.bars(comparisons(read(sorted(RESULTS.glob("*.jsonl")))))


def test_every_recorded_section_is_on_the_page_once(generator):
    page = generator.page()
    titles = [
        path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for path in generator.DETAILS.iterdir()
    ]
    assert len(titles) >= 30
    assert [page.count(f"\n### {title}\n") for title in titles] == [1] * len(titles)


def test_a_section_that_fits_nowhere_comes_last(generator, tmp_path, monkeypatch):
    from recording import write_section

    monkeypatch.setattr(generator, "DETAILS", tmp_path)
    write_section(tmp_path, "Something: new", "old")
    assert write_section(tmp_path, "Something: new", "text\n").name == "something-new.md"
    write_section(tmp_path, "Versions", "numbers")
    assert generator.sections() == {"Versions": {"Versions": "numbers"}, "More": {"Something: new": "text"}}


def test_the_rounds_in_the_table_are_those_of_their_sections():
    """Of each system the last that was recorded: a section is replaced when its command is run again."""
    from trainings.records import key, read

    for record in {key(line): line for line in read([RESULTS / "rounds.jsonl"])}.values():
        sections = (RESULTS / "details").glob(f"against-peers-{record['task']}-on-{record['device']}*.md")
        text = "".join(section.read_text(encoding="utf-8") for section in sections)
        assert f"| {record['versions']} | {record['seconds']:.3f} (" in text
        assert f"| {record['times_ours']:.2f} |" in text
        assert record["date"] in text


def test_rounds_of_ours_in_float32_are_those_of_the_section_that_measured_them():
    """No peer took turns with them, so they stand in a file of their own."""
    text = (RESULTS / "details" / "what-keeping-users-apart-costs.md").read_text(encoding="utf-8")
    for line in (RESULTS / "rounds_float32.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        row = next(row for row in text.splitlines() if row.startswith(f"| H200, {record['task']}, float32"))
        assert float(row.split("|")[2]) == pytest.approx(1000 * record["seconds"], abs=0.05)
        assert record["commit"] in text
        assert record["date"] in text


def test_each_pair_of_precisions_has_rows_of_its_own_equal_ones_first():
    """Ours: 2 s in bfloat16, 10 s in float32. pfl: 100 s in float32, 50 s in bfloat16."""
    from page.comparison import comparisons

    ours = [training("clipline", 2, precision="bf16"), training("clipline", 10)]
    theirs = [training("pfl", 100), training("pfl", 50, precision="bf16")]

    def times(records):
        rows = [row for row in comparisons(records) if (row.machine, row.task) == ("here", "so_lr")]
        return {row.pair: row.times("real") for row in rows}

    assert times([*ours, *theirs]) == {"float32 / float32": 10, "bf16 / bf16": 25, "bf16 / float32": 50}
    assert list(times([*ours, *theirs])) == ["float32 / float32", "bf16 / bf16", "bf16 / float32"]
    assert times([ours[0], theirs[0]]) == {"float32 / float32": None, "bf16 / bf16": None, "bf16 / float32": 50}
    assert times([ours[1], theirs[0]]) == {"float32 / float32": 10}


def test_a_round_is_compared_with_ours_in_its_own_run_or_else_by_seconds():
    """pfl's 4 s beside our 0.1 s in bfloat16: 41 times by turns. Beside our 2 s in float32, measured apart: twice."""
    from page.comparison import comparisons

    command = "python benchmarks/against_peers.py --options workers=1 precision=bf16 --record"
    about = {"kind": "round", "machine": "here", "task": "so_lr", "date": "2026-11-16", "commit": "abc1234"}
    records = [
        {**about, "system": "clipline", "seconds": 0.1, "times_ours": 1.0, "command": command},
        {**about, "system": "pfl", "seconds": 4.0, "times_ours": 41.0, "command": command},
        {**about, "system": "clipline", "seconds": 2.0, "precision": "float32"},
    ]
    rows = [row for row in comparisons(records) if (row.machine, row.task) == ("here", "so_lr")]
    assert {row.pair: row.round_times("pfl") for row in rows} == {
        "float32 / float32": 2.0, "bf16 / bf16": None, "bf16 / float32": 41.0,
    }  # fmt: skip


def test_what_is_not_measured_at_equal_precision_is_said_and_estimates_are_hollow():
    from page import chart, tables
    from page.comparison import comparisons

    records = [training("clipline", 2, rounds=1500, precision="bf16"), training("pfl", 100, rounds=1500)]
    rows = comparisons(records)
    said = tables.answer(rows).splitlines()
    assert said[0] == "- On here, both sides in float32: not measured."
    assert said[1] == "- On here, both sides in bfloat16: not measured."
    assert said[2].startswith("- On here, clipline in bfloat16, the others in float32, whole trainings")
    assert said[2].endswith("**50 to 50 times** as long (estimated from some of its rounds).")
    shown = tables.top(rows).replace(tables.NO_BREAK, " ")
    assert "| here | bf16 / bf16 | all tasks |  | not measured |" in shown
    bars = chart.bars(rows)
    assert bars["here, both sides in bfloat16"] == {}
    of = bars["here, clipline in bfloat16, the others in float32"]["so_lr"]
    assert of == {"whole training, real users, against pfl-research": [50, True]}


def test_the_picture_has_one_scale_and_hollow_bars_for_estimates(tmp_path, monkeypatch):
    import matplotlib.figure
    from page import chart

    real, _, round_, *_ = chart.BARS
    drawn = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda figure, *a, **k: (drawn.append(figure), save(figure, *a, **k))
    )
    numbers = {
        "a": {"so_lr": {real: [5.0, True], round_: [3.0, False]}},
        "b": {"so_lr": {real: [90.0, False]}},
        "c": {},
    }
    chart.draw(numbers, tmp_path / "p.png")
    assert chart.drawn_in(tmp_path / "p.png") == numbers
    (figure,) = drawn
    one, other = figure.axes
    assert one.get_xlim() == other.get_xlim()
    hollow, solid = one.patches
    assert hollow.get_facecolor()[3] == 0
    assert solid.get_facecolor()[3] == 1
    assert figure.get_suptitle() == "Not measured: c"


def test_ratios_are_of_the_clock_unless_other_work_disturbed_it():
    """Two cores: with one thread each a load above 2 disturbs, with all cores of their own one above 3."""
    ours = training("clipline", 10, processor_seconds=9, threads=1)
    pfl = training("pfl", 100, processor_seconds=27, threads=1)
    assert only_row([ours, pfl]).times("real") == 10
    assert only_row([ours, pfl | {"load": [0.5, 2.1]}]).times("real") == 3
    defaults = [training("clipline", 10), training("pfl", 100)]
    assert [only_row([defaults[0], defaults[1] | {"load": [x, x]}]).times("real") for x in (2.9, 3.1)] == [10, 10]
    assert only_row([defaults[0] | {"load": [2.9, 0]}]).trainings["real", "clipline"].disturbed is False
    assert only_row([defaults[0] | {"load": [3.1, 0]}]).trainings["real", "clipline"].disturbed is True
    alone = only_row([pfl | {"load": [2.1, 0]}])
    assert alone.times("real") is None
    assert not alone.by_processor("real")


def test_only_what_some_result_has_is_explained():
    from page import tables

    told = tables.notes([only_row([training("clipline", 10), training("pfl", 100)])])
    assert (told["processor"], told["processor_column"]) == ("", "")
    assert "Second start" not in told["second_start"]
    timed = [training(system, 10, load=9, processor_seconds=9) for system in ("clipline", "pfl", "second")]
    told = tables.notes([only_row(timed)])
    assert "*(processor)*" in told["processor"]
    assert "*Processor*" in told["processor_column"]
    assert "*Second start*" in told["second_start"]


def test_turns_are_medians_and_a_failure_does_not_replace_a_result():
    turns = [training("clipline", seconds, turn=number) for number, seconds in enumerate((4, 9, 5))]
    failed = training("clipline", 0, turn=1, failed="ran out of memory")
    assert only_row([*turns, failed]).trainings["real", "clipline"].seconds == 5
    assert only_row([*turns, turns[1] | {"seconds": 1}]).trainings["real", "clipline"].seconds == 4
    assert only_row([failed]).failed == {("real", "clipline"): "ran out of memory"}
    shorter = training("clipline", 2, rounds=5)  # not another turn of the same training
    assert only_row([*turns, shorter]).trainings["real", "clipline"].seconds == 2


def test_the_page_begins_with_how_fast_it_is():
    from page import tables

    row = only_row([training("clipline", 20, rounds=1500), training("pfl", 640, rounds=1500)])
    assert tables.answer([row]) == (
        "- On here, both sides in float32, whole trainings on real users, 1,500 to 1,500 rounds, take clipline 20 s to "
        "20 s, and pfl-research **32 to 32 times** as long (estimated from some of its rounds)."
    )
    assert tables.answer([only_row([training("clipline", 20)])]) == ""  # nothing to compare with


def test_of_a_second_start_only_the_start_is_shown():
    from page import tables

    parts = {"start_s": 4.2, "first_round_s": 2.0, "later_round_s": 0.1, "rounds_done": 10, "versions": "clipline 0"}
    first, second = (training(system, 31.5, **parts) for system in ("clipline", "second"))
    text = tables.parts([only_row([first, second])])
    assert [line.count("31.5") for line in text.splitlines()[2:]] == [1, 0]
    assert text.count("| 4.2 |") == 2


def test_empty_cells_have_their_reason():
    from page import tables

    row = only_row([training("clipline", 10), training("pfl", 0, failed="the budget was spent")])
    text = tables.empty_cells([row])
    assert "whole training of pfl-research, real users: the budget was spent: so_lr on here, float32." in text
    assert "whole training of clipline, real users" not in text
    assert "warm round of Flower: not measured: so_lr on here, float32." in text


def test_trainings_are_continued_to_the_papers_rounds():
    """10 rounds in 20 s, then 0.1 s each: 1500 take 20 + 149 s. pfl: 100 + 1490 * 9 = 13,510 s, 79.9 times as long."""
    from page import tables

    row = only_row([training("clipline", 20, usual_round_s=0.1), training("pfl", 100, usual_round_s=9.0)])
    text = tables.at_paper_rounds([row], {"so_lr": 1500})
    assert "| here | float32 / float32 | `so_lr` | 1,500 | ≈ 169 s | ≈ 225 min | 80 | yes |" in text
    done = {"rounds": 1500, "usual_round_s": 0.01}
    whole = only_row([training("clipline", 20, **done), training("pfl", 2000, **done)])
    text = tables.at_paper_rounds([whole], {"so_lr": 1500})
    assert "| here | float32 / float32 | `so_lr` | 1,500 | 20 s | ≈ 33 min | 100 | yes |" in text  # ours did them all
    few = only_row([training("clipline", 20, usual_round_s=0.1, users=4), training("pfl", 100, usual_round_s=9.0)])
    assert tables.at_paper_rounds([few], {"so_lr": 1500}) == ""
