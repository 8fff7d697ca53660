"""The code of every tutorial runs, in order, and prints what stands below it; each becomes a notebook."""

import json
import re

import pytest
from samples import ROOT, load_script

notebooks = load_script(ROOT / "docs" / "notebooks.py")
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
HOW_TO = [ROOT / "docs" / "howto" / f"{name}.md" for name in (
    "callback", "clip_rule", "evaluate", "learning", "private_statistics", "resume",
)]  # fmt: skip
NUMBER = r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?"


def alike(printed, promised):
    """The same words, and numbers that differ by 10% or 0.02 at most: noise comes from the system."""
    numbers = [[float(x.replace(",", "")) for x in re.findall(NUMBER, text)] for text in (printed, promised)]
    assert [re.sub(NUMBER, "#", line).split() for line in printed.splitlines()] == [
        re.sub(NUMBER, "#", line).split() for line in promised.splitlines()
    ]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.1, abs=0.02)


@pytest.mark.parametrize("path", TUTORIALS + HOW_TO, ids=lambda path: path.stem)
def test_the_code_of_a_tutorial_prints_what_stands_below_it(path, tmp_path, monkeypatch):
    page = path.read_text(encoding="utf-8")
    for package in notebooks.needs(page):
        pytest.importorskip(package, reason=f"{path.name} needs {package}, which is not installed")
    monkeypatch.chdir(tmp_path)
    done = notebooks.run(page, path.name)
    assert done
    for cell, printed in done:
        if cell.printed or path in TUTORIALS:
            alike(printed, cell.printed)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_notebook_has_all_code_of_its_page_in_order(path):
    page = path.read_text(encoding="utf-8")
    made = json.loads(notebooks.notebook(page))
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    code = ["".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "code"]
    assert code == [text.rstrip() for text in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)]
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    assert made["cells"][0]["source"][0].startswith("# ")
