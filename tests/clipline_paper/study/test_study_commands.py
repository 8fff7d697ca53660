"""The commands in the README of each study of this repository are those that made its figures."""

import json
import shlex
from pathlib import Path

import pytest

from clipline.tasks import task_named
from clipline_paper.cli import _OF_RUNS, _asked, command
from clipline_paper.study.recompute import facts_of

STUDIES = Path(__file__).parents[3] / "studies"


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
