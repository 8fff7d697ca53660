"""Every entry of the zoo, by every engine and in every neighbouring world: users are kept apart, or it is refused."""

import pytest
import torch
from adversarial.neighbours import Case, Refused, described, findings
from adversarial.zoo import DENSE, ZOO

from clipline import LocalSGD

ENGINES = ["one-by-one", "stacked"]
AUTO = "auto"  # one of the two, so that a few entries do
BY_ITSELF = [
    "dropout",
    "functional dropout",
    "zero head behind batch statistics",
    "batch mean subtracted",
    "embedding with padding",
    "lstm",
    "gradient inside the loss",
    "cosine head",
    "last input kept and added",
    "parameter replaced once",
    "closure of the loss",
]
# What everybody uses: a stack may refuse what it cannot run, but not these.
MUST_STACK = {
    "no randomness but the order of batches",
    "dropout",
    "layer norm",
    "group norm",
    "tied weights",
    "frozen base",
    "convolution",
    "losses scaled by the length of the batch",
}
BY_TWO = [
    "dropout",
    "functional dropout",
    "zero head behind batch statistics",
    "cosine head",
    "step counter that scales the output",
    "global numpy",
    "moving average in a buffer",
    "memory of huge values alone",
]
ON_GPU = [
    *MUST_STACK,
    "zero head behind batch statistics",
    "contrastive loss",
    "cosine head",
    "moving average in a buffer",
]

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def assert_kept(case, chosen=()):
    """Users are kept apart or the entry is refused, whichever the entry says."""
    found = findings(case, chosen)
    refused = isinstance(found, Refused)
    assert refused or not found, "\n".join(map(str, found))
    if refused and case.engine == "stacked" and not found.made and case.entry.name not in MUST_STACK:
        return  # has no version for many users at once, which is said before the first round
    assert ("refused" if refused else "isolated") in case.entry.expected, described(found) if refused else "it trains"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", [entry.name for entry in DENSE])
def test_users_are_kept_apart_or_the_model_is_refused(name, engine):
    assert_kept(Case(ZOO[name], engine))


@pytest.mark.parametrize("name", BY_ITSELF)
def test_users_are_kept_apart_whichever_engine_is_chosen(name):
    assert_kept(Case(ZOO[name], AUTO))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", BY_TWO)
def test_users_of_two_workers_are_kept_apart(name, engine):
    assert_kept(Case(ZOO[name], engine, workers=2), ["first and largest user removed", "renamed", "NaN"])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["dropout", "zero head behind batch statistics", "functional dropout"])
def test_users_of_several_epochs_are_kept_apart(name, engine):
    assert_kept(Case(ZOO[name], engine, local=LocalSGD(lr=0.1, batch_size=3, epochs=2)))


@cuda
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", sorted(ON_GPU))
def test_users_on_a_gpu_are_kept_apart(name, engine):
    assert_kept(Case(ZOO[name], engine, device="cuda"))


def test_the_zoo_is_large_and_names_what_exists():
    assert len(ZOO) >= 60
    assert {*MUST_STACK, *BY_ITSELF, *BY_TWO, *ON_GPU} <= set(ZOO)
