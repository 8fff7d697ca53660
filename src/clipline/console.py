"""What the terminal shows: text with coloured first words, wrapped with hanging indents, and one kind of progress bar.

Where there is no terminal the text is printed as it is, so that programs can read it. Control characters, which names
in files may hold, are always written as Python writes them. Rich is imported when a terminal
is written to, which keeps `clipline --help` light, and it respects NO_COLOR.
"""

from __future__ import annotations

import html
import importlib
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from .errors import CliplineError, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_STYLES = {"error:": "bold red", "warning:": "yellow", "hint:": "cyan", "note:": "bold"}  # of a line's first word
_WIDEST = 120  # columns of text, on a terminal that has more
_FIRST = re.compile(rf"\s*({'|'.join(_STYLES)})")
_LABEL = re.compile(r">?\s*\S+( \S+)*\s{2,}(?=\S)|\s*\w+: (?=\S)")  # what continuation lines stand to the right of

QUIET_SECONDS = 10.0  # without a terminal progress has a line at least this often
_REFRESH_SECONDS = 0.2  # between two updates of a notebook


def say(text: str) -> None:
    """Print a result on standard output."""
    _print(text, sys.stdout)


def tell(text: str) -> None:
    """Print what is going on, a note or a warning, on standard error."""
    _print(text, sys.stderr)


def fail(error: BaseException | str) -> None:
    """Print an error on standard error. On a terminal its hint has a line of its own."""
    said, hint = str(error), error.hint if isinstance(error, CliplineError) else ""
    if hint and sys.stderr.isatty() and said.endswith(f": {hint}"):
        said = f"{said.removesuffix(f': {hint}')}\nhint: {hint}"
    tell(f"error: {said}")


def aligned(rows: Iterable[tuple[str, str]]) -> str:
    """Names in a column of their own and texts beside it, a line each."""
    listed = list(rows)
    width = max((len(name) for name, _ in listed), default=0)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in listed)


@contextmanager
def spinner(text: str, *, quiet: bool = False) -> Iterator[None]:
    """Shows the text with the time so far while something is done. Without a terminal it is one line, or none."""
    if not sys.stderr.isatty():
        if not quiet:
            tell(f"{text} ...")
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=_console(sys.stderr), transient=True) as shown:
        shown.add_task(printable(text), total=None)
        yield


def _print(text: str, stream: TextIO) -> None:
    stream.write(rendered(text, stream))
    stream.flush()


def rendered(text: str, stream: TextIO) -> str:
    """The lines of a text as this stream shows them."""
    text = printable(text)
    if not stream.isatty():
        return f"{text}\n"
    from rich.text import Text

    console = _console(stream)
    with console.capture() as captured:
        for line in text.split("\n"):
            for part in wrapped(line, min(console.width, _WIDEST)):
                styled = Text(part)
                if first := _FIRST.match(part):
                    styled.stylize(_STYLES[first[1]], first.start(1), first.end(1))
                console.print(styled, soft_wrap=True)
    return captured.get()


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False)


