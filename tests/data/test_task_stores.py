import numpy as np
import pytest

from clipline import SettingError, task_named
from clipline.data.store import write_store
from clipline.data.task_stores import find_store
from clipline.errors import PopulationError


def write(folder, users=4, **changes):
    facts = {"source": "by hand", "tasks": ["so_nwp", "so_lr"], "origin": "substitute", **changes}
    for split, count in (("train", users), ("test", 2)):
        ids = np.repeat(np.arange(count), 2)
        tokens = np.ones((2 * count, 21), np.int16)
        write_store(folder / split, [(ids, {"tokens": tokens, "other": ids})], known_users=range(count), **facts)
    return folder


def test_the_numbers_of_users_are_those_of_the_store_unless_one_is_declared(tmp_path):
    task = task_named("so_nwp")
    mine = task.settings.overridden({"data": str(write(tmp_path / "s")), "cohort_size": 3}, "here")
    assert (mine.population_size, mine.declared_size, mine.test_users) == (None, None, None)
    assert task.training(mine).algorithm.sampler.population_size == 4
    declared = mine.overridden({"population_size": 5}, "here")
    assert task.training(declared).algorithm.sampler.population_size == 5
    other = declared.overridden({"data": str(tmp_path / "s")}, "here")  # perhaps other data: not declared for them
    assert other.population_size is None
    with pytest.raises(SettingError, match=r"cohort_size=100 must be at most the population, 4 users"):
        task.training(task.settings.overridden({"data": str(tmp_path / "s")}, "here"))


def test_a_task_takes_its_own_fields_and_no_others(tmp_path):
    task = task_named("so_nwp")
    settings = task.settings.overridden({"data": str(write(tmp_path / "s")), "cohort_size": 2, "rounds": 1}, "here")
    loaded = task.load(settings)
    assert list(loaded.population.fields) == ["tokens"]
    assert (len(loaded.population), loaded.population.examples) == (4, 8)
    with pytest.raises(PopulationError, match="no field 'words' but tokens, other"):
        task_named("so_lr").load(
            task_named("so_lr").settings.overridden({"data": settings.data, "cohort_size": 2}, "here")
        )


def test_a_number_of_test_users_is_refused_with_a_store_however_the_settings_were_made(tmp_path):
    import dataclasses

    task = task_named("so_nwp")
    with pytest.raises(SettingError, match=r"test_users=40 must be left out where data are stored"):
        dataclasses.replace(task.settings, data=str(write(tmp_path / "s")))


def test_a_store_is_found_in_a_home_only_where_there_is_one(tmp_path):
    (tmp_path / "so_nwp").mkdir()  # an empty folder of that name is nobody's store
    assert find_store("so_nwp", tmp_path) is None
    write(tmp_path / "stackoverflow")
    assert find_store("so_nwp", tmp_path) == find_store("so_lr", tmp_path) == tmp_path / "stackoverflow"
    assert find_store("handwriting", tmp_path) is None
