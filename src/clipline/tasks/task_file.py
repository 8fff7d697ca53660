"""A task of the user's own: a Python file with a model and a loss, trained on a store or a table."""

from __future__ import annotations

import fnmatch
import hashlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..data.chunks import check_exists
from ..data.column_options import ZERO_UPDATE, ColumnOptions
from ..data.manifest import MANIFEST, read_entries, verify_store
from ..data.population import Population, share_users
from ..data.task_stores import CHECKSUM_BYTES, INSIDERS, OUTSIDERS, DataUsed
from ..engine.core.batches import Examples
from ..engine.trial_warnings import check_ranges
from ..errors import (
    CliplineError,
    ModuleError,
    PopulationError,
    SettingError,
    check_choice,
    first_line,
    nearest,
    refuse,
)
from ..federated.local_sgd import Batch, Loss, per_example, takes_reference
from ..settings import SETTINGS
from ..training.evaluation import averages
from . import file_and_name, is_task_file, short_name, task_named, task_names
from .metrics import held_out_users
from .task import LoadedTask, Task, initialised
from .train_settings import TrainSettings, check_given, merged, settings_from

TEST_SHARE = 0.1  # of the users of a single store or a table are measured on and not trained on
_BATCH = 500  # examples to measure at once
_COLUMNS = ("fields", *(field.name for field in fields(ColumnOptions)))
_MINE = ("data", "user_column", "evaluate_on")
_NOT_HERE = [name for name, declared in SETTINGS.items() if declared.some_tasks and name not in _MINE]
_SIGNATURES = {
    "model": "model()",
    "loss": "loss(model, batch)",
    "metrics": "metrics(model, batch)",
    "predict": "predict(model, batch)",
}
_NAMES = (*_SIGNATURES, "SETTINGS", "COLUMNS", "BETTER", "PERSONAL")
_PAGE = "see docs/howto/own_model.md"


class TaskFile:
    """What a file defines, under the names of docs/howto/own_model.md. The file is run, as any Python program is.

    `FILE.py:name` looks in the class `name` of the file first and then in the file, or takes the `Task` of that name.
    """

    def __init__(self, task: str) -> None:
        self.task = task  # as it was given
        self.path, self.name = file_and_name(task)
        if Path(self.path).stem in task_names():
            limit = f"named other than {Path(self.path).stem!r}, a task of clipline"
            raise refuse("task", task, limit, "rename the file")
        self._module = _run(task, self.path)
        self._chosen: Any = None
        if self.name is not None:
            self._chosen = self._named(self.name)
        both = self.has("TASK") and any(self.has(name) for name in _SIGNATURES)
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

    def has(self, name: str) -> bool:
        """Whether the file defines this, or the class that was named."""
        return hasattr(self._chosen, name) or hasattr(self._module, name)

    def value(self, name: str, default: Any = None) -> Any:
        """What the file calls so: in the class that was named, or else at the top."""
        return getattr(self._chosen, name, getattr(self._module, name, default))

    @property
    def makes_task(self) -> bool:
        """Whether the file makes a `Task` itself, of which nothing can be said before its data are there."""
        return isinstance(self._chosen, Task) or (self.name is None and self.value("TASK") is not None)

    @property
    def made_task(self) -> Task:
        """That `Task`."""
        made = self._chosen if self.name is not None else self.value("TASK")
        if not isinstance(made, Task):
            raise refuse("TASK", made, f"a clipline.tasks.Task in {self.path!r}", _PAGE)
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
        try:
            signature = inspect.signature(function)
            if not (name == "loss" and takes_reference(function)):
                signature.bind(*([] if name == "model" else [None, None]))
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
        return self.function(name) if self.has(name) else None

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

    @property
    def columns(self) -> dict[str, Any]:
        """What `COLUMNS` says of a table, as `Population.from_table` takes it; an unknown word is refused."""
        columns = dict(self.mapping("COLUMNS", '{"fields": ["km"]}'))
        for name in columns:
            if name not in _COLUMNS:
                raise SettingError(f"COLUMNS of {self.path!r} has the unknown key {name!r}", nearest(name, _COLUMNS))
        chosen = columns.get("fields", ())
        if isinstance(chosen, str) or not all(isinstance(one, str) for one in chosen):
            raise refuse("fields", chosen, f"a list of columns in COLUMNS of {self.path!r}", 'write "fields": ["km"]')
        with _said_of_columns(self.path):
            ColumnOptions.of({name: value for name, value in columns.items() if name != "fields"})  # checks them
        return columns

    @property
    def personal(self) -> Sequence[str]:
        """Names of the parameters that stay with their user."""
        personal: Any = self.value("PERSONAL", ())
        if not isinstance(personal, list | tuple):
            wanted = f"a list of parameters' names in {self.path!r}"
            raise refuse("PERSONAL", personal, wanted, 'write PERSONAL = ["taste"]')
        return personal

    @property
    def better(self) -> Mapping[str, str]:
        """Which way metrics are better, where their names do not say it."""
        better = self.mapping("BETTER", '{"gap": "lower"}')
        for name, way in better.items():
            check_choice(f"BETTER[{name!r}] of {self.path!r}", way, ("lower", "higher"))
        return better

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


