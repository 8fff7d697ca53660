"""What the README prints has to be true."""

import re
import subprocess
import sys
import tomllib

import pytest
from samples import ROOT, SOURCE, load_script

README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_ten_line_example_runs_as_printed(capsys):
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    promised = re.search(r"# (\(epsilon .*), \.\.\.$", example, re.MULTILINE).group(1)
    scope = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert capsys.readouterr().out.startswith(promised)
    x = scope["rng"].normal(size=(2000, 20))
    guess = scope["result"].model(scope["torch"].as_tensor(x).float()).argmax(dim=1).numpy()
    assert (guess == (x[:, :5].sum(axis=1) > 0)).mean() > 0.9


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
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target


def test_on_pypi_no_link_and_no_image_leads_nowhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "readme" in project["project"]["dynamic"]
    text = README
    for rule in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets
    assert all(target.startswith("https://") for target in targets)
    assert "*Figure in the repository: Ten digits by eight of the writers.*" in text
    assert "docs/explanation/guarantees.md says what is promised" in text


def test_the_package_is_typed():
    assert (SOURCE / "py.typed").exists()


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
