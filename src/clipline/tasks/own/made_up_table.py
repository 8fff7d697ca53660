"""A table to try things on: made-up riders, their rides, and how long each took."""

from __future__ import annotations

import csv
import io
import random
from datetime import datetime, timedelta

from .table_columns import Column
from .task_text import Chosen

RIDERS = 600
_MINUTES_A_KM = {"city": 4.0, "race": 2.5, "cargo": 5.5}
CHOSEN = Chosen(
    user="rider",
    label="minutes",
    inputs=[Column("start", "time"), Column("km", "fraction"), Column("climb", "whole")],
    categories={"bike": list(_MINUTES_A_KM)},
    scales={"start": (180.0, 180.0), "km": (8.0, 5.0), "climb": (100.0, 60.0), "minutes": (40.0, 20.0)},
)


def made_up_csv() -> str:
    """The same rides each time. One climb in ten is missing, and one ride in ten on a bike that nobody wrote down."""
    rng = random.Random(1)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["rider", "start", "bike", "km", "climb", "minutes"])
    year = datetime(datetime.now().year, 1, 1)
    for rider in range(RIDERS):
        bike = rng.choice(list(_MINUTES_A_KM))
        for _ in range(rng.randint(1, 20)):
            start = year + timedelta(minutes=rng.randrange(525_600))
            km, climb = rng.uniform(1, 16), rng.randrange(200)
            minutes = km * _MINUTES_A_KM[bike] + climb * 0.05 + rng.gauss(0, 2)
            written = "" if rng.random() < 0.1 else bike
            measured = "" if rng.random() < 0.1 else climb
            rows.writerow([f"r{rider:03}", start, written, f"{km:.2f}", measured, f"{max(minutes, 1):.1f}"])
    return text.getvalue()
