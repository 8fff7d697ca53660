import shutil
from dataclasses import replace

import pytest
from samples import small_population
from study_task import tiny_task

from clipline.study.record import GENERATED, data_checksum


def checksum(data):
    return data_checksum(replace(tiny_task().settings, data=str(data), population_size=None))


@pytest.fixture
def stores(tmp_path):
    small_population(8, seed=0).save(tmp_path / "a" / "train")
    small_population(8, seed=1).save(tmp_path / "a" / "test")
    return tmp_path / "a"


def test_generated_users_follow_from_the_settings():
    assert data_checksum(tiny_task().settings) == GENERATED


def test_the_same_data_elsewhere_have_the_same_checksum(stores, tmp_path):
    shutil.copytree(stores, tmp_path / "b")
    (tmp_path / "b" / "train" / ".DS_Store").touch()
    assert checksum(stores) == checksum(tmp_path / "b")
    assert len(checksum(stores)) == 64


def test_other_data_have_another(stores, tmp_path):
    shutil.copytree(stores, tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "test")
    assert checksum(stores) != checksum(tmp_path / "b")  # others to measure on
    (stores / "train").rename(stores / "x")
    (stores / "test").rename(stores / "train")
    before = checksum(stores)
    (stores / "x").rename(stores / "test")
    assert checksum(stores) != before
    one_store = checksum(stores / "train")
    assert one_store not in (before, checksum(stores))


def test_a_table_counts_by_its_content(tmp_path):
    for name, text in (("a.csv", "user,x\n1,2\n"), ("b.csv", "user,x\n1,2\n"), ("c.csv", "user,x\n1,3\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    a, b, c = (checksum(tmp_path / name) for name in ("a.csv", "b.csv", "c.csv"))
    assert a == b != c
