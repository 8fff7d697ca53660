"""Write docs/results/performance.md, its picture, and results/README.md, from what is recorded in results.

    python benchmarks/performance_page.py

`results/*.jsonl` has a line for each measurement against peers: whole trainings (against_peers.py --data real) and
warm rounds (against_peers.py --record). `results/details/*.md` has a section each, as a benchmark with --record or a
person wrote it. The folder `page` has the sentences between: `template.md` those of the page, `records.md` those of the
README, which has every record.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from page import chart, tables
from page.comparison import comparisons
from trainings.records import RESULTS, read

sys.path.append(str(Path(__file__).resolve().parents[1] / "docs"))
from wrap import wrapped

DETAILS = RESULTS / "details"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "results" / "performance.md"
TEMPLATES = Path(__file__).resolve().parent / "page"
PICTURE = PAGE.with_suffix(".png")
# Where a section stands, by the beginning of its title; those that fit nowhere come last.
GROUPS = {
    "A round against other systems": ("Against peers", "Example-level privacy"),
    "From beginning to end": ("What bounds", "On cores", "The main job", "A whole task", "Many runs"),
    "What parts cost and buy": ("What keeping users apart", "Keeping users apart", "What each fast part"),
    "What a round grows with": (
        "A round of the other",
        "Uneven users",
        "Growth of cost",
        "Outside training",
        "What is not training",
        "Programs and",
    ),
    "Accounting and planning": ("Accounting", "The planner"),
    "Data": ("Sampling", "Preparing"),
    "Versions": ("Versions",),
}
OTHER = "More"


def sections() -> dict[str, dict[str, str]]:
    """Group -> title -> text of every section that is recorded, in the order of the page."""
    found: dict[str, dict[str, str]] = {group: {} for group in (*GROUPS, OTHER)}
    texts = [path.read_text(encoding="utf-8").partition("\n") for path in sorted(DETAILS.glob("*.md"))]
    titles = {first.removeprefix("# ").strip(): body.strip() for first, _, body in texts}
    for group, beginnings in GROUPS.items():
        for beginning in beginnings:
            for title in [title for title in titles if title.startswith(beginning)]:
                found[group][title] = titles.pop(title)
    found[OTHER] = titles
    return {group: inside for group, inside in found.items() if inside}


def page(template: str) -> str:
    """The template of that name with its tables."""
    sys.path.insert(0, str(PAGE.parents[2] / "src"))
    from clipline_paper.facts import ENTRIES

    rows = comparisons(read(sorted(RESULTS.glob("*.jsonl"))))
    parts = {
        "answer": tables.answer(rows),
        "top": tables.top(rows),
        "short": tables.short_top(rows),
        "sizes": tables.sizes(rows),
        "paper": tables.at_paper_rounds(rows, {name: facts.rounds for name, facts in ENTRIES.items()}),
        "empty": tables.empty_cells(rows),
        "parts": tables.parts(rows),
        **tables.notes(rows),
        "contents": ", ".join(f"[{group}](#details-{group.lower().replace(' ', '-')})" for group in sections()),
        "details": "\n\n".join(
            f"## Details: {group}\n\n" + "\n\n".join(f"### {title}\n\n{body}" for title, body in inside.items())
            for group, inside in sections().items()
        ),
    }
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"{{{{{name}}}}}", part)
    return wrapped(re.sub(r"\n{3,}", "\n\n", text.rstrip() + "\n"))


def write() -> None:
    """The page, the records, and the picture if its numbers have changed."""
    PAGE.write_text(page("template.md"), encoding="utf-8")
    records = page("records.md").replace("](../", "](../../docs/").replace("docs/../docs/", "docs/")
    (RESULTS / "README.md").write_text(records, encoding="utf-8")
    numbers = chart.bars(comparisons(read(sorted(RESULTS.glob("*.jsonl")))))
    if chart.drawn_in(PICTURE) != numbers:
        chart.draw(numbers, PICTURE)


if __name__ == "__main__":
    write()
