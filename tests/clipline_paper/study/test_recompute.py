import json

import pytest
from made_up_runs import CHECKSUM, grid_of, quality

from clipline.errors import RunError
from clipline.study.report.collect import collect
from clipline.study.report.content import content
from clipline.study.runs.directory import StudyDirectory
from clipline_paper.study import results_page
from clipline_paper.study.experiments import run_experiment
from clipline_paper.study.protocol import protocol_for
from clipline_paper.study.recompute import facts_of, table_problems, without_tables
from clipline_paper.study.reproduce import write_files
from clipline_paper.study.results_page import write_results_page


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study directory as `reproduce` leaves it, of runs that nobody trained."""
    folder = tmp_path_factory.mktemp("study")
    directory = StudyDirectory(folder)
    for what in ("fig4", "fig7"):
        protocol = protocol_for("cifar100", "paper", average_over=1, evaluate_last=1, seeds=4)
        grid = grid_of(protocol, quality)
        findings = run_experiment(what, grid)
        facts = facts_of(what, protocol, grid.base, CHECKSUM, "made-up users")
        directory.note_experiment(findings.name, json.loads(json.dumps(facts)))
        for spec in grid.study.asked.values():
            directory.add(grid.study.record(spec))
        write_files(findings, directory, "made-up users")
    return folder


def test_tables_are_what_the_runs_give(study):
    assert table_problems(StudyDirectory(study)) == []


def test_an_experiment_without_a_table_is_named(study):
    tables = {path: path.read_text() for path in study.glob("fig7-cifar100*.csv")}
    assert without_tables(StudyDirectory(study)) == []
    try:
        for path in tables:
            path.unlink()
        assert without_tables(StudyDirectory(study)) == ["fig7-cifar100"]
    finally:
        for path, text in tables.items():
            path.write_text(text)


def test_a_changed_number_is_found(study):
    table = study / "fig7-cifar100.csv"
    text = table.read_text()
    try:
        table.write_text(text.replace("0.7725", "0.7825"))  # 0.77 and 0.001 * 2.5 of seeds 1 to 4
        (problem,) = (one for one in table_problems(StudyDirectory(study)) if "mean" in one)
        assert "fig7-cifar100.csv, line 2: mean is '0.7825" in problem
    finally:
        table.write_text(text)


def test_a_table_that_no_experiment_makes_is_found(study):
    table, entries = study / "fig7-cifar100-seeds.csv", study / "study.json"
    extra, text = study / "fig7-cifar100-more.csv", entries.read_text()
    try:
        extra.write_text(table.read_text())
        assert table_problems(StudyDirectory(study)) == [
            "fig7-cifar100-more.csv is made by no experiment of study.json: delete it"
        ]
        extra.unlink()
        entries.write_text('{"format": 1, "experiments": {}, "asked": []}')
        problems = table_problems(StudyDirectory(study))
        assert [one.split(" ")[0] for one in problems] == sorted(path.name for path in study.glob("*.csv"))
    finally:
        extra.unlink(missing_ok=True)
        entries.write_text(text)


@pytest.mark.parametrize(
    "change",
    [{"protocol": {"task": "x"}}, {"protocol": {"cohort_size": "x"}}, {"settings": {"rounds": -1}}, {"what": "fig9"}],
    ids=str,
)
def test_an_experiment_that_cannot_be_read_is_a_problem(study, change):
    entries = study / "study.json"
    text = entries.read_text()
    changed = json.loads(text)
    facts = changed["experiments"]["fig7-cifar100"]
    for name, value in change.items():
        facts[name] = {**facts[name], **value} if isinstance(value, dict) else value
    changed["experiments"]["/../x"] = facts
    try:
        entries.write_text(json.dumps(changed))
        (problem,) = table_problems(StudyDirectory(study))
        assert problem.startswith("fig7-cifar100: its tables cannot be made again")
    finally:
        entries.write_text(text)


def test_a_missing_run_is_found(study):
    run = (study / "fig7-cifar100-seeds.csv").read_text().splitlines()[1].split(",")[-1]
    record = study / "runs" / f"{run}.json"
    text = record.read_text()
    try:
        record.unlink()
        assert any(run in problem for problem in table_problems(StudyDirectory(study)))
        page = write_results_page([study], study / "without.md").read_text()
        assert f"- fig7-cifar100: 1 of 8 runs that it asks for next are not made yet (the first is {run})" in page
        assert "- emnist_cr: no experiment has ended yet\n" in page
        assert "median, test" in page  # Figure 4 is complete
    finally:
        record.write_text(text)


def test_the_page_puts_our_numbers_beside_the_papers(study):
    page = write_results_page([study], study / "page.md").read_text()
    # z*, C* and range: ours, then those of Figure 7 and Table 1.
    assert "| cifar100 | 0.03 | 0.03 | 0.8 | 0.98 | 0.2 to 3.2 | 0.75 to 2.2 | 0.7725 [" in page
    assert (
        "**Compared so far: 1 of 6 tasks**: as good or better on 1 of 1 (cifar100). Not compared yet: emnist_ae,"
        in page
    )
    assert "| cifar100 | as good | better | in part: as good or better in both |" in page
    assert "| data | made-up users | 500 users of the original |" in page
    assert "| seeds of the final comparison | 4 | 20 |" in page
    assert "no noise between" not in page  # all four of the paper's were tried
    assert (study / "page" / "fig7-cifar100.png").stat().st_size > 10_000
    with pytest.raises(RunError, match="no study"):
        write_results_page([study / "nothing"], study / "page.md")


def test_the_report_says_what_the_experiments_found(study):
    found = {one["title"]: one for one in content(collect([study]))["findings"]}
    assert list(found) == ["Figure 7, cifar100", "Figure 4, cifar100"]
    assert found["Figure 7, cifar100"]["verdict"].startswith("the untuned median is as good as the best fixed clip")
    assert found["Figure 4, cifar100"]["lines"][-1].startswith("fixed clips to compare with: 0.2, ")


@pytest.mark.parametrize(
    ("z_star", "tried", "too_much"),
    [
        (0.0, (0.0, 0.1), 0.1),  # the paper tried 0.01 and 0.03 between
        (0.01, (0.0, 0.01, 0.1), 0.1),
        (0.03, (0.0, 0.01, 0.03, 0.1), None),
        (0.1, (0.0, 0.1), None),  # the largest, which the page says of itself
    ],
)
def test_noises_that_were_passed_over_are_known(z_star, tried, too_much):
    assert results_page._coarse_step(z_star, tried) == too_much
