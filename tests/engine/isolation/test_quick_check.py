"""One comparison for many snapshots says what they say one by one."""

from collections import OrderedDict, deque

import pytest

from clipline.engine.isolation.quick_check import QuickCheck
from clipline.engine.isolation.snapshots import Attribute, ClassAttributes, ClosureCell, Container, Global

CHANGES = {
    "an entry more in a list": ([1, 2], lambda now: now.append(3)),
    "another order": ([1, 2], lambda now: now.reverse()),
    "an entry less in a dictionary": ({"a": 1, "b": 2}, lambda now: now.popitem()),
    "an equal entry of a dictionary": ({"a": []}, lambda now: now.update(a=[])),
    "another name in a dictionary": ({"a": 1}, lambda now: now.update(b=now.pop("a"))),
    "another order of a dictionary": (OrderedDict(a=1, b=1), lambda now: now.move_to_end("a")),
    "an entry more in a set": ({1}, lambda now: now.add(2)),
    "an entry more in a deque": (deque([1]), lambda now: now.append(2)),
    "another byte": (bytearray(b"ab"), lambda now: now.__setitem__(0, 99)),
}


class Plain:
    full = 3


def others():
    """Something of every kind of snapshot, none of which changes."""
    namespace = {"a": 1}

    def function():
        return namespace

    return [
        Container("a dictionary", {"a": 1, "b": [2]}),
        Container("some entries", {"a": 1, "clock": 2}, skipped=["clock"]),
        Container("bytes", bytearray(b"ab")),
        ClosureCell("a variable", function.__closure__[0]),
        Global("a global variable", namespace, "a"),
        Attribute("code", function, "__code__"),
        ClassAttributes("a class", Plain),
    ]


@pytest.mark.parametrize("place", [0, 4, 7])
@pytest.mark.parametrize(("before", "change"), CHANGES.values(), ids=CHANGES)
def test_a_container_that_changes_among_others_is_seen(before, change, place):
    now, snapshots = before.copy(), others()
    snapshots.insert(place, Container("the one", now))
    check = QuickCheck(snapshots)
    assert check.passes()
    change(now)
    assert not check.passes()
    snapshots[place].restore()
    assert check.passes()


def test_a_single_value_that_changes_is_seen():
    namespace = {"a": 1}
    check = QuickCheck([*others(), Global("the one", namespace, "a"), Global("not there", namespace, "b")])
    assert check.passes()
    namespace["b"] = 2
    assert not check.passes()
    del namespace["b"]
    namespace["a"] = 1.0  # equal, and another object
    assert not check.passes()


def test_entries_that_move_to_the_next_container_are_seen():
    entry, first, second = object(), [], []
    first.append(entry)
    check = QuickCheck([Container("first", first), Container("second", second)])
    assert check.passes()
    second.append(first.pop())
    assert not check.passes()


def test_a_dictionary_that_shows_other_entries_than_it_has_does_not_hide_a_change():
    class Shy(dict):
        def values(self):
            return []

    now = Shy(a=1)
    snapshot = Container("shy", now)
    assert QuickCheck([snapshot]).passes() == snapshot.same()
    assert not snapshot.live_views()