@contextmanager
def _said_of_columns(path: str) -> Iterator[None]:
    """Adds to an error about an option of columns where the file has them: `fill={'km': 0}` is a key of COLUMNS."""
    try:
        yield
    except (PopulationError, SettingError) as error:
        if not re.search(rf"\b({'|'.join(_COLUMNS)})(=|\[| names )", str(error)):
            raise
        raise type(error)(f"{error} (a key of COLUMNS in {path!r})") from error.__cause__


def file_checksum(task: str) -> str:
    """Of the bytes of a task's file: whether it is still the same code."""
    return hashlib.sha256(Path(file_and_name(task)[0]).read_bytes()).hexdigest()


def _run(task: str, path: str) -> ModuleType:
    """The file as it stands, run: never from stored bytecode, which may be of what stood there a moment before."""
    if not Path(path).is_file():
        hint = "give another path, or a task's name"
        raise refuse("task", task, "the path of a Python file, and there is none", hint)
    module = ModuleType(f"clipline_task_{Path(path).stem}")
    module.__file__ = path
    folder = str(Path(path).resolve().parent)
    sys.modules[module.__name__] = module
    sys.path.insert(0, folder)  # it may import what lies beside it, as a Python program may
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        raise SettingError(f"task={task!r} cannot be run ({_at(path, error)})", "mend the file") from error
    finally:
        sys.path.remove(folder)
    return module


def _at(path: str, error: BaseException) -> str:
    """The error in a line, with the line of the file that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == Path(path).resolve()]
    if isinstance(error, SyntaxError):
        if error.filename and Path(error.filename).resolve() != Path(path).resolve():  # of a file that it imports
            return f"line {lines[-1] if lines else 1}: {error.filename!r}, line {error.lineno}: {error.msg}"
        return f"line {error.lineno or 1}: {error.msg}"
    said = f": {first_line(error)}" if str(error).strip() else ""
    return f"line {lines[-1] if lines else '?'}: {type(error).__name__}{said}"


def _line_of(value: object) -> int | str:
    """Where something was defined, as far as Python knows."""
    try:
        return inspect.getsourcelines(inspect.unwrap(value))[1]  # type: ignore[arg-type]
    except (OSError, TypeError, ValueError):
        return "?"


def _is_task(value: object) -> bool:
    """Whether `FILE.py:name` may name it: a `Task`, or a class that has some of a task's names itself."""
    return isinstance(value, Task) or (isinstance(value, type) and any(name in vars(value) for name in _NAMES))


def own_task(task: str, given: Mapping[str, Any]) -> Task:
    """The task that a Python file defines, as docs/howto/own_model.md says, with its settings, then those given."""
    file = TaskFile(task)
    describe, code = partial(_describe, task), file_checksum(task)
    if file.makes_task:
        settings = file.made_task.settings.overridden({**given, "task": task}, "the command line")
        return replace(file.made_task, settings=settings, describe=describe if settings.stored else None, code=code)
    for name in _SIGNATURES:
        if name in ("model", "loss") or file.has(name):
            file.function(name)
    where = f"SETTINGS of {file.path!r}"
    defaults = file.mapping("SETTINGS", '{"rounds": 100}')
    check_given(defaults, where)
    settings = settings_from({**merged(defaults, given), "task": task}, where, without=_NOT_HERE)
    if not settings.stored:
        raise SettingError(f"--data is missing: {task!r} generates no users", "give --data DIR or FILE")
    load, _ = partial(_load, file, file.columns), file.personal  # what is wrong with these is told now
    return Task(
        name=short_name(task), title=task, metric_name="loss", settings=settings, load=load, data="own",
        describe=describe, better=file.better, code=code,
    )  # fmt: skip


