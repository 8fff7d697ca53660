"""`python docs/wrap.py PAGE...` wraps lines of prose beyond 120 columns, and leaves code, tables and headings alone."""

import re
import sys
import textwrap
from pathlib import Path

WIDTH = 120
_ITEM = re.compile(r"\s*(?:(?:[-*]|\d+\.|:) +)?")
_OTHER = re.compile(r"\s*(?:\||#|<|!\[|: `|---)")


def wrapped(page: str) -> str:
    """The page with its long paragraphs and list items wrapped."""
    lines: list[str] = []
    block: list[str] = []
    fence = ""
    for line in [*page.splitlines(), ""]:
        mark = re.match(r"\s*(`{3,})", line)
        other = bool(fence or mark or not line.strip() or _OTHER.match(line))
        if other or re.match(r"\s*(?:[-*]|\d+\.|:) ", line):
            lines += _block(block)
            block = []
        if mark and mark[1].startswith(fence):
            fence = "" if fence else mark[1]
        (lines if other else block).append(line)
    return "\n".join(lines).rstrip() + "\n"


def _block(block: list[str]) -> list[str]:
    """A paragraph or an item. Code of one line stays on one line."""
    if not any(len(line) > WIDTH for line in block):
        return block
    item = re.match(_ITEM, block[0])
    first = item[0] if item else ""
    text = " ".join([block[0][len(first) :].strip(), *(line.strip() for line in block[1:])])
    text = re.sub(r"`[^`]{,70}`", lambda code: code[0].replace(" ", "\0"), text)
    indents = {"initial_indent": first, "subsequent_indent": " " * len(first)}
    found = textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False, **indents)
    return [line.replace("\0", " ") for line in found]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(wrapped(path.read_text(encoding="utf-8")), encoding="utf-8")
