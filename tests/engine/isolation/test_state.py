"""State is found where people put it, compared, and put back."""

import functools
import statistics
import sys
import types
from collections import deque

import numpy as np
import pytest
import torch
from samples import cross_entropy, one_by_one, population_of, rows_of
from torch import nn

from clipline import LocalSGD
from clipline.engine.isolation import state
from clipline.engine.isolation.state import (
    SHORT,
    ClassAttributes,
    Constant,
    Container,
    checksum,
    from_library,
)
from clipline.random.streams import Streams

pytestmark = pytest.mark.filterwarnings("ignore::clipline.engine.core.one_by_one.RetainedStateWarning")


def test_a_tensor_that_vmap_has_left_behind_ends_no_training():
    kept = []
    torch.vmap(lambda row: kept.append(row) or row)(torch.ones(2, 3))

    def loss(model, batch):
        return cross_entropy(model, batch) + 0 * len(kept)

    engine = one_by_one(nn.Linear(6, 3).double(), loss, population_of([2]), LocalSGD(0.1), Streams(0))
    assert rows_of(engine, np.arange(1)).any()


CONTAINERS = {
    "an entry more in a list": ([1, 2], lambda now: now.append(3)),
    "an entry less in a list": ([1, 2], lambda now: now.pop()),
    "another order": ([1, 2], lambda now: now.reverse()),
    "an entry more in a dictionary": ({"a": 1}, lambda now: now.update(b=2)),
    "another entry of a dictionary": ({"a": []}, lambda now: now.update(a=[])),
    "another order of a dictionary": ({"a": 1, "b": 2}, lambda now: now.update(a=now.pop("a"))),
    "an entry more in a set": ({1}, lambda now: now.add(2)),
    "an entry more in a deque": (deque([1]), lambda now: now.append(2)),
}


@pytest.mark.parametrize(("now", "change"), CONTAINERS.values(), ids=CONTAINERS)
def test_a_container_that_changes_is_seen_and_put_back(now, change):
    before = now.copy()
    kept = Container("kept", now)
    assert kept.same()
    change(now)
    assert not kept.same()
    kept.restore()
    assert kept.same()
    assert now == before
    assert list(now) == list(before)


@pytest.mark.parametrize("make", [lambda: type("Class", (), {"a": 1, "b": 2}), lambda: types.ModuleType("module")])
def test_attributes_of_a_class_or_a_module(make):
    owner = make()
    owner.a, owner.b = 1, 2
    kept = ClassAttributes("kept", owner)
    owner.a, owner.c = 5, 6
    del owner.b
    assert not kept.same()
    kept.restore()
    assert (owner.a, owner.b) == (1, 2)
    assert not hasattr(owner, "c")
    del owner.b
    owner.c = 2  # as many as before
    assert not kept.same()


def test_equal_numbers_and_text_in_the_place_of_others_are_no_change():
    big = 10**6
    kept = Container("kept", now := {"size": big, "name": "a b"})
    now["size"] = int("1000000")
    assert not kept.same()
    assert kept.only_equal_values()
    now["size"] = 1000000.0
    assert not kept.only_equal_values()
    now["size"] = big + 1
    assert not kept.only_equal_values()
    assert not Container("list", [1]).only_equal_values()


def module_at(monkeypatch, name, file):
    module = types.ModuleType(name)
    module.__file__ = file
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize(
    ("name", "file", "is_library"),
    [
        ("this", "/home/me/project/this.py", False),  # the name of one of Python's
        ("this", statistics.__file__, True),
        ("somebodys", "/home/me/.local/lib/python3.12/site-packages/somebodys/__init__.py", True),
        ("somebodys", "/usr/lib/python3/dist-packages/somebodys/__init__.py", True),
        ("somebodys", "/home/me/my_project/somebodys/__init__.py", False),
    ],
)
def test_what_is_installed_is_a_librarys_and_a_file_of_the_callers_is_not(monkeypatch, name, file, is_library):
    module_at(monkeypatch, name, file)
    assert state._is_library.__wrapped__(name) == is_library


@pytest.fixture
def in_site_packages(monkeypatch):
    """A module of a package that is installed, with a loss; forgotten at the end."""
    monkeypatch.setattr(state, "_callers", set())
    module = module_at(monkeypatch, "company_models.losses", "/usr/lib/python3/dist-packages/company_models/losses.py")
    exec("def loss(model, batch): ...\nclass Loss:\n    def of(self, model, batch): ...", vars(module))
    yield module
    state._is_library.cache_clear()


@pytest.mark.parametrize("form", ["function", "partial", "method", "object"])
def test_an_installed_package_that_the_loss_came_from_is_the_callers(in_site_packages, form):
    loss, of_class = in_site_packages.loss, in_site_packages.Loss()
    assert from_library(loss)
    forms = {"function": loss, "partial": functools.partial(loss, 1), "method": of_class.of, "object": of_class}
    state._add_caller(forms[form])
    assert not from_library(loss)
    assert not from_library(in_site_packages.Loss)


# Tensors and arrays ---------------------------------------------------------------------------------------------------


class Own(nn.Parameter):
    pass


