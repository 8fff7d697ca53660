"""The commands by name, flags made from settings, and help in groups. A command is imported when it is called."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from .. import registry
from ..errors import CliplineError, RunError, nearest
from ..settings import RUN, SETTINGS, Setting
from ..synonyms import SYNONYMS

_WIDEST = 110  # columns of help, on a terminal that has more
_LONGEST_FLAG = 34  # columns; the help of a longer one begins on the next line
_NUMBERS: dict[type, str] = {int: "N", float: "X"}


class Option(click.Option):
    """An option with a group for the help; `unset` says in words what holds if it is left out.

    Of a pair of flags, --x and --no-x, the help shows the second only if it is not the default (`off_by_default`).
    """

    def __init__(
        self, *names: Any, group: str = "Options", unset: str = "", off_by_default: bool = False, **options: Any
    ) -> None:
        super().__init__(*names, **options)
        self.group, self.unset, self.off_by_default = group, unset, off_by_default

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """The flag with its value, and its help with the default."""
        names = ", ".join(self.opts)
        if self.secondary_opts and not self.off_by_default:
            names = f"--[no-]{self.opts[0].removeprefix('--')}"
        value = "" if self.is_flag or self.count else f" {self.make_metavar(ctx)}"
        notes = [f"default: {self.unset}"] if self.unset else []
        notes += ["required"] if self.required else []
        return names + value, (self.help or "") + (f"  [{'; '.join(notes)}]" if notes else "")


class Argument(click.Argument):
    """A positional argument with help."""

    def __init__(self, *names: Any, help: str, **options: Any) -> None:
        super().__init__(*names, **options)
        self.description = help


class _Value(click.ParamType):  # type: ignore[type-arg]  # no type arguments before click 8.4
    """The text of a flag as a number where it reads as one. What is no number is refused by the setting's own check."""

    def __init__(self, setting: Setting) -> None:
        self.kind = setting.kind
        words = [str(choice) for choice in setting.choices]
        if setting.or_number or not words:
            words.append(_NUMBERS.get(setting.kind, setting.metavar))
        self.name = "|".join(words)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """The choices there are, or N for a whole number and X for any."""
        return self.name

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The choices that begin so."""
        return [CompletionItem(word) for word in self.name.split("|") if word.islower() and word.startswith(incomplete)]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or the text as it is."""
        if self.kind is str or not isinstance(value, str):
            return value
        try:
            return self.kind(value)
        except ValueError:
            return value


def flags_for(
    names: Iterable[str], group: str | None = None, also: Mapping[str, str] | None = None
) -> list[click.Parameter]:
    """The flags of these settings, as they are declared. One that is not given is None: a file or a task may set it.

    In the help they stand in the declared groups, with the defaults of tasks; or all in `group`, without these. `also`
    gives some settings a second, shorter flag.
    """
    return [_flag(SETTINGS[name], group, [*filter(None, [(also or {}).get(name)])]) for name in names]


def _flag(setting: Setting, group: str | None, also: Sequence[str]) -> Option:
    unset = setting.unset or ("" if setting.default in (MISSING, None, False) else str(setting.default))
    if setting.by_task:
        unset = "" if group else f"the task's; {setting.unset}".rstrip("; ")
    options: dict[str, Any] = {"group": group or setting.group, "help": setting.help, "unset": unset, "default": None}
    if setting.kind is bool:
        pair = f"{setting.flag}/--no-{setting.flag[2:]}"
        return Option([pair, setting.name], off_by_default=setting.default is False, **options)
    return Option([setting.flag, *also, setting.name], type=_Value(setting), **options)


PATH = click.Path(path_type=Path)
JSON = Option(["--json", "as_json"], is_flag=True, help="Print one JSON object.")


class Command(click.Command):
    """A command whose help is that of its function, with the arguments first, then each group of options.

    Groups stand in the given order, or as they come. With `first` the help shows these options alone, and --help-all
    shows the rest. With an `example` the command called without a word prints its usage and the example.
    """

    def __init__(
        self,
        name: str,
        callback: Callable[..., Any],
        params: Sequence[click.Parameter] = (),
        *,
        groups: Sequence[str] = (),
        first: Sequence[str] = (),
        example: str = "",
        **options: Any,
    ) -> None:
        every = [*params, *([_help_all()] if first else [])]
        super().__init__(name, callback=callback, params=every, **{"help": callback.__doc__, **options})
        self.groups, self.first, self.example = groups, first, example
        self.context_settings = {"max_content_width": _WIDEST, **self.context_settings}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As usual; an unknown flag is refused with the one that is meant, as --lr with --client-lr."""
        if self.example and not args:
            click.echo(f"{ctx.get_usage()}\n\nExample:  {self.example}\n\nAll options: {ctx.command_path} --help")
            ctx.exit(2)
        ctx.meta[_TYPED] = [word.partition("=")[0] for word in args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            word = error.option_name.lstrip("-").replace("-", "_")
            ours = [
                param.opts[-1]
                for param in self.get_params(ctx)
                if word in SYNONYMS and SYNONYMS.get(str(param.name), param.name) == SYNONYMS[word]
            ]
            if not ours:
                raise
            ctx.fail(f"No such option {error.option_name!r}. Did you mean {ours[0]!r}?")

    def invoke(self, ctx: click.Context) -> Any:
        """As usual; an error names flags as they were typed, where Python has keyword arguments."""
        try:
            return super().invoke(ctx)
        except CliplineError as error:
            _name_flags(error, ctx)
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups."""
        rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{group: [] for group in self.groups}}
        for param in self.get_params(ctx):
            if isinstance(param, Argument):
                rows["Arguments"].append((param.make_metavar(ctx), param.description))
            elif self.first and param.name not in (*self.first, "help", "help_all") and not ctx.meta.get(_ALL):
                continue
            elif record := param.get_help_record(ctx):
                last = self.groups[-1] if self.groups else "Options"  # where --help goes
                rows.setdefault(getattr(param, "group", last), []).append(record)
        _write_groups(rows, formatter)


