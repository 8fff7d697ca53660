"""Writes the pages of all commands and of all public modules from the code itself."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from clipline.cli.parser import app


def commands(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """A command and all below it."""
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if below := command.get_command(context, name):
                yield from commands(below, click.Context(below, info_name=name, parent=context))


def page() -> str:
    """Every command with its arguments and flags."""
    lines = [
        "# Commands",
        "",
        "Every command has `--help`. Wrong input is refused with exit code 2, before anything is written.",
        "",
    ]
    for command, context in commands(app, click.Context(app, info_name="clipline")):
        about = (command.help or "").replace("\b\n", "")
        lines += [f"## {context.command_path}", "", re.sub(r"[ \n]+", " ", about.split("\n\n")[0]), ""]
        lines += ["```", " ".join([context.command_path, *command.collect_usage_pieces(context)]), "```", ""]
        rest = about.partition("\n\n")[2].strip()
        if rest:
            lines += ["```", rest, "```", ""]
        rows = []
        for param in command.get_params(context):
            if isinstance(param, click.Argument):
                rows.append((param.make_metavar(context), getattr(param, "description", "")))
            elif "--help" not in param.opts:
                hidden, param.hidden = param.hidden, False
                rows.append(param.get_help_record(context) or ("", ""))
                param.hidden = hidden
        for flag, text in rows:
            lines += [f"`{flag}`", f": {text or flag}", ""]
    return "\n".join(lines)


def public_modules(packages: str) -> dict[str, str]:
    """The modules that the page of packages calls public, and what each is for."""
    return dict(
        re.findall(r"^\| `(clipline[\w.]*)` \| (.*) \|$", packages.partition("## Public modules")[2], re.MULTILINE)
    )


def about(thing: object) -> str:
    """The first sentence of a docstring; of a value, its type."""
    if inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing):
        return (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    kind = type(thing).__name__
    return (
        f"a type: `{thing}`" if kind in ("GenericAlias", "_GenericAlias", "UnionType") else f"a value of type `{kind}`"
    )


def modules(packages: str) -> str:
    """Every name of the public modules, with its arguments."""
    lines = [
        "# Names of the public modules",
        "",
        "What packages may build on. The names of `clipline` itself have pages of their own.",
        "",
    ]
    for name, what in public_modules(packages).items():
        if name == "clipline":
            continue
        module = importlib.import_module(name)
        lines += [f"## {name}", "", f"For {what}.", "", "| name | what it is |", "| --- | --- |"]
        lines += [f"| `{one}` | {about(getattr(module, one))} |" for one in sorted(module.__all__, key=str.lower)]
        lines.append("")
    return "\n".join(lines)


def write(folder: Path) -> None:
    """Write `reference/commands.md` and `reference/modules.md`, if they have changed."""
    reference = folder / "reference"
    packages = (reference / "packages.md").read_text(encoding="utf-8")
    for file, text in ((reference / "commands.md", page()), (reference / "modules.md", modules(packages))):
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
