"""Weights of which each user touches few rows: how many others touch, and how, reaches nobody."""

import numpy as np
import pytest
from adversarial.kept import AUTO, ENGINES, assert_kept, cuda
from adversarial.neighbours import Case, everybody
from adversarial.zoo import ROWS, ZOO

ON_GPU = ["bag linear", "mean of the weight as penalty"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", [entry.name for entry in ROWS])
def test_users_who_touch_few_rows_are_kept_apart_or_the_model_is_refused(name, engine):
    assert_kept(Case(ZOO[name], engine))


@pytest.mark.parametrize("name", ["bag linear", "bag and embedding by one user alone"])
def test_users_who_touch_few_rows_are_kept_apart_whichever_engine_is_chosen(name):
    assert_kept(Case(ZOO[name], AUTO))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["bag linear", "written in place"])
def test_users_of_two_workers_who_touch_few_rows_are_kept_apart(name, engine):
    assert_kept(Case(ZOO[name], engine, workers=2), ("first and largest user removed", "NaN"))


@cuda
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ON_GPU)
def test_users_on_a_gpu_who_touch_few_rows_are_kept_apart(name, engine):
    assert_kept(Case(ZOO[name], engine, device="cuda"), ("first and largest user removed", "NaN"))


def test_the_largest_user_touches_more_rows_than_all_others_together():
    rows = {name: set(np.unique(user["words"])) for name, user in everybody("words").items()}
    others = set().union(*(own for name, own in rows.items() if name != "a"))
    assert len(rows["a"]) > 256 > len(others)  # 256 is the room that a stack gives a user at least