def wrapped(line: str, width: int) -> list[str]:
    """The line in parts of at most `width`, cut between words. Later parts stand below the text after the label."""
    if len(line) <= width:
        return [line]
    label = _LABEL.match(line)
    indent = label.end() if label else len(line) - len(line.lstrip()) + 2
    return textwrap.wrap(
        line, width, subsequent_indent=" " * min(indent, width // 3), drop_whitespace=True, break_on_hyphens=False,
        break_long_words=False, replace_whitespace=False,
    )  # fmt: skip


class Bar:
    """A bar with text around it, on standard error, or below the cell of a notebook.

    On a terminal it is updated in place; a `transient` bar becomes a line of text when it is closed. Elsewhere, as in a
    log file, `show` prints a line if the last one is old enough, and `close` prints the last state if it has none.
    """

    def __init__(self, total: int, done: int = 0, head: str = "", *, transient: bool = False) -> None:
        self.total = total
        self._set(done, head)
        self._printed, self._pending = time.perf_counter(), ""
        self._colour = ""
        self._handle: Any = None
        self._live: Live | None = None
        if _in_notebook():
            display: Any = importlib.import_module("IPython.display").display  # without types of its own
            self._handle = display(self._as_html(), raw=True, display_id=True)
        elif sys.stderr.isatty():
            from rich.live import Live

            screen = _console(sys.stderr)
            self._width = screen.width
            self._live = Live(console=screen, refresh_per_second=5, transient=transient, get_renderable=self._as_rich)
            self._live.start()

    def show(self, done: int, head: str, tail: str = "", below: str = "", *, quiet: float = QUIET_SECONDS) -> None:
        """`done` of the total, with text before and after the bar and below it.

        Without a terminal this is a line if the last one is `quiet` seconds old, and otherwise none yet.
        """
        self._set(done, head, tail, below)
        silent = time.perf_counter() - self._printed
        if self._handle is not None:
            if silent >= min(quiet, _REFRESH_SECONDS):
                self._update()
        elif self._live is None:
            self._pending = "  ".join(filter(None, (head, below, tail)))
            if silent >= quiet:
                self._print()

    def wait(self, reason: str | None) -> None:
        """What the next step waits for, said at once; None: it goes on."""
        done, head, _, below = self._state
        self._set(done, head, reason or "", below)
        if self._handle is not None:
            self._update()
        elif self._live is None and reason:
            tell(f"{head}  {reason}")

    def end(self, tail: str, *, well: bool) -> None:
        """The last text after the bar, which becomes green or red; a plain line has it only if it is not `well`."""
        done, head, _, below = self._state
        self._set(done, head, tail, below)
        self._colour = "green" if well else "red"
        if not well and self._handle is None and self._live is None:
            self._pending = "  ".join(filter(None, (self._pending or head, tail)))

    def close(self) -> None:
        """No more comes. What a notebook stores says nothing of speed, unless `end` said it."""
        if self._live is not None:
            self._live.stop()
            if self._live.transient:
                tell("  ".join(filter(None, self._state[1:])))
        elif self._handle is not None:
            if not self._colour:
                self._set(*self._state[:2], "", self._state[3])
            self._update()
        elif self._pending:
            self._print()

    def _set(self, done: int, *words: str) -> None:
        head, tail, below = (*map(printable, words), "", "")[:3]
        self._state = done, head, tail, below

    def _print(self) -> None:
        self._printed = time.perf_counter()
        tell(self._pending)
        self._pending = ""

    def _update(self) -> None:
        self._printed = time.perf_counter()
        self._handle.update(self._as_html(), raw=True)

    def _as_rich(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        done, head, tail, below = self._state
        style = {"green": "bar.finished", "red": "red"}.get(self._colour, "bar.complete")
        line = Table.grid(expand=True, padding=(0, 1))
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        bar = ProgressBar(self.total, done, complete_style=style, finished_style=style)
        line.add_row(Text(head), bar, Text(tail))
        return Group(line, *(Text(part) for part in wrapped(below, self._width) if below))

    def _as_html(self) -> dict[str, str]:
        done, head, tail, below = self._state
        style = f"width: 40%; vertical-align: middle; accent-color: {self._colour or 'grey'}"
        top, under = (html.escape(text).replace("  ", " &nbsp; ") for text in (f"{head}  {tail}".strip(), below))
        bar = f'<progress value="{done}" max="{self.total}" style="{style}"></progress>'
        return {
            "text/plain": "  ".join(filter(None, (head, below, tail))),
            "text/html": f"<div>{bar} {top}<br><code>{under}</code></div>",
        }


class Stages:
    """The stages of some work on files, one after the other, each with a bar from nothing to all."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._stage, self._begun, self._done = "", 0.0, 0

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` of a stage, in whatever unit."""
        if self._bar is None or stage != self._stage:
            self.__exit__()
            self._bar, self._stage, self._begun = Bar(total, head=stage), stage, time.perf_counter()
        elif self._done >= total:
            return
        spent = time.perf_counter() - self._begun
        left = f"{clock(spent * (total - done) / done)} left" if 0 < done < total and spent > 1 else ""
        self._bar.total, self._done = total, done
        self._bar.show(
            done, f"{stage} {100 * done // max(total, 1)}%", left, quiet=0.0 if done >= total else QUIET_SECONDS
        )


def clock(seconds: float) -> str:
    """A duration as 0:01:05."""
    return f"{int(seconds // 3600)}:{int(seconds // 60 % 60):02d}:{int(seconds % 60):02d}"


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this: it has displays that can be updated."""
    ipython = sys.modules.get("IPython")  # whoever runs in a kernel has it
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
