"""Packages that add to clipline, made in a folder of their own with what an installer writes for them."""

import json
import re
import sys
import tomllib

import pytest
from samples import ROOT

from clipline import registry, task_named
from clipline.errors import RunError
from clipline.registry import BrokenPackageWarning
from clipline.tasks import task_entries, task_names


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a package's entry points into an environment; gives the folder for its modules."""
    site, before = tmp_path / "site", set(sys.modules)
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def make(package, **groups):
        about = site / f"{package}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"[clipline.{group}]\n" + "\n".join(map(" = ".join, one.items())) for group, one in groups.items()]
        (about / "entry_points.txt").write_text("\n\n".join(lines) + "\n")
        registry._registered.cache_clear()
        return site

    yield make
    registry._registered.cache_clear()
    for name in set(sys.modules) - before:
        if str(site) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_the_page_on_packages_makes_a_task_that_the_command_line_trains(clipline, install, tmp_path):
    page = (ROOT / "docs" / "reference" / "packages.md").read_text(encoding="utf-8")
    ((toml,), (entry, task)) = (
        re.findall(rf"^```{kind}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) for kind in ("toml", "python")
    )
    points = tomllib.loads(toml)["project"]["entry-points"]
    site = install("rides", **{group.removeprefix("clipline."): one for group, one in points.items()})
    (site / "rides").mkdir()
    (site / "rides" / "__init__.py").write_text(entry)
    (site / "rides" / "task.py").write_text(task)
    _, out, _ = clipline("tasks", "--json")
    listed = {one["name"]: one for one in json.loads(out)}
    assert (listed["rides"]["parameters"], listed["rides"]["data"]) == (2, "stand-in")
    assert "emnist_cr" in listed
    assert "rides.task" not in sys.modules
    out, _ = clipline.ok("train", "rides", "--out", "run", "--seed", 1, "--json")
    answer = json.loads(out)
    assert (answer["task"], answer["rounds"], answer["users"]) == ("rides", 2, 200)
    assert answer["metric_name"] == "squared_error"
    assert clipline("plan", "--model", "rides", "--users", 1000, "--cohort", 9, "--rounds", 2, "--epsilon", 2)[0] == 0
    parameters = sum(p.numel() for p in task_named("rides").load(task_named("rides").settings).make(0).parameters())
    assert parameters == listed["rides"]["parameters"]


def test_a_package_adds_a_command(clipline, install):
    site = install("greeter", commands={"hello": "greeter:hello", "train": "greeter:hello"})
    (site / "greeter.py").write_text(
        "import click\n\n@click.command()\ndef hello():\n"
        '    """Say hello.\n\n    More."""\n    click.echo("hello there")\n'
    )
    with pytest.warns(BrokenPackageWarning, match="'train' of clipline.commands in the package greeter has a name"):
        code, out, _ = clipline("--help")
    assert code == 0
    assert re.search(r"hello +Say hello\.\n", out)
    with pytest.warns(BrokenPackageWarning):
        assert clipline("hello") == (0, "hello there\n", "")
    with pytest.warns(BrokenPackageWarning):
        assert "did you mean 'hello'?" in clipline("hallo")[2]


def test_what_cannot_be_loaded_is_named_with_its_package_and_harms_nothing_else(clipline, install):
    install("sorry", tasks={"gone": "sorry.away:ONE"}, commands={"gone": "sorry.away:ONE"})
    told = (
        "'gone' of clipline.tasks in the package sorry cannot be loaded (ModuleNotFoundError: No module named 'sorry')"
    )
    with pytest.warns(BrokenPackageWarning, match=re.escape(told)):
        assert set(task_entries()) == set(task_names()) - {"gone"}
    err = clipline.refused("train", "gone")
    assert told in err
    assert "update that package, or uninstall it" in err
    out, _ = clipline.ok("--help")
    assert "in the package sorry" in " ".join(out.split())
    assert clipline("gone")[0] == 2
    assert task_named("handwriting").name == "handwriting"


def test_an_object_of_another_kind_or_name_is_refused(install):
    site = install("odd", tasks={"number": "odd:NUMBER", "renamed": "odd:RENAMED"})
    (site / "odd.py").write_text(
        "from dataclasses import replace\nfrom clipline.tasks import task_entry\n"
        "NUMBER = 1\nRENAMED = replace(task_entry('handwriting'), name='other', task='odd:missing')\n"
        "BROKEN = replace(RENAMED, name='broken')\n"
    )
    with pytest.raises(RunError, match="in the package odd is a int but must be a TaskEntry"):
        task_named("number")
    with pytest.raises(RunError, match="is the task 'other': give both one name"):
        task_named("renamed")
    install("odder", tasks={"broken": "odd:BROKEN"})
    with pytest.raises(
        RunError, match=r"task 'broken' cannot be loaded from 'odd:missing' \(AttributeError: .*package odd"
    ):
        task_named("broken")


def test_one_name_of_two_packages_is_nobodys_and_clipline_keeps_its_own(install):
    install("first", tasks={"same": "first:TASK"})
    install("second", tasks={"same": "second:TASK"})
    with pytest.raises(RunError, match=r"in the package first and in second stands more than once: uninstall all"):
        task_named("same")
    install("third", tasks={"handwriting": "third:TASK"})
    with pytest.warns(BrokenPackageWarning, match="in the package third has a name that clipline has itself"):
        assert task_named("handwriting").settings.cohort_size == 300


def test_clipline_works_where_no_package_adds_anything(clipline, monkeypatch):
    monkeypatch.setattr(registry, "_registered", lambda group: {})
    assert list(task_entries()) == ["handwriting"]
    assert clipline("data", "list")[1].startswith("table: your own")
    code, _, err = clipline("train", "emnist_cr")
    assert (code, err) == (2, "error: TASK 'emnist_cr' must be one of handwriting: take handwriting, say\n")
    assert "reproduce" not in clipline("--help")[1]
