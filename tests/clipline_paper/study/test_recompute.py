import json

import pytest
from made_up_runs import CHECKSUM, grid_of, quality
from samples import ROOT, load_script

from clipline.study.directory import StudyDirectory
from clipline_paper.study import recompute
from clipline_paper.study.experiments import run_experiment
from clipline_paper.study.protocol import protocol_for
from clipline_paper.study.recompute import examine, facts_of, write_files
from clipline_paper.study.rules import ClipComparison, Interval

results_page = load_script(ROOT / "studies" / "paper_results.py")


def page_of(*studies):
    """The text alone: pictures, and Table 1, take seconds."""
    return results_page._text(*results_page._collect(studies), "page", [])


def made_up_study(folder):
    """A study directory as `reproduce` leaves it, of runs that nobody trained."""
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


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    """Those of the studies, which no test here looks at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute, "draw", lambda findings, path, data: path.touch())
        yield


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return made_up_study(tmp_path_factory.mktemp("study"))


def test_tables_are_what_the_runs_give(study):
    assert examine(StudyDirectory(study)).problems == []


def test_a_changed_number_is_found(study):
    table = study / "fig7-cifar100.csv"
    text = table.read_text()
    try:
        table.write_text(text.replace("0.7725", "0.7825"))  # 0.77 and 0.001 * 2.5 of seeds 1 to 4
        (problem,) = (one for one in examine(StudyDirectory(study)).problems if "mean" in one)
        assert "fig7-cifar100.csv, line 2: mean is '0.7825" in problem
    finally:
        table.write_text(text)


def test_a_missing_run_is_found(study):
    run = (study / "fig7-cifar100-seeds.csv").read_text().splitlines()[1].split(",")[-1]
    record = study / "runs" / f"{run}.json"
    text = record.read_text()
    try:
        record.unlink()
        assert any(run in problem for problem in examine(StudyDirectory(study)).problems)
        page = page_of(study)
        assert f"- fig7-cifar100: 1 of 8 runs that it asks for next are not made yet (the first is {run})" in page
        assert "- emnist_cr: no experiment has ended yet\n" in page
        assert "median, test" in page  # Figure 4 is complete
    finally:
        record.write_text(text)


@pytest.mark.parametrize(
    ("word", "low", "high", "paper", "agree"),
    [
        ("equivalent", -1, 1, "as good", "yes"),
        ("equivalent", -2, -1, "as good", "yes"),
        ("equivalent", -2, -1, "worse", "in direction, inside the margin"),
        ("equivalent", -2, -1, "better", "**no**: the other direction"),
        ("equivalent", -1, 1, "worse", "**no**: no difference here"),
        ("worse", -9, -1, "worse", "yes"),
        ("worse", -9, -1, "as good", "**no**"),
        ("undecided", -9, 9, "as good", "open"),
    ],
)
def test_agreement_is_said_in_the_words_of_the_verdict(word, low, high, paper, agree):
    assert results_page.agreement(ClipComparison(word, "", Interval((low + high) / 2, low, high, 5)), paper) == agree
