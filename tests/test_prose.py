"""README and docs are plain to read: short sentences, no long lines. `python tests/test_prose.py` lists the longest."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, quantiles

import pytest

ROOT = Path(__file__).parents[1]
MADE = {"commands.md", "modules.md"}  # by the build, of help texts and docstrings
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in MADE)]
WIDEST = 120


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines of paragraphs and lists, with their numbers: no code, formula, table, heading or picture."""
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        mark = re.match(r"\s*(`{3,}|\$\$)", line)
        if fence or mark:
            if mark and mark[1].startswith(fence):
                fence = "" if fence else mark[1]
            yield number, ""
        else:
            yield number, "" if re.match(r"\s*(\||#|<|!\[|: `|---|    (?! *[-*\d]))", line) else line


def sentences(text: str) -> list[str]:
    """A sentence ends with its paragraph or list item, or with a full stop before a capital."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*:]|\d+\.) )", "\n".join(line for _, line in prose(text)))
    found = []
    for block in blocks:
        plain = re.sub(r"`[^`]+`", "Code", re.sub(r"\]\([^)]*\)", "]", block))
        plain = re.sub(r"^\s*(?:[-*:]|\d+\.) |[*\[\]]", "", " ".join(plain.split()))
        found += re.split(r"(?<=[.!?])\)? (?=[\"(]?[A-Z])", plain)
    return [sentence for sentence in found if length(sentence)]


def length(sentence: str) -> int:
    """In words."""
    return len(re.findall(r"[^\s]*\w[^\s]*", sentence))


def test_a_sentence_has_at_most_16_words_on_average_and_28_at_the_ninetieth_percentile():
    lengths = [length(sentence) for page in PAGES for sentence in sentences(page.read_text(encoding="utf-8"))]
    assert len(lengths) > 1000
    assert mean(lengths) <= 16
    assert quantiles(lengths, n=10)[-1] <= 28


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_line_of_prose_is_wider_than_a_screen(page):
    """`python docs/wrap.py PAGE...` wraps them."""
    lines = prose(page.read_text(encoding="utf-8"))
    assert [f"line {number}" for number, line in lines if len(line) > WIDEST] == []


def test_the_measure_itself_on_a_page_counted_by_hand():
    page = "# Not counted, a heading\n\nTwo words. Now `a b c` four\nwords, still one [link here](x.md).\n\n"
    page += "- An item of six words ends\n- here\n\n```\nno code here\n```\n\n| no | table |\n"
    assert [length(sentence) for sentence in sentences(page)] == [2, 8, 6, 1]


if __name__ == "__main__":
    every = [(length(one), page, one) for page in PAGES for one in sentences(page.read_text(encoding="utf-8"))]
    every = [one for one in every if not sys.argv[1:] or any(name in str(one[1]) for name in sys.argv[1:])]
    for page in dict.fromkeys(page for _, page, _ in every):
        own = [size for size, its, _ in every if its == page]
        wide = sum(len(line) > WIDEST for _, line in prose(page.read_text(encoding="utf-8")))
        long = sum(size > 28 for size in own)
        print(f"{mean(own):5.1f} words, {len(own):3} sentences, {long:2} over 28, {wide:2} wide lines: {page.stem}")
    for size, page, sentence in sorted(every, key=lambda one: -one[0])[:40]:
        print(size, page.stem, sentence)
    lengths = [size for size, _, _ in every]
    print(f"mean {mean(lengths):.1f}, 90th percentile {quantiles(lengths, n=10)[-1]:.0f} of {len(lengths)} sentences")
