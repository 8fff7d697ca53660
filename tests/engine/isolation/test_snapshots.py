"""Things that can change, as they were: each says whether it is still the same, and can be put back."""

import types
from collections import OrderedDict, deque

import pytest

from clipline.engine.isolation.snapshots import (
    Attribute,
    ClassAttributes,
    ClosureCell,
    Container,
    Global,
    only_equal_values,
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


class HandsOutInstances(OrderedDict):
    def __getitem__(self, key):
        return super().__getitem__(key)()


class Hidden(list):
    def __iter__(self):
        return iter(())

    def clear(self):
        raise NotImplementedError


def test_a_container_that_shows_something_else_than_it_holds_is_put_back_to_what_it_holds():
    classes, entries = HandsOutInstances(a=dict, b=list), Hidden([1, 2])
    kept = [Container("classes", classes), Container("entries", entries)]
    assert all(one.same() for one in kept)
    OrderedDict.update(classes, c=set)
    entries.append(3)
    assert not any(one.same() for one in kept)
    for one in kept:
        one.restore()
    assert list(OrderedDict.items(classes)) == [("a", dict), ("b", list)]
    assert list(list.__iter__(entries)) == [1, 2]
    assert type(classes["a"]) is dict


def test_some_entries_of_a_dictionary_may_change():
    now = {"a": 1, "clock": 0}
    kept = Container("kept", now, skipped=["clock"])
    now["clock"] = 5
    assert kept.same()
    now["a"] = 2
    assert not kept.same()
    kept.restore()
    assert now == {"a": 1, "clock": 5}


def test_a_variable_of_a_function_and_one_that_is_not_there_yet():
    seen = []

    def uses():
        return seen, later

    cells = dict(zip(uses.__code__.co_freevars, uses.__closure__, strict=True))
    kept = {name: ClosureCell(name, cell) for name, cell in cells.items()}
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
