"""What the README prints has to be true."""

import re
import subprocess
import sys
import tomllib

import pytest
from samples import ROOT, load_script

README = (ROOT / "README.md").read_text()


def blocks(language):
    every = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for its, text in every if its == language]


def test_the_example_runs_and_prints_what_stands_below_it(capsys, monkeypatch, tmp_path):
    (example,) = blocks("python")
    printed = re.search(r"^```python\n.*?^```\n\n```\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[1]
    assert len([line for line in example.splitlines() if line.strip()]) <= 24
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    promised = printed.splitlines()
    assert said[1:] == promised[1:]
    accuracies = [float(lines[0].split()[1]) for lines in (said, promised)]  # cohorts and noise come from the system
    assert min(accuracies) >= 0.97  # a model that guesses has 0.5


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 115
    assert README.count("![") == 1


def test_there_are_exactly_two_set_up_commands_and_ci_runs_the_second():
    commands = [block.strip() for block in blocks("") if block.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert commands[0].endswith("clipline train")
    steps = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert steps == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', commands[1]]


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def anchors(page):
    """What can be linked to: a heading in lower case, spaces as hyphens, without other signs."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_every_link_of_the_docs_leads_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        if path in ("reference/commands.md", "reference/modules.md"):  # made with the site
            continue
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target


def test_every_file_and_test_that_the_docs_name_exists():
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    named = set(re.findall(r"\b((?:tests|studies|benchmarks|examples)/[\w/]+\.py)(?:::(test_\w+))?", pages))
    assert len(named) > 50
    for path, test in named - {("examples/NAME.py", "")}:
        assert (ROOT / path).exists(), path
        assert f"def {test}" in (ROOT / path).read_text(encoding="utf-8"), (path, test)


def test_on_pypi_no_link_and_no_image_leads_nowhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "readme" in project["project"]["dynamic"]
    text = README
    for rule in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets
    assert all(target.startswith("https://") for target in targets)
    assert "*Figure in the repository: Accuracy, clip, epsilon and fraction within over 150 rounds.*" in text
    assert "What is promised takes ten minutes" in text


def test_first_run_is_short_and_learns(capsys):
    path = ROOT / "examples" / "first_run.py"
    assert len(path.read_text().splitlines()) < 60
    script = load_script(path)
    assert script.result.guarantee.epsilon <= 4.0
    assert script.result.metrics["squared error"] < 0.05  # predicting the mean gives about 0.6
    assert "squared error" in capsys.readouterr().out


def test_the_plain_algorithm_finds_the_clip_and_learns():
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "algorithm1.py"], capture_output=True, text=True, check=True
    )
    assert float(run.stdout.split()[-1]) > 0.9
