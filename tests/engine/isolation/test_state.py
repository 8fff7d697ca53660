"""State is found where people put it, compared, and put back."""

import functools
import statistics
import sys
import types
from collections import OrderedDict, deque

import pytest
import torch
from samples import cross_entropy, one_by_one, population_of
from torch import nn

from clipline import LocalSGD
from clipline.engine.isolation import state
from clipline.engine.isolation.state import ClassAttributes, ClosureCell, Container, Global, from_library
from clipline.random.streams import Streams

pytestmark = pytest.mark.filterwarnings("ignore::clipline.engine.core.one_by_one.RetainedStateWarning")


def test_a_tensor_that_vmap_has_left_behind_ends_no_training():
    kept = []
    torch.vmap(lambda row: kept.append(row) or row)(torch.ones(2, 3))

    def loss(model, batch):
        return cross_entropy(model, batch) + 0 * len(kept)

    one_by_one(nn.Linear(6, 3).double(), loss, population_of([2]), LocalSGD(0.1), Streams(0))


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


def test_a_file_of_the_callers_with_the_name_of_one_of_pythons_is_the_callers(monkeypatch):
    for file, expected in (("/home/me/project/this.py", False), (statistics.__file__, True)):
        module_at(monkeypatch, "this", file)  # which nobody imports
        assert state._is_library.__wrapped__("this") == expected


def test_what_is_installed_for_a_user_or_the_system_is_a_librarys(monkeypatch):
    for folder in ("/home/me/.local/lib/python3.12/site-packages", "/usr/lib/python3/dist-packages"):
        module_at(monkeypatch, "somebodys", f"{folder}/somebodys/__init__.py")
        assert state._is_library.__wrapped__("somebodys")
    module_at(monkeypatch, "somebodys", "/home/me/my_project/somebodys/__init__.py")
    assert not state._is_library.__wrapped__("somebodys")


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
