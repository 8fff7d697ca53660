"""Generators that are not the engine's own: kept as they were, and begun anew by a key."""

import random

import numpy as np
import pytest
import torch

from clipline.engine.isolation.generators import (
    beginning,
    generators_state,
    preserve_generators,
    seed_global_generators,
)


def draw():
    return np.random.rand(), random.random()  # noqa: NPY002


@pytest.mark.parametrize("normals", [0, 1])  # of one NumPy keeps the second of a pair
def test_shared_generators_are_as_they_were_also_after_a_mistake(normals):
    np.random.seed(3)  # noqa: NPY002
    np.random.randn(normals)  # noqa: NPY002
    before = generators_state()

    def mistaken():
        with preserve_generators():
            draw()
            assert generators_state() != before
            raise KeyError

    with pytest.raises(KeyError):
        mistaken()
    assert generators_state() == before


def test_of_two_that_are_nested_the_outer_one_restores():
    before = generators_state()
    with preserve_generators():
        with preserve_generators():
            draw()
        assert generators_state() != before
        with preserve_generators():
            draw()
    assert generators_state() == before


def test_seeding_is_what_numpy_and_python_do_by_themselves():
    with preserve_generators():
        random.gauss(), np.random.randn()  # noqa: NPY002  # leave the second number of a pair behind
        seed_global_generators(2**62 + 5)
        ours = generators_state(), random.gauss(), np.random.randn()  # noqa: NPY002
        random.seed(2**62 + 5)
        np.random.seed(5)  # noqa: NPY002  # the lower 32 bits
        assert ours == (generators_state(), random.gauss(), np.random.randn())  # noqa: NPY002


def test_a_caller_may_have_given_numpys_generator_other_bits():
    before, others = np.random.get_bit_generator(), np.random.PCG64(5)
    try:
        np.random.set_bit_generator(others)
        state = others.state
        with preserve_generators():
            seed_global_generators(3)
            draw()
        assert np.random.get_bit_generator() is others
        assert others.state == state
    finally:
        np.random.set_bit_generator(before)


def test_what_was_drawn_within_one_is_not_found_within_the_next():
    with preserve_generators():
        first = np.random.rand()  # noqa: NPY002
    with preserve_generators():
        assert np.random.rand() == first  # noqa: NPY002


HELD = {
    "torch's": (torch.Generator(), lambda held: torch.rand(3, generator=held).tolist()),
    "Python's": (random.Random(), lambda held: held.random()),
    "NumPy's old": (np.random.RandomState(), lambda held: held.rand(3).tolist()),
    "NumPy's": (np.random.default_rng(), lambda held: held.random(3).tolist()),
    "NumPy's bits": (np.random.Philox(), lambda held: held.random_raw(3).tolist()),
}


@pytest.mark.parametrize(("held", "draw_from"), HELD.values(), ids=HELD)
def test_a_generator_that_a_model_holds_begins_anew_by_its_key(held, draw_from):
    begin = beginning(held)
    drawn = []
    for key in (3, 2**62 + 1, 3):
        begin(key)
        drawn.append(draw_from(held))
    assert drawn[0] == drawn[2] != drawn[1]
    assert [beginning(other) for other in (None, 3, torch.zeros(2), random, np.random)] == [None] * 5
