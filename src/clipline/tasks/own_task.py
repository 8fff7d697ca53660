"""A task of the user's own: a Python file with a model and a loss, trained on a store or a table."""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.manifest import MANIFEST, read_entries, verify_store
from ..data.task_stores import CHECKSUM_BYTES, INSIDERS, OUTSIDERS, DataUsed
from ..errors import ModuleError, SettingError, refuse
from ..federated.local_sgd import Batch, Loss, takes_reference
from ..federated.population import Population
from ..settings import SETTINGS
from .initialisers import initialised
from .metrics import batches
from .settings import TrainSettings, check_given, merged, settings_from
from .task import LoadedTask, Task

Metrics = Callable[[nn.Module, Batch], Mapping[str, Tensor]]  # name -> (examples,) numbers

TEST_SHARE = 0.1  # of the users of a single store or a table are measured on and not trained on
_SIGNATURES = {
    "model": "model()",
    "loss": "loss(model, batch)",
    "metrics": "metrics(model, batch)",
    "predict": "predict(model, batch)",
}
_NOT_HERE = [name for name, declared in SETTINGS.items() if declared.some_tasks and name not in ("data", "user_column")]
_BATCH = 500  # examples to measure at once


def is_task_file(name: object) -> bool:
    """Whether this names a file and not a task of clipline."""
    return isinstance(name, str) and name.endswith(".py")


def own_task(path: str, given: Mapping[str, Any]) -> Task:
    """The task that a Python file defines, with its settings, then those given.

    The file defines `model()` and `loss(model, batch)`, and may define `metrics(model, batch)`, `predict(model, batch)`
    for `clipline.load`, the dict `SETTINGS`, and `PERSONAL`, names of parameters that stay with their user; or it
    defines a `Task` as `TASK`. It is run, as any Python program is.
    """
    module = _run_file(path)
    where = f"SETTINGS of {path!r}"
    made = getattr(module, "TASK", None)
    if made is not None:
        if not isinstance(made, Task):
            raise refuse("TASK", made, f"a clipline.tasks.task.Task in {path!r}", "see docs/own_model.md")
        settings = made.settings.overridden({**given, "task": path}, "the command line")
        describe = partial(_describe, path) if settings.stored else None
        return replace(made, settings=settings, describe=describe, code=file_checksum(path))
    functions = {name: _function(module, path, name) for name in ("model", "loss")}
    metrics, _ = (_function(module, path, name) if hasattr(module, name) else None for name in ("metrics", "predict"))
    defaults = getattr(module, "SETTINGS", {})
    if not isinstance(defaults, Mapping):
        raise refuse("SETTINGS", defaults, f"a dict in {path!r}", 'write SETTINGS = {"rounds": 100}')
    check_given(defaults, where)
    personal = getattr(module, "PERSONAL", ())
    if not isinstance(personal, list | tuple):
        raise refuse("PERSONAL", personal, f"a list of parameters' names in {path!r}", 'write PERSONAL = ["taste"]')
    settings = settings_from({**merged(defaults, given), "task": path}, where, without=_NOT_HERE)
    if not settings.stored:
        raise refuse("data", settings.data, f"given for {path!r}, which generates no users", "give --data DIR or FILE")
    return Task(
        name=Path(path).stem,
        title=path,
        metric_name="loss",
        settings=settings,
        load=partial(_load, path, functions["model"], functions["loss"], metrics, personal),
        data="own",
        describe=partial(_describe, path),
        code=file_checksum(path),
    )


def own_model(path: str) -> nn.Module:
    """A new model of a file that defines `model()`. Nothing else of the file is needed, and no data."""
    module = _run_file(path)
    if not hasattr(module, "model") and hasattr(module, "TASK"):
        raise SettingError(f"model={path!r} defines TASK, whose model depends on its data: give --parameters instead")
    model = _function(module, path, "model")()
    if not isinstance(model, nn.Module):
        raise ModuleError(f"model() of {path!r} gave {type(model).__name__} but must give a torch.nn.Module")
    return model


