"""How to read a row of the oracle tables."""

import math


def delta_of_row(row: dict[str, str]) -> float:
    """The delta of a row, n^-1.1 in full precision where that is what is printed to twelve digits."""
    printed = float(row["delta"])
    exact = int(row["n"]) ** -1.1 if row["n"] else printed
    return exact if math.isclose(exact, printed, rel_tol=1e-9) else printed
