"""`clipline reproduce`: the paper's figures and its table, from our own code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import check_choice


def reproduce(
    what: Annotated[
        str,
        typer.Argument(
            help="fig1 (the quantile losses), fig2 (the clip finds five quantiles) or table1 (users for epsilon 5)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the PNG and the CSV.")] = Path("reproduced"),
    seed: Annotated[int, typer.Option(help="Seed of the simulated users (fig2).")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
) -> None:
    """Make a figure or a table of the paper again: a picture, and the numbers as CSV."""
    check_choice("what", what, ("fig1", "fig2", "table1"))
    if what == "table1":
        from ..study import paper_tables

        paper_tables.check_table_free(out, overwrite)
        rows = paper_tables.table1(lambda task: print(f"accounting {task} ...", file=sys.stderr, flush=True))
        typer.echo(paper_tables.table1_text(rows))
        typer.echo(str(paper_tables.write_table1(out, rows, overwrite=overwrite)))
        return
    from ..study import paper_figures, paper_tables

    if what == "fig1":
        files = paper_figures.figure1(out, overwrite=overwrite)
    else:
        files = paper_figures.figure2(out, seed=seed, overwrite=overwrite)
        typer.echo(paper_tables.figure2_caption())
    for file in files:
        typer.echo(str(file))
