"""One HTML file with everything in it: data, style, program and the charting library.

Charts are drawn by uPlot (MIT licence, beside it in assets/): 51 kB inline, no dependency, and fast with hundreds of
curves, where Apache ECharts would add a megabyte to every report. What it lacks, a legend for the keyboard and tables
behind the charts, is ours in any case.

Text of runs is never HTML here: it is JSON in which `<`, `>` and `&` are escaped, and page.js puts it on the page as
text. A content security policy by checksum keeps out any other script and any network request.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from ...errors import RunError
from .collect import collect
from .content import content

REPORT = "report.html"
POLL_SECONDS = 2.0


def write_report(paths: Sequence[str | Path] | str | Path, out: str | Path | None = None) -> Path:
    """Write the report of runs or studies as one HTML file, and give its path.

    `paths` are run directories, study directories or folders of these; `out` is the file, by default report.html in the
    path, or of several paths in the nearest folder that they share, so that no run loses the report of its own. It
    replaces a file that is there, at once. A path that holds no run is refused, and nothing is written.
    """
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    collected = collect(listed)
    target = _shared_folder(collected.paths) / REPORT if out is None else Path(out)
    if target.is_dir():
        raise RunError(f"out={str(target)!r} must be a file, and it is a folder: give a name such as report.html")
    text = page(content(collected))
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")  # two processes may end at once
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(target)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise RunError(f"out={str(target)!r} cannot be written ({error}): give another file") from None
    return target


def _shared_folder(paths: Sequence[Path]) -> Path:
    """The only path, or the nearest folder above all of several, seen from here where it is below."""
    if len({path.resolve() for path in paths}) == 1:
        return paths[0]
    folder = Path(os.path.commonpath([path.resolve() for path in paths]))
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def page(data: dict[str, Any], *, live: bool = False) -> str:
    """The page that shows `data`, as `content` gives it; a live one asks for newer data every two seconds."""
    scripts = [_asset("uPlot.iife.min.js"), _asset("page.js")]
    policy = "; ".join(
        (
            "default-src 'none'",
            "style-src 'unsafe-inline'",
            "img-src data:",
            f"script-src {' '.join(map(_checksum, scripts))}",
            f"connect-src {chr(39)}self{chr(39)}" if live else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(str(data["title"])),
        "STYLE": _asset("uPlot.min.css") + _asset("page.css"),
        "LIVE": str(POLL_SECONDS if live else 0),
        "PLAIN": _plain(data),
        "DATA": embedded(data),
        "LIBRARY": scripts[0],
        "PROGRAM": scripts[1],
    }
    text = _asset("page.html")
    head, *rest = text.split("{{")  # one pass: a part that holds braces itself is not looked into
    for piece in rest:
        name, _, after = piece.partition("}}")
        head += parts[name] + after
    return head


def embedded(data: dict[str, Any]) -> str:
    """JSON that may stand inside a script element: no `<`, so no text in it can end the element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _plain(data: dict[str, Any]) -> str:
    """The statements for a reader without JavaScript."""
    failed = [f"WARNING: {entry['text']} ({', '.join(entry['runs'][:20])})" for entry in data["failures"]]
    warned = [f"NOT PRIVATE: {entry['text']} ({', '.join(entry['runs'][:20])})" for entry in data["warnings"]]
    stated = [
        f"{html.escape(', '.join(entry['runs'][:20]))}: {'<s>' * struck}{html.escape(entry['words'])}{'</s>' * struck}"
        for entry in data["statements"]
        for struck in [bool(entry["void"])]
    ]
    return "".join(f"<p>{line}</p>" for line in [*map(html.escape, [*failed, *warned]), *stated])


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _checksum(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"
