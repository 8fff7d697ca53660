"""The room itself: public names, imports in one direction, and a light start."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import clipline
from clipline import privacy

ROOM = Path(privacy.__file__).parent
FILES = sorted(path for path in ROOM.rglob("*.py") if path.name != "__init__.py")


def imported(path):
    """The modules of this room that a file imports when it runs, such as "events" or "pld.total"."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    package = ("clipline", "privacy", *path.relative_to(ROOM).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            if base[:2] == ["clipline", "privacy"] and base[2:] not in ([], [""]):
                yield ".".join(base[2:])


def test_imports_inside_the_room_go_one_way():
    graph = {".".join(path.relative_to(ROOM).with_suffix("").parts): set(imported(path)) for path in FILES}
    assert {"events", "pld.one_round", "renyi"} <= graph["dominating_pairs"]
    assert {"numerics", "pld.one_round"} <= graph["pld.discretised"]
    TopologicalSorter(graph).prepare()  # an error names the circle, if there is one


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOM).as_posix())
def test_every_module_has_a_test_file_of_its_own(path):
    mirror = Path(__file__).parent / path.relative_to(ROOM).parent / f"test_{path.name}"
    assert "\ndef test_" in mirror.read_text(encoding="utf-8")


def test_public_names_exist_and_are_those_of_the_package():
    for name in privacy.__all__:
        assert getattr(privacy, name).__name__ == name
        assert getattr(clipline, name, getattr(privacy, name)) is getattr(privacy, name)
    static = {
        alias.name
        for node in ast.walk(ast.parse((ROOM / "__init__.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    assert static - {"lazily"} == set(privacy.__all__) == set(dir(privacy))
    with pytest.raises(AttributeError, match=r"'clipline\.privacy' has no attribute 'nonsense'"):
        _ = privacy.nonsense


def loaded(code, modules):
    code = f"import sys; {code}; print([m for m in {modules} if m in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_accounting_needs_no_array_framework_and_no_scipy():
    assert loaded("import clipline.privacy.selection, clipline.privacy.planning", ("torch", "scipy")) == "[]"


def test_the_names_of_the_room_are_imported_when_they_are_used():
    assert loaded("import clipline.privacy; dir(clipline.privacy)", ("numpy", "clipline.privacy.accountant")) == "[]"
    assert loaded("from clipline.privacy import PoissonSampling", ("numpy", "clipline.privacy.accountant")) == "[]"
