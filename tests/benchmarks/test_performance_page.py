"""docs/results/performance.md is what benchmarks/performance_page.py makes of the recorded results."""

import json

import numpy as np
import pytest
from samples import ROOT

from clipline import Population
from clipline.tasks import task_named
from clipline_paper.facts import FACTS
from clipline_paper.paper_task import check_fields

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def beside_the_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))


def test_the_page_and_its_picture_are_what_the_generator_makes():
    """After a change of results or details: python benchmarks/performance_page.py."""
    import performance_page
    from page import chart
    from page.comparison import comparisons
    from trainings.records import read

    assert performance_page.PAGE.read_text(encoding="utf-8") == performance_page.page()
    assert chart.drawn_in(performance_page.PICTURE) == chart.bars(comparisons(read(sorted(RESULTS.glob("*.jsonl")))))


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


def test_each_pair_of_precisions_has_a_row_of_its_own_equal_ones_first():
    """Ours: 2 s in bfloat16, 10 s in float32. pfl: 100 s in float32, 50 s in bfloat16."""
    from page.comparison import comparisons

    about = {
        "kind": "training", "machine": "here", "task": "so_lr", "data": "real", "users": 100, "rounds": 10, "turn": 0,
        "estimated": False, "load": [0.5, 0.5], "device": "cuda", "cores": 2, "date": "2026-11-16", "commit": "abc1234",
    }  # fmt: skip
    measured = [("clipline", 2, "bf16"), ("clipline", 10, "float32"), ("pfl", 100, "float32"), ("pfl", 50, "bf16")]
    records = [
        {**about, "system": system, "seconds": seconds, **({"precision": precision} if precision == "bf16" else {})}
        for system, seconds, precision in measured
    ]
    rows = [row for row in comparisons(records) if (row.machine, row.task) == ("here", "so_lr")]
    assert [(row.pair, row.times("real")) for row in rows] == [
        ("float32 / float32", 10), ("bf16 / bf16", 25), ("bf16 / float32", 50),
    ]  # fmt: skip


@pytest.mark.parametrize("task", FACTS)
def test_peers_get_users_of_the_tasks_own_kind(task):
    from workload import WORKLOADS, dense_arrays, user_fields

    fields = user_fields(task, 3)
    count = WORKLOADS[task].examples
    module = __import__(f"clipline_paper.tasks.{task}", fromlist=["FIELDS"])
    check_fields(Population(np.array([0, count]), fields), module.FIELDS)
    assert [len(side) for side in dense_arrays(task, fields)] == [count, count]
    assert WORKLOADS[task].batch_size == task_named(task).settings.batch_size
    assert WORKLOADS[task].parameters == FACTS[task].parameters
