"""`clipline report`: runs and studies as one HTML file, or a page that follows a running training."""

from __future__ import annotations

import time
import webbrowser
from pathlib import Path

from ..console import say, tell
from ..errors import SettingError
from ..training.run_files import LEDGER
from .parser import PATH, Argument, Command, Option


def report(paths: tuple[Path, ...], out: Path | None, live: bool, port: int | None, open_it: bool) -> None:
    """Show runs or a study as one HTML file that needs nothing else: curves, promise, settings.

    With --live, follow a running training in the browser. A folder that is not there yet is waited for.
    """
    if live:
        follow(paths, out, port or 0, open_it)
        return
    if port is not None:
        raise SettingError(f"port={port} must be left out where nothing is served: add --live, or drop it")
    from ..study.report import write_report
    from ..study.report.reading import read_run_directory
    from ..training.run_files import is_run_directory

    written = write_report(paths, out)
    for path in filter(is_run_directory, paths):  # what the page says in its yellow box, for who does not open it
        for problem in read_run_directory(path).problems:
            tell(f"warning: {path}: {problem}")
    say(str(written))
    if open_it:
        webbrowser.open(written.resolve().as_uri())


def follow(paths: tuple[Path, ...], out: Path | None, port: int, open_it: bool = False) -> None:
    """Serve the page of one run until Ctrl-C."""
    from ..study.report.page import live_server

    if len(paths) != 1:
        raise SettingError(f"live follows one run and {len(paths)} paths are given: give one")
    if out is not None:
        raise SettingError(f"out={str(out)!r} must be left out with --live, which writes no file: drop one of the two")
    try:
        _wait_for(paths[0])
        with live_server(paths[0], port) as server:
            address = f"http://127.0.0.1:{server.server_address[1]}/"
            say(f"{address} follows {paths[0]}; Ctrl-C ends it")
            if open_it:
                webbrowser.open(address)
            server.serve_forever()
    except KeyboardInterrupt:
        tell("ended")


def _wait_for(path: Path) -> None:
    """Return once the run directory has begun: its ledger is the last file that a start writes."""
    if path.exists():
        return
    tell(f"waiting for {path} ...")
    while not (path / LEDGER).exists():
        time.sleep(0.2)


command = Command(
    "report",
    report,
    [
        Argument(["paths"], nargs=-1, required=True, type=PATH, help="Run or study directories, or folders of them."),
        Option(["--out"], type=PATH, unset="report.html in the path, or above several", help="The HTML file."),
        Option(["--live"], is_flag=True, help="Serve a page on this machine that follows the run."),
        Option(["--port"], type=int, unset="a free one", help="Where to serve it."),
        Option(["--open", "open_it"], is_flag=True, help="Open the page in the browser."),
    ],
    example="clipline report runs/handwriting-20260131-120000",
)
