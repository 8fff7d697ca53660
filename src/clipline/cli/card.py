"""`clipline card`: what to sign and publish with a model."""

from __future__ import annotations

from pathlib import Path

from ..console import say
from .parser import PATH, Argument, Command, Option


def card(run: Path, out: Path | None, declared_by: str, declared_on: str) -> None:
    """Write a statement to sign, a Hugging Face model card and a registry entry for a finished run.

    The run is verified first. What only you know is marked TO FILL IN.
    """
    from ..trust.card import FILL_IN, write_cards

    for path in write_cards(run, run / "card" if out is None else out, declared_by, declared_on):
        left = path.read_text(encoding="utf-8").count(FILL_IN)
        say(f"{path}  ({left} places {FILL_IN})")


command = Command(
    "card",
    card,
    [
        Argument(["run"], type=PATH, metavar="RUN", help="A run directory."),
        Option(["--out"], type=PATH, unset="card in the run", metavar="DIR", help="Where to write the files."),
        Option(["--declared-by"], default="", metavar="NAME", help="Who declared the number of users."),
        Option(["--declared-on"], default="", metavar="DATE", help="When, before training."),
    ],
)
