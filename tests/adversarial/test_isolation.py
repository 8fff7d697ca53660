"""Every entry of the zoo, by every engine and in every neighbouring world: users are kept apart, or it is refused."""

import pytest
from adversarial.kept import AUTO, ENGINES, MUST_STACK, assert_kept, cuda
from adversarial.neighbours import Case
from adversarial.zoo import DENSE, ZOO

from clipline import LocalAdam, LocalSGD

BY_ITSELF = [
    "dropout",
    "functional dropout",
    "zero head behind batch statistics",
    "attention between examples",
    "lstm",
    "gradient inside the loss",
    "last input kept and added",
    "parameter replaced once",
]
BY_TWO = [  # of those that are stacked, and of those that are not
    "dropout",
    "functional dropout",
    "zero head behind batch statistics",
    "cosine head",
    "step counter that scales the output",
    "global numpy",
    "moving average in a buffer",
    "memory of huge values alone",
]
BY_SINGLE_STEPS = [  # which share weights in most of these; all of the zoo was tried, which takes minutes
    "no randomness but the order of batches",
    "dropout",
    "functional dropout",
    "clamped in place",
    "default dtype left changed",
    "batch norm without statistics",
    "attention between examples",
    "scalar loss behind batch statistics and a zero head",
    "tied weights",
    "frozen base",
    "convolution",
    "transformer layer",
    "embedding with padding",
    "parameter hook that averages gradients",
    "last input kept and added",
    "moving average in a buffer",
]
ON_GPU = [  # few, as each of their worlds is compiled
    "dropout",
    "functional dropout",
    "zero head behind batch statistics",
    "cosine head",
    "embedding with padding",
    "moving average in a buffer",
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", [entry.name for entry in DENSE])
def test_users_are_kept_apart_or_the_model_is_refused(name, engine):
    assert_kept(Case(ZOO[name], engine))


@pytest.mark.parametrize("name", BY_ITSELF)
def test_users_are_kept_apart_whichever_engine_is_chosen(name):
    assert_kept(Case(ZOO[name], AUTO))


@pytest.mark.parametrize("name", BY_TWO)
def test_users_of_two_workers_are_kept_apart(name):
    assert_kept(Case(ZOO[name], AUTO, workers=2), ("first and largest user removed", "huge", "added"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["dropout", "zero head behind batch statistics", "functional dropout"])
def test_users_of_several_epochs_are_kept_apart(name, engine):
    assert_kept(Case(ZOO[name], engine, local=LocalSGD(lr=0.1, batch_size=3, epochs=2)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "local",
    [
        LocalSGD(0.1, 3, 2, momentum=0.9, weight_decay=0.1, proximal=0.3),
        LocalAdam(0.05, 3, 2, clip_norm=0.5, weight_decay=0.1),
    ],
    ids=["momentum", "adam"],
)
def test_users_are_kept_apart_by_other_optimisers_too(local, engine):
    assert_kept(Case(ZOO["dropout"], engine, local=local), ("first and largest user", "emptied"))


@pytest.mark.parametrize("engine", ENGINES)
def test_users_whose_ids_are_numbers_are_kept_apart(engine):
    assert_kept(Case(ZOO["dropout"], engine, numbered=True))


@cuda
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ON_GPU)
def test_users_on_a_gpu_are_kept_apart(name, engine):
    assert_kept(Case(ZOO[name], engine, device="cuda"), ("first and largest user removed", "NaN"))


def test_the_zoo_is_large_and_names_what_exists():
    assert len(ZOO) >= 60
    assert {*MUST_STACK, *BY_ITSELF, *BY_TWO, *BY_SINGLE_STEPS, *ON_GPU} <= set(ZOO)


@pytest.mark.parametrize("name", BY_SINGLE_STEPS)
def test_users_of_single_steps_are_kept_apart(name):
    """By the trainer that shares weights, where it takes the entry; one neighbour is gone, and one's data are bad."""
    case = Case(ZOO[name], AUTO, local=LocalSGD(lr=0.1, max_examples=1))
    assert_kept(case, ("first and largest user removed", "NaN"))