_ALL, _TYPED = "clipline.help_all", "clipline.typed"  # keys of a context's notes


def _name_flags(error: CliplineError, ctx: click.Context) -> None:
    """Write `server_lr=-1.0` as --server-lr -1.0 where that was typed, and then other names of two words as flags."""
    texts = before = [str(error), error.hint]
    words: list[tuple[str, str]] = []
    for param in ctx.command.params:
        name, value = str(param.name), ctx.params.get(str(param.name))
        typed = next((word for word in ctx.meta.get(_TYPED, ()) if word in param.opts), param.opts[0])
        flag = name.upper() if isinstance(param, Argument) else typed
        words += [(name, flag)] if "_" in name and flag == typed else []
        for shown in () if value is None else (repr(value), repr(str(value))):
            said = flag if value is True else f"{flag} {shown}"
            texts = [said.join(re.split(rf"(?<![\w-]){name}={re.escape(shown)}(?!\w)", text)) for text in texts]
    for name, flag in words if texts != before else ():
        texts = [re.sub(rf"(?<![\w'\"./-]){name}(?![\w'\"=.(]| is missing)", flag, text) for text in texts]
    error.args, error.hint = (texts[0],), texts[1]


def _help_all() -> click.Option:
    """--help-all, for a command whose help shows the first options alone."""

    def show(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
        if wanted:
            ctx.meta[_ALL] = True
            click.echo(ctx.get_help())
            ctx.exit()

    return Option(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show, group=RUN,
        help="Show every option.",
    )  # fmt: skip


def _write_groups(rows: Mapping[str, Sequence[tuple[str, str]]], formatter: click.HelpFormatter) -> None:
    """Each group under its name, texts in one column for all groups."""
    names = [name for records in rows.values() for name, _ in records if len(name) <= _LONGEST_FLAG]
    width = max(map(len, names))
    for group, records in rows.items():
        if records:
            with formatter.section(click.style(group, bold=True)):
                formatter.write_dl([(name.ljust(width), text) for name, text in records], col_max=width)


class Group(click.Group):
    """Commands of which each is imported when it is called or described: `modules` maps a name to its module.

    Installed packages add theirs by entry points, if `registered` names the group.
    """

    def __init__(self, *arguments: Any, modules: dict[str, str], registered: str = "", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.modules, self.registered = modules, registered
        self.context_settings = {"max_content_width": _WIDEST, **self.context_settings}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Without a word, the help and exit code 2."""
        if not args:
            click.echo(ctx.get_help())
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands, in order."""
        return list(registry.names(self.registered, self.modules) if self.registered else self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, imported now: the one that its module calls `command`."""
        if cmd_name not in self.modules:
            if cmd_name not in self.list_commands(ctx):
                return None
            return registry.registered(self.registered, cmd_name, click.Command)
        module, _, name = self.modules[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module, __package__), name or "command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first word names; a misspelt one is refused with the nearest."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"no such command {args[0]!r}: {nearest(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, then each command with the first sentence of its help."""
        options = [record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))]
        commands = []
        for name in self.list_commands(ctx):
            try:
                command = self.get_command(ctx, name)
                told = (command and command.help) or ""
            except RunError as error:
                told = str(error)
            commands.append((name, told.partition("\n")[0]))
        _write_groups({"Options": options, "Commands": commands}, formatter)


def _version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        from .. import __version__

        click.echo(f"clipline {__version__}")
        ctx.exit()


app = Group(
    "clipline",
    help="Train models with user-level differential privacy and no clip norm to tune.",
    modules={
        "train": ".train",
        "predict": ".predict",
        "tune": ".tune",
        "plan": ".plan",
        "report": ".report",
        "tasks": ".tasks",
        "study": ".study",
        "selftest": ".selftest",
        "audit": ".audit",
        "verify": ".verify",
        "card": ".card",
        "data": ".data",
        "new-task": ".new_task",
        "new-federation": ".new_federation",
    },
    registered="commands",
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[
        click.Option(
            ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
        )
    ],
)
