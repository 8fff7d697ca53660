"""All commands, as typer knows them."""

from __future__ import annotations

import typer

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
