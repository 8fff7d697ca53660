"""Numerical methods in float64 that know nothing of rounds or users.

Begin with `gaussian` (tails of the normal law, exact cost of Gaussian noise); then `quadrature` (integrals on a log
scale) and `monotone_search` (where a monotone function crosses a target).
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
