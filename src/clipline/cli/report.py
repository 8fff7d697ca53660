"""`clipline report`: runs and studies as one HTML file, or a page that follows a running training."""

from __future__ import annotations

from pathlib import Path

from ..console import say, tell
from ..errors import SettingError
from .parser import PATH, Argument, Command, Option


def report(paths: tuple[Path, ...], out: Path | None, live: bool, port: int | None) -> None:
    """Show runs or a study as one HTML file that needs nothing else: curves, promise, settings.

    With --live, follow a running training in the browser.
    """
    if live:
        follow(paths, out, port or 0)
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


def follow(paths: tuple[Path, ...], out: Path | None, port: int) -> None:
    """Serve the page of one run until Ctrl-C."""
    from ..study.report.page import live_server

    if len(paths) != 1:
        raise SettingError(f"live follows one run and {len(paths)} paths are given: give one")
    if out is not None:
        raise SettingError(f"out={str(out)!r} must be left out with --live, which writes no file: drop one of the two")
    with live_server(paths[0], port) as server:
        say(f"http://127.0.0.1:{server.server_address[1]}/ follows {paths[0]}; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            tell("ended")


command = Command(
    "report",
    report,
    [
        Argument(["paths"], nargs=-1, required=True, type=PATH, help="Run or study directories, or folders of them."),
        Option(["--out"], type=PATH, unset="report.html in the path, or above several", help="The HTML file."),
        Option(["--live"], is_flag=True, help="Serve a page on this machine that follows the run."),
        Option(["--port"], type=int, unset="a free one", help="Where to serve it."),
    ],
)