def task_of(settings: TrainSettings) -> Task:
    """The task that these settings name: one of clipline, or that of a file."""
    if not is_task_file(settings.task):
        return task_named(settings.task)
    return own_task(settings.task, {name: value for name, value in asdict(settings).items() if value is not None})


def own_model(task: str) -> tuple[nn.Module, list[str]]:
    """A new model of a file that defines `model()`, and which of its parameters stay with their user, by name."""
    file = TaskFile(task)
    if file.makes_task:
        raise SettingError(f"model={task!r} defines TASK, whose model depends on its data", "give --parameters instead")
    model = file.make_model()()
    names = [name for name, _ in model.named_parameters()]
    return model, [name for pattern in file.personal for name in fnmatch.filter(names, pattern)]


def model_of(task: str) -> tuple[Callable[[], nn.Module], Any, str | None]:
    """What makes the model of a task's file, its `predict(model, batch)` and its `LABEL`, or None. The file is run."""
    file = TaskFile(task)
    if file.makes_task:
        hint = "load it in Python, with clipline.load(path, model=MyModel())"
        raise SettingError(f"task={task!r} defines TASK, whose model cannot be made without its data", hint)
    label = file.value("LABEL")
    return file.make_model(), file.optional("predict"), label if isinstance(label, str) else None


def _describe(task: str, settings: TrainSettings) -> DataUsed:
    """What there is to train and measure on, in words; what cannot be read is refused before work begins."""
    data = Path(str(settings.data))
    if data.is_file():
        if settings.user_column is None:
            way_out = "give --user-column, the column that says whose row it is"
            raise SettingError(f"--user-column is missing for the table {str(data)!r}", way_out)
        return DataUsed("own", f"{task} on {data}", f"table {data.name}", OUTSIDERS)
    check_exists("data", data)
    folder = data / "train" if (data / "train" / MANIFEST).is_file() else data
    if not (folder / MANIFEST).is_file():
        limit = "a folder made by clipline data prepare, or a table that ends in .parquet, .csv, .tsv, .jsonl or .npz"
        raise refuse("data", str(data), limit, "clipline data prepare table --from FILE --to DIR makes a folder")
    entries = read_entries(folder)
    measured_on = INSIDERS if entries.get("shared_users") is True and folder != data else OUTSIDERS
    return DataUsed(str(entries.get("origin", "own")), f"{task} on {data}", entries.get("source"), measured_on)


def _load(file: TaskFile, columns: Mapping[str, Any], settings: TrainSettings) -> LoadedTask:
    population, test = _users(file, columns, settings)
    if settings.evaluate_on is not None:
        places = held_out_users(len(test), settings.evaluate_on)
        if not places:
            raise SettingError(
                f"data={settings.data!r} has one test user and none to {settings.evaluate_on}", "bring more"
            )
        test = test.subset(places)
    if test.examples == 0:
        raise SettingError(f"data={settings.data!r} has no example to measure on: bring more users")
    make = file.make_model()
    made = partial(initialised, make)
    measuring, model = _Measuring(file, test), made(settings.seed).eval()
    for users in (test, population):
        measuring.check_ranges(model, users)
    main = measuring.try_out(model)
    return LoadedTask(population, made, measuring.loss, measuring, metric_name=main, personal=file.personal)


def _users(file: TaskFile, columns: Mapping[str, Any], settings: TrainSettings) -> tuple[Population, Population]:
    """Users to train on and users to measure on: two stores, or one store or table split by user."""
    data = Path(str(settings.data))
    if data.is_file():
        with _said_of_columns(file.path):
            table = Population.from_table(data, str(settings.user_column), **columns)
        return table.split(test=TEST_SHARE, seed=0)
    if (data / "train" / MANIFEST).is_file():
        train, test = _store(data / "train", file, columns), _store(data / "test", file, columns)
        if read_entries(data / "train").get("shared_users") is not True and share_users(test, train):
            raise PopulationError(
                f"{str(data)!r} has some user ids in both train and test. Metrics have no noise, so they would tell of "
                "users whom the guarantee covers. Give one folder or table with everybody: it is split by user"
            )
        return train, test
    return _store(data, file, columns).split(test=TEST_SHARE, seed=0)