def _run_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise refuse(
            "task", path, "the path of a Python file, and there is none", "give another path, or a task's name"
        )
    spec = importlib.util.spec_from_file_location(f"clipline_task_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _imports_from(Path(path).resolve().parent):
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise SettingError(f"task={path!r} cannot be run ({_at(path, error)}): mend the file") from error
    return module


@contextmanager
def _imports_from(folder: Path) -> Iterator[None]:
    """Let a file import what lies beside it, as a Python program may."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _at(path: str, error: Exception) -> str:
    """The error in a line, with the line of the file that it came from."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == Path(path).resolve()]
    first = str(error).partition("\n")[0]
    return f"line {lines[-1] if lines else '?'}: {type(error).__name__}: {first}"


def _function(module: ModuleType, path: str, name: str) -> Any:
    """A function of the file, if it can be called as promised."""
    wanted = _SIGNATURES[name]
    function = getattr(module, name, None)
    if not callable(function):
        raise SettingError(f"task={path!r} must define {wanted}, and it does not: see docs/own_model.md")
    arguments = [] if name == "model" else [None, None]
    try:
        signature = inspect.signature(function)
        if not (name == "loss" and takes_reference(function)):
            signature.bind(*arguments)
    except TypeError:
        raise SettingError(
            f"task={path!r} must define {wanted}, and its {name} is called as {name}{signature}: change its arguments"
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    return function


def model_of(path: str) -> tuple[Callable[[], nn.Module], Any]:
    """What makes the model of a task's file, and its `predict(model, batch)`, or None. The file is run."""
    module = _run_file(path)
    if getattr(module, "TASK", None) is not None:
        raise SettingError(
            f"task={path!r} defines TASK, whose model cannot be made without its data: give load(path, model=MyModel())"
        )
    predict = _function(module, path, "predict") if hasattr(module, "predict") else None
    return _function(module, path, "model"), predict


def file_checksum(path: str) -> str:
    """Of the bytes of a task's file: whether it is still the same code."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _describe(path: str, settings: TrainSettings) -> DataUsed:
    """What there is to train and measure on, in words; what cannot be read is refused before work begins."""
    data = Path(str(settings.data))
    if data.is_file():
        if settings.user_column is None:
            way_out = "give --user-column, the column that says whose row it is"
            raise refuse("user_column", None, f"given for the table {str(data)!r}", way_out)
        return DataUsed("own", f"{path} on {data}", f"table {data.name}", OUTSIDERS)
    folder = data / "train" if (data / "train" / MANIFEST).is_file() else data
    if not (folder / MANIFEST).is_file():
        limit = "a folder made by clipline data prepare, or a table that ends in .parquet, .csv, .jsonl or .npz"
        raise refuse("data", str(data), limit, "clipline data prepare table --from FILE --to DIR makes a folder")
    entries = read_entries(folder)
    measured_on = INSIDERS if entries.get("shared_users") is True and folder != data else OUTSIDERS
    return DataUsed(str(entries.get("origin", "own")), f"{path} on {data}", entries.get("source"), measured_on)


def _load(
    path: str,
    make: Callable[[], nn.Module],
    loss: Loss,
    metrics: Metrics | None,
    personal: Sequence[str],
    settings: TrainSettings,
) -> LoadedTask:
    population, test = _users(settings)
    if test.examples == 0:
        raise SettingError(f"data={settings.data!r} has no example to measure on: bring more users")

    def made(seed: int) -> nn.Module:
        model = initialised(make, seed)
        if not isinstance(model, nn.Module):
            raise ModuleError(f"model() of {path!r} gave {type(model).__name__} but must give a torch.nn.Module")
        return model

    measured_loss = _where_nobody_trains(loss, personal)
    measure = partial(_measured, measured_loss, metrics, test)
    named = (
        _of_a_batch(measured_loss, metrics, made(settings.seed).eval(), _first_batch(test))
        if metrics is not None
        else {}
    )
    main = next((name for name in named if name != "loss"), "loss")
    return LoadedTask(population, made, loss, measure, metric_name=main, personal=personal)


def _users(settings: TrainSettings) -> tuple[Population, Population]:
    """Users to train on and users to measure on: two stores, or one store or table split by user."""
    data = Path(str(settings.data))
    if data.is_file():
        return Population.from_table(data, str(settings.user_column)).split(test=TEST_SHARE, seed=0)
    if (data / "train" / MANIFEST).is_file():
        return _store(data / "train"), _store(data / "test")
    return _store(data).split(test=TEST_SHARE, seed=0)


def _store(folder: Path) -> Population:
    if "sha256" in read_entries(folder):
        verify_store(folder, largest=CHECKSUM_BYTES)
    return Population.open(folder)


def _first_batch(test: Population) -> Batch:
    return next(batches(test, np.arange(min(_BATCH, test.examples)), _BATCH, torch.zeros(())))


def _measured(loss: Loss, metrics: Metrics | None, test: Population, model: nn.Module) -> dict[str, float]:
    """Loss and metrics, each averaged over the test users' examples."""
    sums: dict[str, float] = {}
    rows = np.arange(test.examples)
    for batch in batches(test, rows, _BATCH, next(model.parameters())):
        for name, total in _of_a_batch(loss, metrics, model, batch).items():
            sums[name] = sums.get(name, 0.0) + total
    return {name: total / test.examples for name, total in sums.items()}


def _where_nobody_trains(loss: Loss, personal: Sequence[str]) -> Loss:
    """The loss of a model and a batch alone: the round's parameters are then the model's own."""
    if not takes_reference(loss):
        return loss

    def measured(model: nn.Module, batch: Batch) -> Tensor:
        own = {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}
        stays = {name for pattern in personal for name in fnmatch.filter(own, pattern)}
        return loss(model, batch, {name: value for name, value in own.items() if name not in stays})

    return measured


def _of_a_batch(loss: Loss, metrics: Metrics | None, model: nn.Module, batch: Batch) -> dict[str, float]:
    """Sums over the examples of a batch; the loss may be a mean already."""
    examples = len(next(iter(batch.values())))
    with torch.no_grad():
        values = loss(model, batch)
        sums: dict[str, float] = {}
        for name, numbers in ({} if metrics is None else _mapping(metrics(model, batch))).items():
            if not isinstance(numbers, Tensor) or numbers.shape != (examples,):
                got = tuple(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
                raise ModuleError(
                    f"metrics(model, batch) gave {name!r} as {got} but must give ({examples},), a number for each "
                    "example: average over nothing"
                )
            sums[name] = float(numbers.double().sum())
        # Last, so that reports begin with the file's first metric; a metric of that name is the file's own.
        sums.setdefault("loss", float(values.double().mean()) * examples)
    return sums


def _mapping(values: object) -> Mapping[str, Tensor]:
    if not isinstance(values, Mapping) or not values:
        raise ModuleError(
            f"metrics(model, batch) gave {type(values).__name__} but must give names and numbers for each example: "
            'return {"accuracy": right}'
        )
    return values
