"""How to read a row of the oracle tables."""

import math

from scipy.optimize import brentq
from scipy.stats import norm

from clipline.privacy.accountant import account
from clipline.privacy.events import GaussianEvent, Sampling
from clipline.privacy.ledger import Ledger
from clipline.privacy.relations import Relation


def delta_of_row(row: dict[str, str]) -> float:
    """The delta of a row, n^-1.1 in full precision where that is what is printed to twelve digits."""
    printed = float(row["delta"])
    exact = int(row["n"]) ** -1.1 if row["n"] else printed
    return exact if math.isclose(exact, printed, rel_tol=1e-9) else printed


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Of two unit normals at distance `mu` (Balle and Wang 2018, theorem 8)."""
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The same, solved for epsilon by SciPy."""
    return brentq(lambda epsilon: gaussian_delta(mu, epsilon) - delta, 0, 200, xtol=1e-10)


def spent(sampling: Sampling, z: float, rounds: int, delta: float, relation: Relation) -> float:
    """What the accountant says of so many equal rounds."""
    return account(Ledger().add(GaussianEvent(sampling, z), rounds), delta=delta, relation=relation).epsilon
