"""Table 1 of the paper and the caption of its Figure 2: what is printed, what their convention gives, what holds."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

from clipline.errors import RunError
from clipline.privacy import GaussianEvent, Ledger, Relation, account, least_scale, rounded_up, sampling_named

USERS = 1_000_000
DELTA = 10**-6.6  # USERS ** -1.1
EPSILON = 5.0


@dataclass(frozen=True)
class TableRow:
    """A task: its rounds, the noise z* that its model bears at 100 users, the cohort that Table 1 prints for epsilon 5.

    The columns after those are ours: the least cohort in the paper's convention; the epsilon that the printed cohort
    really has with fixed-size sampling (replace-one) and with Poisson sampling (add-or-remove); and the least cohorts
    that really reach epsilon 5.
    """

    task: str
    rounds: int
    noise_at_100: float
    paper_cohort: int
    paper_convention_cohort: int
    fixed_epsilon: float
    poisson_epsilon: float
    fixed_cohort: int
    poisson_cohort: int


PRINTED = (
    ("CIFAR-100", 4000, 0.03, 2231),
    ("EMNIST-CR", 1500, 0.1, 513),
    ("EMNIST-AE", 3000, 0.03, 2197),
    ("Shakespeare", 1200, 0.1, 510),
    ("SO-NWP, SO-LR", 1500, 0.01, 13958),
)


def table1(show: Callable[[str], None] = lambda line: None) -> list[TableRow]:
    """All rows; `show` is told before each, as one takes a few seconds."""
    rows = []
    for task, rounds, noise, cohort in PRINTED:
        show(task)
        event = partial(_event, cohort=cohort, z=noise * cohort / 100)
        least = partial(
            least_scale, cohort_size=100, noise_multiplier=noise, population_size=USERS, rounds=rounds,
            epsilon=EPSILON, delta=DELTA,
        )  # fmt: skip
        rows.append(
            TableRow(
                task,
                rounds,
                noise,
                cohort,
                least(sampling="fixed", relation=Relation.PAPER),
                _epsilon(event("fixed"), rounds, Relation.REPLACE_ONE),
                _epsilon(event("poisson"), rounds, Relation.ADD_OR_REMOVE),
                least(sampling="fixed", relation=Relation.REPLACE_ONE),
                least(sampling="poisson", relation=Relation.ADD_OR_REMOVE),
            )
        )
    return rows


def _event(sampling: str, *, cohort: int, z: float) -> GaussianEvent:
    return GaussianEvent(sampling_named(sampling, cohort, USERS), z)


def _epsilon(event: GaussianEvent, rounds: int, relation: Relation) -> float:
    return account(Ledger().add(event, rounds), delta=DELTA, relation=relation).epsilon


def table1_text(rows: list[TableRow]) -> str:
    """The table for a terminal."""
    lines = [
        f"Users a round for (5, n^-1.1) with n = {USERS:,} and z = z* m / 100:",
        "",
        f"{'':28}  {'-- cohort for 5 --':^20}  {'-- what it really has --':^26}  {'-- honest cohort for 5 --':^25}",
        f"{'task':15}{'rounds':>7}{'z*':>6}  {'printed':>9}{'ours':>11}  {'fixed-size':>13}{'Poisson':>13}"
        f"  {'fixed-size':>12}{'Poisson':>13}",
    ]
    for row in rows:
        lines.append(
            f"{row.task:15}{row.rounds:7d}{row.noise_at_100:6g}"
            f"  {row.paper_cohort:9d}{row.paper_convention_cohort:11d}"
            f"  {rounded_up(row.fixed_epsilon, 4):>13}{rounded_up(row.poisson_epsilon, 4):>13}"
            f"  {row.fixed_cohort:12d}{row.poisson_cohort:13d}"
        )
    return "\n".join(
        [
            *lines,
            "",
            "'ours' follows the paper's convention (Theorem 27 of Wang et al. at z): it meets the table and is NOT a",
            "guarantee, since exchanging a user moves the sum by two clips. Real: replace-one for fixed-size sampling,",
            "add-or-remove for Poisson sampling.",
        ]
    )


def write_table1(folder: Path, rows: list[TableRow], *, overwrite: bool = False) -> Path:
    """The same as CSV."""
    path = folder / "table1.csv"
    check_table_free(folder, overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(TableRow)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    return path


def check_table_free(folder: Path, overwrite: bool) -> None:
    """Refuse to replace a table, before minutes are spent on a new one."""
    if (folder / "table1.csv").exists() and not overwrite:
        raise RunError(f"{str(folder / 'table1.csv')!r} is in use: give another folder with --out, or --overwrite")


def figure2_caption() -> str:
    """Epsilon of the 200 noisy counts of Figure 2 (100 of a million users, count noise 5): printed, and as it is."""

    def spent(sampling: str, relation: Relation, z: float) -> str:
        return rounded_up(_epsilon(_event(sampling, cohort=100, z=z), 200, relation), 3)

    # A centred bit is at most 1/2, so that noise 5 is the multiplier 10; the paper's 0.034 takes it as 5 instead.
    rows = [
        ("printed in the paper", "0.034"),
        ("its convention (Renyi, whole orders up to 256)", spent("fixed", Relation.PAPER, 5.0)),
        ("fixed-size sampling, replace one user", spent("fixed", Relation.REPLACE_ONE, 10.0)),
        ("Poisson sampling, add or remove one user", spent("poisson", Relation.ADD_OR_REMOVE, 10.0)),
    ]
    title = "Epsilon of the whole sequence of clips, at delta = n^-1.1, n = 1,000,000:"
    return "\n".join([title, *(f"  {name:<48}{value:>10}" for name, value in rows)])