def users_of_store(folder: str) -> int:
    """How many users of a single store a task of one's own trains on: those who are not tested on."""
    return len(Population.open(folder).split(test=TEST_SHARE, seed=0)[0])


def _store(folder: Path, file: TaskFile, columns: Mapping[str, Any]) -> Population:
    """A store that is complete and whose columns were read as the file says, less the fields that it does not name."""
    if "sha256" in read_entries(folder):
        verify_store(folder, largest=CHECKSUM_BYTES)
    population = Population.open(folder)
    for name in ("categories", "timestamps"):
        stored = population.column_options.get(name, {})
        for column, value in columns.get(name, {}).items():
            if column in population.fields and stored.get(column) != value:
                raise PopulationError(
                    f"{str(folder)!r} was made with other {name} of {column!r} than COLUMNS of {file.path!r} has: "
                    "make it again, or train on the table itself"
                )
    chosen = columns.get("fields")
    if chosen is None:
        return population
    for name in chosen:
        if name not in population.fields:
            raise PopulationError(f"{str(folder)!r} has no field {name!r}: {nearest(name, population.fields)}")
    return replace(population, fields={name: population.fields[name] for name in chosen})


class _Measuring:
    """Loss and metrics of a file, each averaged over the test users' examples. Errors are said with file and line."""

    def __init__(self, file: TaskFile, test: Population) -> None:
        self.file, self.test = file, test
        self.loss: Loss = file.function("loss")
        self.metrics = file.optional("metrics")
        self._examples: Examples | None = None  # where a model was last measured

    def __call__(self, model: nn.Module) -> Mapping[str, float]:
        return averages(self._measured, self._for(next(model.parameters())), _BATCH, model)

    def check_ranges(self, model: nn.Module, users: Population) -> None:
        """Refuse labels and indices of these users that the loss cannot take, unless those who have one add nothing."""
        options = users.column_options
        if options.get("missing") == ZERO_UPDATE:
            return
        like = next(model.parameters(), torch.zeros(()))
        with torch.no_grad():
            check_ranges(
                Examples(users, like.device, like.dtype),
                partial(self._loss_of, model),
                f"loss(model, batch) of {self.file.path!r}",
                options.get("categories", {}),
            )

    def try_out(self, model: nn.Module) -> str:
        """Measure one batch before anything is trained or written; the name of the main metric."""
        examples, few = self._for(next(model.parameters(), torch.zeros(()))), min(_BATCH, self.test.examples)
        named = averages(self._measured, examples, few, model, until=few)
        return next((name for name in named if name != "loss"), "loss")

    def _for(self, like: Tensor) -> Examples:
        """The test users' examples on the device and in the type of a model."""
        if self._examples is None or (self._examples.device, self._examples.dtype) != (like.device, like.dtype):
            self._examples = Examples(self.test, like.device, like.dtype)
        return self._examples

    def _loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss. Where nobody trains, the round's parameters are the model's own."""
        if not takes_reference(self.loss):
            return self.loss(model, batch)
        own = {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}
        stays = {name for pattern in self.file.personal for name in fnmatch.filter(own, pattern)}
        return self.loss(model, batch, {name: value for name, value in own.items() if name not in stays})

    def _measured(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Names and a number for each example. The loss stands last, as reports begin with the first metric."""
        examples, own = len(next(iter(batch.values()))), {}
        with self.file.errors_in("loss(model, batch)", batch):
            losses = self._loss_of(model, batch)
        try:
            per_example(losses, examples)
        except ModuleError as error:
            raise ModuleError(f"{error} ({self.file.line_of('loss')})") from None
        if self.metrics is not None:
            with self.file.errors_in("metrics(model, batch)", batch):
                own = self.metrics(model, batch)
            if not isinstance(own, Mapping) or not own:
                raise ModuleError(
                    f"metrics(model, batch) gave {type(own).__name__} but must give names and numbers for each "
                    f'example: return {{"accuracy": right}} ({self.file.line_of("metrics")})'
                )
        return {**own, "loss": own.get("loss", losses.expand(examples))}
