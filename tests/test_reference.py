"""Whatever is public stands in the reference, and says what each argument is."""

import inspect
import re

import pytest
from samples import ROOT, load_script

import clipline

PAGES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "reference").glob("*.md")))
DOCUMENTED = dict(
    re.findall(r"^\.\. auto(?:class|function|exception):: ([\w.]+)(?:\n   :members: ([^\n]*))?", PAGES, re.M)
)
RAISE_NOTHING = {
    "Callback", "CliplineError", "Curves", "Guarantee", "HopelessNoiseWarning", "IndependentNoise", "Progress",
    "Relation", "SettingError", "StopOnInterrupt", "TrainResult",
}  # fmt: skip


def sections(thing):
    """Name of a section to the names it lists; of Returns, Raises and Example the words they begin with."""
    parts = re.split(r"^(Args|Returns|Raises|Example):\n", inspect.getdoc(thing) or "", flags=re.MULTILINE)
    return {
        name: re.findall(r"^  (\*{0,2}\w+)\b", text, re.MULTILINE) or text.split()
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def arguments(thing):
    """As they stand in an Args section."""
    stars = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    return [
        stars.get(one.kind, "") + one.name for one in inspect.signature(thing).parameters.values() if one.name != "self"
    ]


def gives_something(function):
    return inspect.signature(function).return_annotation not in (None, "None", inspect.Signature.empty)


def test_all_is_a_literal_and_every_public_name_has_a_place_in_the_reference():
    assert "\n__all__ = [\n" in (ROOT / "src" / "clipline" / "__init__.py").read_text(encoding="utf-8")
    assert set(clipline.__all__) <= set(DOCUMENTED)


@pytest.mark.parametrize("name", clipline.__all__)
def test_a_public_name_says_its_arguments_what_it_gives_and_raises_with_an_example(name):
    thing, has = getattr(clipline, name), sections(getattr(clipline, name))
    assert "Example" in has
    if not (inspect.isclass(thing) and issubclass(thing, (Warning, clipline.Relation))):
        assert has.get("Args", []) == arguments(thing)
    if inspect.isfunction(thing):
        assert has["Returns"]
    assert ("Raises" in has) == (name not in RAISE_NOTHING)


MEMBERS = [(owner, name) for owner, names in DOCUMENTED.items() for name in filter(None, names.split(", "))]


@pytest.mark.parametrize(("owner", "name"), MEMBERS, ids=".".join)
def test_a_public_method_says_its_arguments_and_what_it_gives(owner, name):
    place, _, last = owner.rpartition(".")
    module = inspect.importlib.import_module(place) if place else clipline
    member = inspect.getattr_static(getattr(module, last), name)
    member = getattr(member, "__func__", member)
    assert inspect.getdoc(member)
    if inspect.isfunction(member):
        given = arguments(member)[1 if arguments(member)[:1] == ["cls"] else 0 :]
        assert sections(member).get("Args", []) == given
        assert bool(sections(member).get("Returns")) == gives_something(member)


def test_every_file_of_a_run_is_named():
    page = (ROOT / "docs" / "reference" / "run_directory.md").read_text(encoding="utf-8")
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "clipline" / "training").glob("*.py"))
    files = set(re.findall(r'"(\w+\.(?:toml|jsonl|safetensors|png|html|key))"', source))
    assert {"settings.toml", "ledger.jsonl", "metrics.jsonl", "model.safetensors"} <= files
    assert {file for file in files if f"`{file}`" not in page} == set()


def test_every_name_of_a_public_module_says_what_it_is():
    commands = load_script(ROOT / "docs" / "commands.py")
    packages = (ROOT / "docs" / "reference" / "packages.md").read_text(encoding="utf-8")
    named = commands.public_modules(packages)
    assert {"clipline", "clipline.privacy", "clipline.tasks"} < set(named)
    page = commands.modules(packages)
    for module in set(named) - {"clipline"}:
        for name in inspect.importlib.import_module(module).__all__:
            assert re.search(rf"^\| `{name}` \| \S", page, re.MULTILINE), f"{module}.{name}"
