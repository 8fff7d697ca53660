"""Things that can change, as they were: each says whether it is still the same, and can be put back."""

import threading
import types
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from clipline.engine.isolation.snapshots import (
    SHORT,
    Attribute,
    Cell,
    ClassAttributes,
    Constant,
    Container,
    Global,
    Slot,
    ThreadLocal,
    checksum,
    only_equal_values,
    set_version_counters,
)

CONTAINERS = {
    "an entry more in a list": ([1, 2], lambda now: now.append(3)),
    "an entry less in a list": ([1, 2], lambda now: now.pop()),
    "another order": ([1, 2], lambda now: now.reverse()),
    "an entry more in a dictionary": ({"a": 1}, lambda now: now.update(b=2)),
    "another entry of a dictionary": ({"a": []}, lambda now: now.update(a=[])),
    "another order of a dictionary": ({"a": 1, "b": 2}, lambda now: now.update(a=now.pop("a"))),
    "an entry more in a set": ({1}, lambda now: now.add(2)),
    "an entry more in a deque": (deque([1]), lambda now: now.append(2)),
    "another byte": (bytearray(b"ab"), lambda now: now.__setitem__(0, 99)),
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


def test_some_entries_of_a_dictionary_may_change():
    now = {"a": 1, "clock": 0}
    kept = Container("kept", now, skipped=["clock"])
    now["clock"] = 5
    assert kept.same()
    now["a"] = 2
    assert not kept.same()
    kept.restore()
    assert now == {"a": 1, "clock": 5}


def test_variables_of_a_thread_are_those_of_the_thread_that_asks():
    local = threading.local()
    local.seen = 0
    kept = ThreadLocal("kept", local)
    other = threading.Thread(target=lambda: setattr(local, "seen", 9))
    other.start()
    other.join()
    assert kept.same()
    local.seen = 1
    assert not kept.same()
    kept.restore()
    assert local.seen == 0


def test_a_variable_of_a_function_and_one_that_is_not_there_yet():
    seen = []

    def uses():
        return seen, later

    cells = dict(zip(uses.__code__.co_freevars, uses.__closure__, strict=True))
    kept = {name: Cell(name, cell) for name, cell in cells.items()}
    seen, later = [1], 5
    assert not kept["seen"].same()
    assert not kept["later"].same()
    kept["seen"].restore()
    kept["later"].restore()
    assert kept["seen"].same()
    assert kept["later"].same()
    assert cells["seen"].cell_contents == []
    with pytest.raises(ValueError, match="empty"):
        _ = cells["later"].cell_contents
    later = 5
    assert uses() == ([], 5)


def test_a_global_variable_and_one_that_is_not_there_yet():
    namespace = {"old": 1}
    kept = [Global(name, namespace, name) for name in ("old", "new")]
    namespace.update(old=2, new=3)
    assert [one.same() for one in kept] == [False, False]
    for one in kept:
        one.restore()
    assert namespace == {"old": 1}
    kept[1].restore()  # nothing to take out
    assert [one.same() for one in kept] == [True, True]


class Slots:
    __slots__ = ("empty", "full")

    def __setattr__(self, name, value):
        raise AttributeError("frozen")


def test_a_slot_is_put_back_past_what_a_frozen_class_forbids():
    owner = Slots()
    Slots.full.__set__(owner, 1)
    kept = [Slot(name, owner, getattr(Slots, name)) for name in ("full", "empty")]
    Slots.full.__set__(owner, 2)
    Slots.empty.__set__(owner, 3)
    assert [one.same() for one in kept] == [False, False]
    for one in kept:
        one.restore()
    assert owner.full == 1
    assert not hasattr(owner, "empty")


class Plain:
    pass


class Other(Plain):
    pass


@pytest.mark.parametrize(("name", "other"), [("__dict__", {"seen": 1}), ("__class__", Other)])
def test_another_dictionary_or_class_of_an_object_is_seen_and_put_back(name, other):
    owner = Plain()
    owner.seen = 0
    kept = Attribute("kept", owner, name)
    assert kept.same()
    setattr(owner, name, other)
    assert not kept.same()
    kept.restore()
    assert kept.same()
    assert (type(owner), owner.seen) == (Plain, 0)


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


def test_the_last_attribute_of_a_class_under_another_name_is_seen():
    owner = type("Class", (), {})
    owner.a = 1
    kept = ClassAttributes("kept", owner)
    del owner.a
    owner.b = 1
    assert not kept.same()


class Own(nn.Parameter):
    pass


TENSORS = {
    "a number": (torch.zeros(3), lambda now: now.__setitem__(1, 1.0)),
    "the sign of zero": (torch.zeros(3), lambda now: now.neg_()),
    "past torch's count of changes": (torch.zeros(3), lambda now: now.data.add_(1.0)),
    "a gradient": (torch.zeros(3, requires_grad=True), lambda now: setattr(now, "grad", torch.ones(3))),
    "that a gradient is asked for": (torch.zeros(3), lambda now: now.requires_grad_()),
    "that a computation made it": (torch.zeros(3), lambda now: now.add_(0.0 * torch.ones(3, requires_grad=True))),
    "memory for other processes": (torch.zeros(3), lambda now: now.share_memory_()),
    "a number beside a view": (torch.zeros(4)[:3], lambda now: now.as_strided((1,), (1,), 3).fill_(1.0)),
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


@pytest.mark.filterwarnings("ignore")  # torch calls one of these new, and one old
def test_the_parts_of_sparse_and_quantised_tensors_are_compared_and_put_back():
    sparse = torch.eye(3).to_sparse()
    rows = torch.eye(3).to_sparse_csr()
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    kept = [Constant("kept", one) for one in (sparse, rows, quantised)]
    assert [one.same() for one in kept] == [True] * 3
    sparse._values().zero_()
    rows.values()[0] = 2.0
    quantised.data.copy_(torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8))
    assert [one.same() for one in kept] == [False] * 3
    for one in kept:
        one.restore()
    assert [one.same() for one in kept] == [True] * 3
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    assert torch.equal(rows.to_dense(), torch.eye(3))
    assert quantised.dequantize().tolist() == pytest.approx([1.0] * 3)


def test_what_is_not_a_number_is_like_itself():
    kept = Constant("kept", torch.full((2,), torch.nan))
    assert kept.same()
    kept.now[0] = 0.0
    assert not kept.same()


def test_of_a_very_large_tensor_or_array_a_checksum_is_compared_however_it_is_written(monkeypatch):
    monkeypatch.setattr("clipline.engine.isolation.snapshots._COPIED", 8)
    monkeypatch.setattr("clipline.engine.isolation.snapshots._CHUNK_ON_DEVICE", 32)
    tensor, array = torch.zeros(9), np.zeros((3, 3))
    fixed = np.arange(9.0)
    fixed.flags.writeable = False
    kept = [Constant("tensor", tensor), Constant("array", array), Constant("by columns", array.T), Constant("", fixed)]
    assert [one.before for one in kept] == [None] * 4  # no copy is held, and so a change cannot be undone
    assert all(one.same() and one.lost for one in kept)
    tensor.data[8], array[2, 2] = 1.0, 1.0  # past torch's count of changes
    assert tensor._version == kept[0].version
    assert [one.same() for one in kept] == [False, False, False, True]


def test_a_write_of_what_was_there_already_is_seen_by_torchs_count_alone():
    kept = Constant("kept", torch.ones(3))
    kept.now.mul_(1.0)
    assert kept.same()
    assert kept.written()
    set_version_counters((kept.now,), (kept.version,))
    assert not kept.written()


def test_equal_numbers_and_text_in_the_place_of_others_are_no_change():
    big = 10**6
    kept = Container("kept", now := {"size": big, "name": "a b"})
    now["size"] = int("1000000")
    assert not kept.same()
    assert only_equal_values(kept)
    now["size"] = 1000000.0
    assert not only_equal_values(kept)
    now["size"] = big + 1
    assert not only_equal_values(kept)
    assert not only_equal_values(Container("list", [1]))


LONG = SHORT // 4 + 3  # float32 numbers, just too many to be copied


@pytest.mark.parametrize("change", [lambda now: now.data.neg_(), lambda now: now.requires_grad_()])
@pytest.mark.parametrize("make", [nn.Parameter, Own])
@pytest.mark.parametrize("size", [3, LONG])
def test_a_shared_parameter_of_any_class_is_compared(size, make, change):
    constant = Constant("base", make(torch.ones(size, dtype=torch.float64), requires_grad=False), shared=True)
    assert constant.same()
    assert not constant.touched()
    change(constant.now)  # in an even number of places, or in none
    assert not constant.same()


@pytest.mark.parametrize("size", [3, LONG])
def test_a_shared_tensor_is_put_back_in_the_callers_memory_or_known_to_be_lost(size):
    callers = torch.arange(float(size))
    constant = Constant("base", callers.detach(), shared=True)
    assert constant.same()
    assert constant.lost == (size == LONG)  # no copy of a long one is held
    assert (constant.before is None) == (size == LONG)
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


def test_a_checksum_tells_zeros_apart_by_their_number():
    assert len({checksum(torch.zeros(size, dtype=torch.uint8)) for size in range(20)}) == 20


def test_a_checksum_depends_on_the_place_over_all_chunks():
    found = set()
    for place in range(0, 600_000, 20_000):
        words = torch.zeros(600_000, dtype=torch.int64)
        words[place] = 1
        found.add(checksum(words))
    assert len(found) == 30
