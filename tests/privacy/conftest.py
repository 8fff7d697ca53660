"""The oracle tables beside these tests; oracles/README.md says where each comes from."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

Rows = list[dict[str, str]]


@pytest.fixture
def oracle() -> Callable[[str], Rows]:
    def read(name: str) -> Rows:
        with (Path(__file__).parent / "oracles" / name).open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    return read
