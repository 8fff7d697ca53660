"""Writes the page of all commands from the commands themselves."""

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


def write(folder: Path) -> None:
    """Write `reference/commands.md`, if it has changed."""
    file, text = folder / "reference" / "commands.md", page()
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")