TENSORS = {
    "a number": (torch.zeros(3), lambda now: now.__setitem__(1, 1.0)),
    "the sign of zero": (torch.zeros(3), lambda now: now.neg_()),
    "past torch's count of changes": (torch.zeros(3), lambda now: now.data.add_(1.0)),
    "a gradient": (torch.zeros(3, requires_grad=True), lambda now: setattr(now, "grad", torch.ones(3))),
    "that a gradient is asked for": (torch.zeros(3), lambda now: now.requires_grad_()),
    "that a computation made it": (torch.zeros(3), lambda now: now.add_(0.0 * torch.ones(3, requires_grad=True))),
    "other strides": (torch.zeros(3, 3), lambda now: setattr(now, "data", now.data.t())),
    "a parameter of a class of one's own": (Own(torch.zeros(3), False), lambda now: now.data.add_(1.0)),
    "a number of an array": (np.zeros(3), lambda now: now.__setitem__(1, 1.0)),
}


@pytest.mark.parametrize(("now", "change"), TENSORS.values(), ids=TENSORS)
def test_a_tensor_or_array_that_changes_is_seen_and_put_back_to_the_last_bit(now, change):
    kept = Constant("kept", now)
    assert kept.same()
    assert not kept.touched()
    change(now)
    assert kept.touched()
    assert not kept.same()
    kept.restore()
    assert kept.same()
    assert not now.any()
    assert not np.signbit(np.asarray(now.detach() if isinstance(now, torch.Tensor) else now)).any()


@pytest.mark.filterwarnings("ignore")  # torch calls one of these new
def test_the_parts_of_sparse_tensors_are_compared_and_put_back():
    sparse, rows = torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
    kept = [Constant("kept", one) for one in (sparse, rows)]
    assert [one.same() for one in kept] == [True] * 2
    sparse._values().zero_()
    rows.values()[0] = 2.0
    assert [one.same() for one in kept] == [False] * 2
    for one in kept:
        one.restore()
    assert [one.same() for one in kept] == [True] * 2
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    assert torch.equal(rows.to_dense(), torch.eye(3))


def test_what_is_not_a_number_is_like_itself_and_a_write_of_what_was_there_is_no_change():
    kept = Constant("kept", torch.full((SHORT,), torch.nan))
    kept.now.mul_(1.0)
    assert kept.same()
    assert not kept.touched()
    kept.now[0] = 0.0
    assert not kept.same()


def test_of_a_very_large_tensor_or_array_a_checksum_is_compared_however_it_is_written(monkeypatch):
    monkeypatch.setattr("clipline.engine.isolation.state._COPIED", 8)
    monkeypatch.setattr("clipline.engine.isolation.state._CHUNK_ON_DEVICE", 32)
    tensor, array = torch.zeros(9), np.zeros((3, 3))
    fixed = np.arange(9.0)
    fixed.flags.writeable = False
    kept = [Constant("tensor", tensor), Constant("array", array), Constant("by columns", array.T), Constant("", fixed)]
    assert all(one.same() and one.lost for one in kept)  # no copy is held, and so a change cannot be undone
    tensor.data[8], array[2, 2] = 1.0, 1.0  # past torch's count of changes
    assert [one.same() for one in kept] == [False, False, False, True]


LONG = SHORT // 4 + 3  # float32 numbers, just too many to be copied


@pytest.mark.parametrize("size", [3, LONG])
def test_a_shared_tensor_is_put_back_in_the_callers_memory_or_known_to_be_lost(size):
    callers = torch.arange(float(size))
    constant = Constant("base", callers.detach(), shared=True)
    assert constant.same()
    assert constant.lost == (size == LONG)  # no copy of a long one is held
    constant.now.data[1] = 9.0  # past the version counter
    assert not constant.same()
    constant.restore()
    assert callers[1] == (9.0 if size == LONG else 1.0)
    assert constant.now.data_ptr() == callers.data_ptr()


def test_a_shared_tensor_with_other_memory_has_changed_and_is_given_back():
    callers = torch.arange(float(LONG))
    constant = Constant("base", callers.detach(), shared=True)
    constant.now.data = callers.clone()
    assert not constant.same()
    constant.restore()
    assert constant.same()
    assert constant.now.data_ptr() == callers.data_ptr()


def test_a_checksum_notices_one_bit_a_swap_and_the_place_and_holds_for_every_size():
    values = torch.arange(3_000_001, dtype=torch.uint8)  # not a whole number of words
    before = checksum(values)
    assert before == checksum(values.clone())
    for place in (0, 7, 2_999_999, 3_000_000):
        changed = values.clone()
        changed[place] ^= 1
        assert checksum(changed) != before
    words = torch.arange(1_500_000)
    swapped = words.clone()
    swapped[[0, 1_400_000]] = swapped[[1_400_000, 0]]  # in different chunks
    assert checksum(swapped) != checksum(words)
    assert checksum(words[1:]) == checksum(words[1:].clone())
    assert checksum(words.to(torch.int8)[1:]) == checksum(words.to(torch.int8)[1:].clone())  # not aligned


def test_in_a_checksum_changes_of_the_highest_bits_do_not_cancel():
    words = torch.arange(600_000)  # several chunks
    before, top = checksum(words), torch.iinfo(torch.int64).min
    for places in ([0, 1], [0, 131_072], [5, 599_999], [0, 1, 2, 3], slice(None), slice(1, None, 2)):
        changed = words.clone()
        changed[places] ^= top
        assert checksum(changed) != before
    numbers = torch.full((40_000,), 0.01, dtype=torch.float64)
    assert checksum(-numbers) != checksum(numbers)


def test_a_checksum_depends_on_the_number_of_zeros_and_on_the_place_over_all_chunks():
    assert len({checksum(torch.zeros(size, dtype=torch.uint8)) for size in range(20)}) == 20
    words = torch.zeros(600_000, dtype=torch.int64)
    found = set()
    for place in range(0, 600_000, 20_000):
        words[place] = 1
        found.add(checksum(words))
        words[place] = 0
    assert len(found) == 30
