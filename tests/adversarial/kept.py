"""What every case must come to: users are kept apart, or the entry is refused."""

import pytest
import torch
from adversarial.neighbours import Case, Refused, described, findings

ENGINES = ["one-by-one", "stacked"]
AUTO = "auto"  # one of the two, so that a few entries do
# What everybody uses: a stack may refuse what it cannot run, but not these.
MUST_STACK = {
    "no randomness but the order of batches",
    "dropout",
    "norms of an example",
    "tied weights",
    "frozen base",
    "convolution",
    "losses scaled by the length of the batch",
}
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def assert_kept(case: Case, chosen: tuple[str, ...] = ()) -> None:
    """Users are kept apart or the entry is refused, whichever the entry says."""
    found = findings(case, chosen)
    refused = isinstance(found, Refused)
    assert refused or not found, "\n".join(map(str, found))
    if refused and case.engine == "stacked" and not found.made and case.entry.name not in MUST_STACK:
        return  # has no version for many users at once, which is said before the first round
    assert ("refused" if refused else "isolated") in case.entry.expected, described(found) if refused else "it trains"
