"""Tutorials as notebooks. `python docs/notebooks.py PAGE...` runs pages and writes down anew what their code prints."""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Cell:
    """A piece of a page: text, or code with what it prints."""

    text: str
    printed: str | None = None  # of code: "" where it prints nothing


def cells(page: str) -> list[Cell]:
    """The page in pieces, in order. What stands in a block without a language right after code is what it prints."""
    found, end = [], 0
    for block in _CODE.finditer(page):
        found += [Cell(page[end : block.start()].strip()), Cell(block[1].rstrip(), block[2] or "")]
        end = block.end()
    return [cell for cell in (*found, Cell(page[end:].strip())) if cell.text]


def needs(page: str) -> list[str]:
    """Packages without which the code of a page cannot run: its comment `<!-- needs: peft -->`."""
    named = re.search(r"<!-- needs: ([\w ,]+) -->", page)
    return named[1].split(", ") if named else []


def notebook(page: str) -> str:
    """The page as JSON of a Jupyter notebook, with its output. Pictures and links of the site are left out."""
    made: list[dict[str, Any]] = []
    for number, cell in enumerate(cells(page)):
        text = cell.text
        if cell.printed is None:
            text = re.sub(r"!\[[^\]]*\]\([^)]*\)|<!--.*?-->", "", text)
            text = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)
        one = {"id": f"cell{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        if cell.printed is None:
            made.append({"cell_type": "markdown", **one})
            continue
        outputs = [{"output_type": "stream", "name": "stdout", "text": cell.printed.splitlines(keepends=True)}]
        made.append({"cell_type": "code", **one, "execution_count": None, "outputs": outputs if cell.printed else []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps({"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def run(page: str, name: str) -> list[tuple[Cell, str]]:
    """Each piece of code, run in order in the working directory, with what it printed."""
    scope: dict[str, Any] = {"__name__": name}
    done = []
    for cell in cells(page):
        if cell.printed is not None:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(cell.text, name, "exec"), scope)
            done.append((cell, out.getvalue()))
    return done


def rewrite(path: Path) -> None:
    """Run a page in an empty folder, and write down what its code prints."""
    page, here = path.read_text(encoding="utf-8"), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            printed = iter([out for _, out in run(page, path.stem)])
        finally:
            os.chdir(here)

    def block(match: re.Match[str]) -> str:
        out = next(printed)
        return f"```python\n{match[1]}```\n" + (f"\n```\n{out}```\n" if out else "")

    path.write_text(_CODE.sub(block, page), encoding="utf-8")


def connect(app: Any) -> None:
    """Sphinx: every tutorial begins with a link to its notebook, which is written beside the site."""

    def link(_: Any, name: str, source: list[str]) -> None:
        if name.startswith("tutorials/"):
            title, rest = source[0].split("\n", 1)
            file = f"../notebooks/{name.removeprefix('tutorials/')}.ipynb"
            source[0] = (
                f'{title}\n\n<p class="notebook"><a href="{file}" download>Download as a notebook</a></p>\n{rest}'
            )

    def write(app: Any, error: Exception | None) -> None:
        folder = Path(app.outdir) / "notebooks"
        folder.mkdir(exist_ok=True)
        for page in sorted((Path(app.srcdir) / "tutorials").glob("*.md")):
            (folder / f"{page.stem}.ipynb").write_text(notebook(page.read_text(encoding="utf-8")), encoding="utf-8")

    app.connect("source-read", link)
    app.connect("build-finished", write)


if __name__ == "__main__":
    for given in sys.argv[1:]:
        rewrite(Path(given))
