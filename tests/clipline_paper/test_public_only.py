"""The paper's package is written with clipline's public names: what it needs, anybody's package can have."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from samples import ROOT

PAPER = sorted((ROOT / "src" / "clipline_paper").rglob("*.py"))
PUBLIC = {  # docs/reference/packages.md lists these
    "clipline", "clipline.cli", "clipline.data", "clipline.errors", "clipline.federated", "clipline.layers",
    "clipline.plotting", "clipline.privacy", "clipline.random", "clipline.settings", "clipline.study",
    "clipline.tasks",
}  # fmt: skip


def imports(path):
    """Module and name of every import in a file, wherever it stands; relative ones are left out."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.relative_to(ROOT / "src").as_posix())
def test_the_papers_package_imports_public_names_only(path):
    for module, name in imports(path):
        if module.split(".")[0] == "clipline":
            assert module in PUBLIC, f"{module} is not public"
            assert name in importlib.import_module(module).__all__, f"{name} is not public in {module}"


def test_clipline_does_without_the_papers_package():
    for path in sorted((ROOT / "src" / "clipline").rglob("*.py")):
        assert not re.search(r"^\s*(from|import) clipline_paper", path.read_text(encoding="utf-8"), re.MULTILINE), path


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_public_names_are_literals_that_exist(module):
    found = importlib.import_module(module)
    tree = ast.parse(Path(found.__file__).read_text(encoding="utf-8"))
    (value,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert ast.literal_eval(value) == found.__all__
    assert len(set(found.__all__)) == len(found.__all__)
    modules = {module.name for module in pkgutil.iter_modules(getattr(found, "__path__", []))}
    assert not modules & set(found.__all__)  # once imported, the module would be found in the place of the name
    for name in found.__all__:
        getattr(found, name)
        assert not name.startswith("_")
    page = (ROOT / "docs" / "reference" / "packages.md").read_text(encoding="utf-8")
    assert f"`{module}`" in page
