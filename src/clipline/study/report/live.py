"""A page on this machine that follows a training as it runs."""

from __future__ import annotations

import json
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseServer

from ...errors import RunError, refuse
from .collect import Collected, collect
from .content import content
from .page import page
from .run import ReportedRun
from .run_directory import is_run_directory, read_run_directory

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
                tag = f'"{sha256(json.dumps(known).encode()).hexdigest()[:32]}"'
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
