"""One HTML file with everything in it: data, style, program and the charting library; or a page that follows a run.

Charts are drawn by uPlot (MIT licence, beside it in assets/): 51 kB inline, no dependency, and fast with hundreds of
curves.

Text of runs is never HTML here: it is JSON in which `<`, `>` and `&` are escaped, and page.js puts it on the page as
text. A content security policy by checksum keeps out any other script and any network request.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from socketserver import BaseServer
from typing import Any

from ...errors import RunError, refuse
from ...training.durable import replacing
from ...training.run_files import is_run_directory
from .content import content
from .reading import Collected, ReportedRun, collect, read_run_directory

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
    try:
        with replacing(target) as partial:
            partial.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
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
    connect = f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}"
    sources = f"img-src data:; script-src {' '.join(map(_checksum, scripts))}; {connect}"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; {sources}; base-uri 'none'; form-action 'none'"
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


LOOPBACK = "127.0.0.1"


def live_server(path: str | Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of the page that follows the run in `path`, on loopback only; `serve_forever` starts it.

    Port 0 takes a free one: `server_address` tells which. The folder must be there; its run may not have begun yet, may
    be running or may have ended. A request with another host in its header than this machine's own names is refused, so
    that no page of another site can read the run by a name that leads here.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise RunError(f"live={str(path)!r} is no folder: start the training first, or give its run directory")
    if any(folder.iterdir()) and not is_run_directory(folder):
        collect([folder])  # refuses what is no run
        raise RunError(f"live={str(path)!r} holds several runs or a study, and one can be followed: give its directory")
    if not 0 <= port < 1 << 16:
        raise refuse("port", port, "0 to 65535", "leave it out for a free one")
    try:
        server = ThreadingHTTPServer((LOOPBACK, port), _handler(folder))
    except OSError as error:
        raise RunError(f"port={port} cannot be used ({error}): leave it out for a free one") from None
    server.daemon_threads = True
    return server


def own_names(server: BaseServer) -> tuple[str, str]:
    """How a browser on this machine calls the server."""
    assert isinstance(server.server_address, tuple)
    port = server.server_address[1]
    return f"{LOOPBACK}:{port}", f"localhost:{port}"


def _handler(folder: Path) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers / with the page and /data.json with what there is now; 304 where nothing is new."""

        def do_GET(self) -> None:
            if self.headers.get("Host") not in own_names(self.server):
                self._answer(HTTPStatus.FORBIDDEN, b"this server answers to its own machine only\n", "text/plain")
            elif self.path == "/":
                text = page(_content(folder), live=True)
                self._answer(HTTPStatus.OK, text.encode("utf-8", "replace"), "text/html; charset=utf-8")
            elif self.path == "/data.json":
                data = _content(folder)
                known = {name: value for name, value in data.items() if name != "made"}
                tag = f'"{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]}"'
                if self.headers.get("If-None-Match") == tag:
                    self._answer(HTTPStatus.NOT_MODIFIED, b"", "application/json", tag)
                else:
                    text = json.dumps(data, allow_nan=False)
                    self._answer(HTTPStatus.OK, text.encode(), "application/json", tag)
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"there is / and /data.json\n", "text/plain")

        def _answer(self, status: HTTPStatus, body: bytes, kind: str, tag: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if tag:
                self.send_header("ETag", tag)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: the terminal belongs to the user."""

    return Handler


def _content(folder: Path) -> dict[str, object]:
    """The run as far as it has come; an empty one where it has not begun."""
    begun = is_run_directory(folder)
    run = read_run_directory(folder) if begun else ReportedRun(folder.resolve().name, str(folder), False, "not ended")
    return content(Collected((folder,), (run,)))
