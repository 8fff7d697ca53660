"""The studies of this repository: every number stands, the results page is theirs, and their commands made them."""

import json
import shlex
from pathlib import Path

import pytest
from samples import ROOT, load_script

from clipline.study import StudyDirectory
from clipline.tasks import task_named
from clipline_paper.cli import _OF_RUNS, _asked, command
from clipline_paper.study import recompute
from clipline_paper.study.recompute import examine, facts_of

results_page = load_script(ROOT / "studies" / "paper_results.py")
STUDIES = Path(__file__).parents[3] / "studies"
NAMES = ("paper", "paper_scale")


@pytest.fixture(scope="module", autouse=True)
def computed_once():
    """An experiment is computed again once for all tests here: its runs are read from hundreds of files."""
    real, known = recompute.findings_of, {}

    def findings_of(directory, facts):
        key = directory.path.name, facts["what"], facts["protocol"]["task"]
        if key not in known:
            known[key] = real(directory, facts)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (recompute, results_page):
            patch.setattr(module, "findings_of", findings_of)
        yield


@pytest.mark.parametrize("study", NAMES)
def test_every_run_keeps_its_name_and_every_table_its_numbers(study):
    """The runs are found by the hash of their settings: one that changes for old settings loses all of them."""
    directory = StudyDirectory(STUDIES / study)
    assert [*directory.check(), *examine(directory).problems] == []


def test_the_results_page_is_what_the_records_give():
    """All of it but Table 1, which takes seconds and no record."""
    groups, unfinished = results_page._collect([STUDIES / study for study in NAMES])
    page = (STUDIES.parent / "docs" / "results" / "paper.md").read_text(encoding="utf-8")
    made = results_page.wrapped(results_page._text(groups, unfinished, "paper", []))
    assert page.partition("## Table 1")[0] == made + "\n"


def commands(study):
    """The arguments of each `clipline reproduce` in the code blocks of a study's README."""
    blocks = (STUDIES / study / "README.md").read_text().split("```")[1::2]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line)[2:] for line in lines if line.startswith("clipline reproduce")]


def meant(words):
    """What the command line makes of these words: the figure, its task, and what study.json would hold."""
    given = {name: value for name, value in command.make_context("reproduce", list(words)).params.items() if value}
    what, (name,), scale, out = (given.pop(key) for key in ("what", "task", "scale", "out"))
    data, given = given.pop("data"), {key: value for key, value in given.items() if key not in ("seed", "overwrite")}
    changes = {key: given.pop(key) for key in _OF_RUNS if key in given}
    protocol, _, where = _asked(name, scale, data, None, given)
    base = protocol.base(task_named(name).settings, {**changes, "data": where})
    return what, name, out.as_posix(), json.loads(json.dumps(facts_of(what, protocol, base, "", "")))


def experiments(study):
    return json.loads((STUDIES / study / "study.json").read_text())["experiments"]


def compare(asked, held, apart=("data",)):
    """Protocol and settings are equal, as far as the clipline that made the study knew them."""
    assert asked["protocol"] == {"own_metric": None, "own_lower": None, **held["protocol"]}
    settings = {name: value for name, value in held["settings"].items() if name not in apart}
    assert settings == {name: asked["settings"].get(name) for name in settings}


@pytest.mark.parametrize("words", commands("paper_scale"), ids=lambda words: words[0])
def test_each_command_of_the_paper_scale_makes_its_figure(words):
    what, task, out, asked = meant(words)
    assert out == "studies/paper_scale"
    compare(asked, experiments("paper_scale")[f"{what}-{task}"])


@pytest.mark.parametrize("words", commands("paper"), ids=lambda words: words[2])
def test_each_command_makes_every_figure_of_its_task(words):
    held = {name: facts for name, facts in experiments("paper").items() if name.endswith(f"-{words[2]}")}
    assert {"fig3", "fig4", "fig7"} <= {facts["what"] for facts in held.values()}
    for facts in held.values():
        _, task, out, asked = meant([facts["what"], *words[1:]])
        assert (task, out) == (words[2], "studies/paper")
        compare(asked, facts, apart=("data", "device"))  # the README says which were made on what
    _, _, _, asked = meant(words)
    assert asked["settings"]["device"] == held[f"fig7-{words[2]}"]["settings"]["device"]


def test_no_figure_is_without_its_command():
    assert {words[2] for words in commands("paper")} == {
        facts["protocol"]["task"] for facts in experiments("paper").values()
    }
    assert {f"{words[0]}-{words[2]}" for words in commands("paper_scale")} == experiments("paper_scale").keys()
