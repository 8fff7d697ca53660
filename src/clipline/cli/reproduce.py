"""`clipline reproduce`: the paper's figures, from our own code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import check_choice


def reproduce(
    what: Annotated[str, typer.Argument(help="fig1 (the quantile losses) or fig2 (the clip finds five quantiles).")],
    out: Annotated[Path, typer.Option(help="Folder for the PNG and the CSV.")] = Path("reproduced"),
    seed: Annotated[int, typer.Option(help="Seed of the simulated users (fig2).")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
) -> None:
    """Draw a figure of the paper again: a picture, and the numbers in it as CSV."""
    check_choice("figure", what, ("fig1", "fig2"))
    from ..study import paper_figures

    if what == "fig1":
        files = paper_figures.figure1(out, overwrite=overwrite)
    else:
        files = paper_figures.figure2(out, seed=seed, overwrite=overwrite)
    for file in files:
        typer.echo(str(file))
