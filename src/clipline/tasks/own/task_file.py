"""A Python file with a task in it: run, its names looked up, and its errors said with file and line."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ...errors import CliplineError, ModuleError, SettingError, nearest, refuse
from ...federated.local_sgd import takes_reference
from .. import file_and_name, task_names
from ..task import Task

_SIGNATURES = {
    "model": "model()",
    "loss": "loss(model, batch)",
    "metrics": "metrics(model, batch)",
    "predict": "predict(model, batch)",
}
_NAMES = (*_SIGNATURES, "SETTINGS", "COLUMNS", "BETTER", "PERSONAL")
_PAGE = "see docs/own_model.md"


class TaskFile:
    """What a file defines, under the names of docs/own_model.md. The file is run, as any Python program is.

    `FILE.py:name` looks in the class `name` of the file first and then in the file, or takes the `Task` of that name.
    """

    def __init__(self, task: str) -> None:
        self.task = task  # as it was given
        self.path, self.name = file_and_name(task)
        if Path(self.path).stem in task_names():
            raise refuse(
                "task", task, f"named other than {Path(self.path).stem!r}, a task of clipline", "rename the file"
            )
        self._module = _run(task, self.path)
        self._chosen: Any = None
        if self.name is not None:
            self._chosen = self._named(self.name)
        both = self._has("TASK") and any(self._has(name) for name in _SIGNATURES)
        if self.name is None and both:
            raise SettingError(f"task={task!r} defines TASK and also model or loss, and one must be meant: delete one")

    def _named(self, name: str) -> Any:
        found = getattr(self._module, name, None)
        if _is_task(found):
            return found
        others = [one for one, value in vars(self._module).items() if _is_task(value)]
        way_out = nearest(name, others) if others else f"drop :{name}, or write a class {name}"
        limit = f"the name of a class with {', '.join(_NAMES[:2])} or {_NAMES[4]}, or of a Task"
        there = "there is none" if found is None else f"{name!r} (line {_line_of(found)}) is something else"
        raise refuse("task", self.task, f"{limit}, and {there}", way_out)

    def _has(self, name: str) -> bool:
        return hasattr(self._chosen, name) or hasattr(self._module, name)

    def value(self, name: str, default: Any = None) -> Any:
        """What the file calls so: in the class that was named, or else at the top."""
        return getattr(self._chosen, name, getattr(self._module, name, default))

    @property
    def makes_task(self) -> bool:
        """Whether the file makes a `Task` itself, of which nothing can be said before its data are there."""
        return isinstance(self._chosen, Task) or (self.name is None and self.value("TASK") is not None)

    def made_task(self) -> Task | None:
        """The `Task` that the file makes, if it makes one."""
        if not self.makes_task:
            return None
        made = self._chosen if self.name is not None else self.value("TASK")
        if not isinstance(made, Task):
            raise refuse("TASK", made, f"a clipline.tasks.task.Task in {self.path!r}", _PAGE)
        return made

    def mapping(self, name: str, example: str) -> Mapping[str, Any]:
        """A dict of the file, or an empty one."""
        found = self.value(name, {})
        if not isinstance(found, Mapping):
            raise refuse(name, found, f"a dict in {self.path!r}", f"write {name} = {example}")
        return found

    def function(self, name: str) -> Any:
        """A function of the file, if it can be called as promised."""
        wanted, function = _SIGNATURES[name], self.value(name)
        if not callable(function):
            raise SettingError(f"task={self.task!r} must define {wanted}, and it does not: {_PAGE}")
        arguments = [] if name == "model" else [None, None]
        try:
            signature = inspect.signature(function)
            if not (name == "loss" and takes_reference(function)):
                signature.bind(*arguments)
        except TypeError:
            raise SettingError(
                f"task={self.task!r} must define {wanted}, and its {name} is called as {name}{signature}: change its "
                f"arguments (line {_line_of(function)})"
            ) from None
        except ValueError:  # a builtin without a signature
            pass
        return function

    def optional(self, name: str) -> Any:
        """A function of the file, or None where there is none."""
        return self.function(name) if self._has(name) else None

    def make_model(self) -> Callable[[], nn.Module]:
        """What makes a new model, checked each time; an error inside is said with its line."""
        make = self.function("model")

        def made() -> nn.Module:
            with self.errors_in("model()"):
                model = make()
            if not isinstance(model, nn.Module):
                raise ModuleError(
                    f"model() of {self.path!r} gave {type(model).__name__} but must give a torch.nn.Module: return one "
                    f"(line {_line_of(make)})"
                )
            return model

        return made

    def line_of(self, name: str) -> str:
        """Where a function begins, in words: 'rides.py', line 12."""
        return f"{self.path!r}, line {_line_of(self.value(name))}"

    @contextmanager
    def errors_in(self, what: str, fields: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Turn an error of the file's own code into a sentence. `fields` are those of the batch that it was given."""
        try:
            yield
        except CliplineError:
            raise
        except (Exception, SystemExit) as error:
            way_out = "mend it"
            if isinstance(error, KeyError) and fields is not None and not any(one in fields for one in error.args):
                way_out = f"the batch has the fields {', '.join(fields)}"
            raise ModuleError(f"{what} of {self.path!r} fails ({_at(self.path, error)}): {way_out}") from error


def file_checksum(task: str) -> str:
    """Of the bytes of a task's file: whether it is still the same code."""
    return hashlib.sha256(Path(file_and_name(task)[0]).read_bytes()).hexdigest()


class _FreshLoader(SourceFileLoader):
    """Runs the file as it stands: stored bytecode may be of what stood there a moment before, if as long."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """Not known, so that Python neither reads nor writes bytecode."""
        raise OSError


def _run(task: str, path: str) -> ModuleType:
    if not Path(path).is_file():
        raise refuse(
            "task", task, "the path of a Python file, and there is none", "give another path, or a task's name"
        )
    name = f"clipline_task_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_FreshLoader(name, path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _imports_from(Path(path).resolve().parent):
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            raise SettingError(f"task={task!r} cannot be run ({_at(path, error)}): mend the file") from error
    return module


@contextmanager
def _imports_from(folder: Path) -> Iterator[None]:
    """Let a file import what lies beside it, as a Python program may."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _at(path: str, error: BaseException) -> str:
    """The error in a line, with the line of the file that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == Path(path).resolve()]
    if isinstance(error, SyntaxError):
        if error.filename and Path(error.filename).resolve() != Path(path).resolve():  # of a file that it imports
            return f"line {lines[-1] if lines else 1}: {error.filename!r}, line {error.lineno}: {error.msg}"
        return f"line {error.lineno or 1}: {error.msg}"
    first = str(error).strip().partition("\n")[0]
    return f"line {lines[-1] if lines else '?'}: {type(error).__name__}{f': {first}' if first else ''}"


def _line_of(value: object) -> int | str:
    """Where something was defined, as far as Python knows."""
    try:
        return inspect.getsourcelines(inspect.unwrap(value))[1]  # type: ignore[arg-type]
    except (OSError, TypeError, ValueError):
        return "?"


def _is_task(value: object) -> bool:
    """Whether `FILE.py:name` may name it: a `Task`, or a class that has some of a task's names itself."""
    return isinstance(value, Task) or (isinstance(value, type) and any(name in vars(value) for name in _NAMES))
