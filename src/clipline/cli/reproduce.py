"""`clipline reproduce`: the paper's figures and its table, from our own code."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..errors import check_choice
from .parser import Argument, Command, Option


def reproduce(what: str, out: Path, seed: int, overwrite: bool) -> None:
    """Make a figure or a table of the paper again: a picture, and the numbers as CSV."""
    check_choice("what", what, ("fig1", "fig2", "table1"))
    if what == "table1":
        from ..study.paper import table1 as paper_table

        paper_tables.check_table_free(out, overwrite)
        rows = paper_tables.table1(lambda task: print(f"accounting {task} ...", file=sys.stderr, flush=True))
        click.echo(paper_tables.table1_text(rows))
        click.echo(str(paper_tables.write_table1(out, rows, overwrite=overwrite)))
        return
    from ..study import paper_figures, paper_tables

    if what == "fig1":
        files = paper_figures.figure1(out, overwrite=overwrite)
    else:
        files = paper_figures.figure2(out, seed=seed, overwrite=overwrite)
        click.echo(paper_tables.figure2_caption())
    for file in files:
        click.echo(str(file))


command = Command(
    "reproduce",
    callback=reproduce,
    help=reproduce.__doc__,
    params=[
        Argument(
            ["what"],
            help="fig1 (the quantile losses), fig2 (the clip finds five quantiles) or table1 (users for epsilon 5).",
        ),
        Option(
            ["--out"],
            type=click.Path(path_type=Path),
            default=Path("reproduced"),
            unset="reproduced",
            help="Folder for the PNG and the CSV.",
        ),
        Option(["--seed"], type=int, default=0, unset="0", help="Seed of the simulated users (fig2)."),
        Option(["--overwrite"], is_flag=True, help="Replace files that are there."),
    ],
)
