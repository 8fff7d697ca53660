"""The commands by name. A command's module is imported when the command is called."""

from __future__ import annotations

import click

from .parser import Group


def _version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        from .. import __version__

        click.echo(f"clipline {__version__}")
        ctx.exit()


app = Group(
    "clipline",
    help="Train models with user-level differential privacy and no clip norm to tune.",
    modules={
        "train": ".train",
        "predict": ".predict",
        "tune": ".tune",
        "plan": ".plan",
        "report": ".report",
        "tasks": ".tasks",
        "study": ".study",
        "data": ".data",
        "new-task": ".new_task",
    },
    registered="commands",
    params=[
        click.Option(
            ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
        )
    ],
)
