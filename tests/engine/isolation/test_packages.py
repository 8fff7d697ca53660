"""What is the caller's is looked at, wherever it is installed; what is a library's is not."""

import functools
import statistics
import sys
import types

import pytest

from clipline.engine.isolation import packages
from clipline.engine.isolation.packages import (
    add_caller,
    from_installed,
    installed,
    installed_folders,
)


def module_at(monkeypatch, name, file):
    module = types.ModuleType(name)
    module.__file__ = file
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_a_file_of_the_callers_with_the_name_of_one_of_pythons_is_the_callers(monkeypatch):
    for file, expected in (("/home/me/project/this.py", False), (statistics.__file__, True)):
        module_at(monkeypatch, "this", file)  # which nobody imports
        assert from_installed.__wrapped__("this") == expected


def test_libraries_count_as_installed_wherever_python_finds_them():
    user, system = "/home/me/.local/lib/python3.12/site-packages", "/usr/lib/python3/dist-packages"
    found = installed_folders(["", "/home/me/my_project", user, "/usr/lib/python3.12", system])
    assert {user, system} < set(found)
    assert not any(folder in ("", "/home/me/my_project", "/usr/lib/python3.12") for folder in found)


@pytest.fixture
def in_site_packages(monkeypatch):
    """A module of a package that is installed, with a loss; forgotten at the end."""
    folder = packages._INSTALLED[0]
    monkeypatch.setattr(packages, "_callers", set())
    module = module_at(monkeypatch, "company_models.losses", f"{folder}/company_models/losses.py")
    exec("def loss(model, batch): ...\nclass Loss:\n    def of(self, model, batch): ...", vars(module))
    yield module
    from_installed.cache_clear()


@pytest.mark.parametrize("form", ["function", "partial", "method", "object"])
def test_an_installed_package_that_the_loss_came_from_is_the_callers(in_site_packages, form):
    loss, of_class = in_site_packages.loss, in_site_packages.Loss()
    assert installed(loss)
    forms = {"function": loss, "partial": functools.partial(loss, 1), "method": of_class.of, "object": of_class}
    add_caller(forms[form])
    assert not installed(loss)
    assert not installed(in_site_packages.Loss)
