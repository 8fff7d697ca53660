"""The oracle tables of the project, where they are at hand; the key values also stand in the tests themselves."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path

import pytest

ORACLES = Path(os.environ.get("CLIPLINE_ORACLES") or Path(__file__).resolve().parents[3] / "shared" / "oracles")

Rows = list[dict[str, str]]


@pytest.fixture
def oracle() -> Callable[[str], Rows]:
    def read(name: str) -> Rows:
        path = ORACLES / name
        if not path.exists():
            pytest.skip(f"oracle table {path} is not at hand; its key values are tested inline")
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    return read
