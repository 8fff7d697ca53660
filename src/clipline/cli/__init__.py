"""The command line: every command says what it does, checks first, and fails in one sentence with exit code 2."""

from __future__ import annotations

import sys

import typer

from ..errors import CliplineError
from . import data, plan, reproduce, tasks, train

app = typer.Typer(
    name="clipline",
    help="Train models with user-level differential privacy and no clip norm to tune.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("tasks")(tasks.tasks)
app.command("plan")(plan.plan)
app.command("reproduce")(reproduce.reproduce)
app.add_typer(data.app, name="data")


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"clipline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Entry point of the `clipline` command."""
    try:
        app()
    except CliplineError as error:
        print(f"clipline: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a path that cannot be read or written; nothing of ours raises it otherwise
        print(f"clipline: {error.filename or 'a file'}: {error.strerror or error}: give another path", file=sys.stderr)
        sys.exit(2)
