"""`clipline.load`: a stored model with its guarantee, ready to predict."""

from __future__ import annotations

import copy
import fnmatch
import inspect
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ..data.chunks import is_file, short
from ..data.column_options import ColumnOptions
from ..data.packed_field import Field
from ..engine.core.batches import in_batch
from ..engine.core.working_model import uncompiled
from ..engine.isolation.state import checksum
from ..errors import (
    CliplineError,
    ModuleError,
    PopulationError,
    RunError,
    SettingError,
    check_whole,
    first_line,
    nearest,
    refuse,
)
from ..federated.local_sgd import Batch
from ..privacy.guarantee import Guarantee
from ..settings import SETTINGS, STAND_IN
from ..tasks import is_task_file, task_named
from ..tasks.task import Task
from ..tasks.task_file import file_checksum, model_of
from ..training.durable import damage
from ..training.model_card import guarantee_from, layers_text
from ..training.run_directory import checked_path
from ..training.run_files import CARD_KEY, MODEL, can_go_on
from .new_data import PREDICTION, arrays_of, class_names, field_like, named_columns, perhaps_renamed

Predict = Callable[[nn.Module, Batch], Tensor | Mapping[str, Tensor]]  # (examples, ...) of a batch, or several by name
_WITH_PERSONAL = "; it does not cover the personal parameters of one user, which this model holds"
_ONLY = ""  # the name of an array that was given without one
_UNREADABLE = (OSError, SafetensorError, ValueError, TypeError, RuntimeError, MemoryError, AttributeError)
_DAMAGED = (CliplineError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)
_NUMBERS = {np.dtype(code).name for code in "?bBhHiIlLqQefdFD"}
_PREDICT = "give predict=f, or --model FILE.py with such a function"


class OtherCodeWarning(UserWarning):
    """A model is loaded with another file, or with other layers, than it was trained with."""


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A trained model in eval mode, its guarantee, and what is known of its training. `load` returns it.

    Args:
      model: The module.
      guarantee: What is promised.
      metrics: What was measured last.
      card: The content of card.json.
      function: Makes the predictions of a batch.
      classes: Names of the outputs, or the field that is predicted.
      personal: Whether the training had personal parameters.

    Example:
      >>> saved = cl.load("models/rides", model=make_model)
    """

    model: nn.Module = field(repr=False)
    guarantee: Guarantee
    metrics: Mapping[str, float | None]  # at the end of the training; None where one was not finite
    card: Mapping[str, Any] = field(repr=False)  # settings, fields and the rest, as in card.json
    function: Predict | None = field(default=None, repr=False)
    classes: str | Sequence[str] | None = field(default=None, repr=False)  # see `load`
    personal: bool = False  # whether it holds parameters of one user, which the guarantee does not cover

    def __str__(self) -> str:
        return f"{self.guarantee}{_WITH_PERSONAL if self.personal else ''}"

    def predict(
        self,
        data: Any,
        *,
        text: Callable[[Sequence[str]], Any] | None = None,
        keep: Sequence[str] = (),
        batch_size: int = 256,
    ) -> Any:
        """What the model says of each example.

        Rows keep their order; those of a population are user by user. Columns that the training did not have are not
        read, and labels may be missing. The column options of the training's population are applied to tables and
        mappings, which have columns as they were before.

        Args:
          data: A dataframe, a table file (Parquet, CSV, JSONL, NPZ), a `Population` or the folder of one, a mapping
            from fields to arrays, or a single array or tensor.
          text: The function that the training's population was made with, for columns of text. Functions are not
            stored.
          keep: Columns of the data, such as an id, that come first in the answer. Of a population "user" is the id of
            each example's user.
          batch_size: Examples of a batch.

        Returns:
          An array (examples, ...), or several by name. If classes are known there are `prediction`, the most likely
          class, and `probability_NAME` for each class (`score_NAME` if they do not add up to 1).

        Raises:
          PopulationError: If a column is missing or cannot become its field.
          SettingError: If `keep` or `classes` does not fit the answer.

        Example:
          >>> cl.load("models/rides", model=make_model).predict("new_rides.parquet")
        """
        check_whole("batch_size", batch_size, at_least=1, way_out="256 is a usual choice")
        trained: Mapping[str, Any] = self.card.get("fields", {})
        options = ColumnOptions.of(self.card.get("columns", {}))
        new = arrays_of(data, list(trained), only=_ONLY, options=options, text=text, keep=keep)
        if _ONLY in new.fields and self.function is not None:
            raise refuse(
                "data", type(data).__name__, "fields by name, as predict(model, batch) takes them", 'give {"x": array}'
            )
        like = next((p for p in self.model.parameters() if p.is_floating_point()), torch.zeros(()))
        fields = {name: field_like(name, array, trained) for name, array in new.fields.items()}
        examples = len(next(iter(fields.values())))
        parts: list[Mapping[str, Tensor]] = []
        with torch.no_grad():
            for start in range(0, max(examples, 1), batch_size):  # no examples: one empty batch tells the shape
                stop = min(start + batch_size, examples)
                batch = _Fields({name: _tensor(array[start:stop], like) for name, array in fields.items()})
                batch.unread = new.unread
                parts.append(_checked(self._asked(batch, fields, trained), stop - start))
        joined = {name: _numpy(torch.cat([part[name] for part in parts])) for name in parts[0]}
        return self._answer(joined, new.kept)

    def with_personal(self, values: Mapping[str, Tensor] | str | Path) -> SavedModel:
        """The same with the personal parameters of one user, from `Training.unprivate_personal`, for that user alone.

        `values` are tensors by parameter name, or a safetensors file of them. They are the user's own private data, and
        so is what the new model predicts with them: the guarantee covers the parameters that were released, not these.
        """
        given = _personal_file(Path(values)) if isinstance(values, str | Path) else values
        if not isinstance(given, Mapping):
            raise refuse("values", given, "tensors by name, or a safetensors file of them", "see unprivate_personal")
        model, known = copy.deepcopy(self.model), dict(self.model.named_parameters())
        patterns = [one for one in self.card.get("settings", {}).get("personal", []) if isinstance(one, str)]
        personal = [name for name in known if any(fnmatch.fnmatchcase(name, one) for one in patterns)]
        for name, value in given.items():
            if name not in personal:
                way_out = nearest(name, personal) if personal else "train with personal=[...]"
                raise ModuleError(f"{name!r} is no personal parameter of the training: {way_out}")
            if not isinstance(value, Tensor) or _described(value) != _described(known[name]):
                got = _described(value) if isinstance(value, Tensor) else type(value).__name__
                raise ModuleError(f"{name!r} is {got} but must be {_described(known[name])}, as in the model")
        with torch.no_grad():
            for name, param in model.named_parameters():
                if name in given:
                    param.copy_(given[name])
        return replace(self, model=model, personal=self.personal or bool(given))

    def _answer(self, joined: dict[str, NDArray[Any]], kept: Mapping[str, NDArray[Any]]) -> Any:
        """The predictions, as classes where these are known, behind the columns that are kept."""
        by_name = self.classes is not None and not isinstance(self.classes, str)
        if by_name and (list(joined) != [_ONLY] or not self._are_classes(joined[_ONLY])):  # they would go unused
            limit = "left out where a prediction is no fraction for each class"
            raise refuse("classes", self.classes, limit, "have predict(model, batch) give (examples, classes)")
        if list(joined) == [_ONLY]:
            (scores,) = joined.values()
            if self._are_classes(scores):
                joined = named_columns(
                    scores, class_names(self.classes, self.card), of_field=isinstance(self.classes, str)
                )
            elif not kept:
                return scores
            else:
                joined = {PREDICTION: scores}
        for name in kept:
            if name in joined:
                raise refuse("keep", name, f"named other than {', '.join(joined)}", "rename that column")
        return {**kept, **joined}

    def _are_classes(self, scores: NDArray[Any]) -> bool:
        """Whether a row has a number for each class: of a label of fractions it has not."""
        if self.classes is None or scores.ndim != 2 or scores.shape[1] < 2 or scores.dtype.kind != "f":
            return False
        label = self.card.get("fields", {}).get(self.classes) if isinstance(self.classes, str) else None
        return label is None or not label["dtype"].startswith("float")

    def _asked(self, batch: _Fields, fields: Mapping[str, Field], trained: Mapping[str, Any]) -> Any:
        """The model's answer; an error that comes with other shapes or fewer fields than in the training says so."""
        try:
            return _called(self.model, batch) if self.function is None else self.function(self.model, batch)
        except SettingError:
            raise
        except Exception as error:
            first = first_line(error)
            for name, array in fields.items():
                shape = tuple(trained.get(name, {}).get("shape", array.shape[1:]))
                if array.shape[1:] != shape:
                    limit = f"{shape} for each example, as in the training ({first})"
                    way_out = "prepare new data as those that were trained on"
                    raise refuse(f"shape of {name!r}", array.shape[1:], limit, way_out) from error
            missing = [name for name in trained if name not in fields]
            if missing and self.function is None and _ONLY not in fields:  # a function's own errors stay
                raise PopulationError(
                    f"data has no {', '.join(map(repr, missing))}, which the training had, and the model cannot "
                    f"predict from {', '.join(map(repr, fields))} alone ({first}): {batch.way_out(missing[0])}"
                ) from error
            raise


def load(
    path: str | Path,
    model: nn.Module | Callable[[], nn.Module] | str | None = None,
    *,
    predict: Predict | None = None,
    classes: str | Sequence[str] | None = None,
    device: torch.device | str = "cpu",
) -> SavedModel:
    """Load the model in a folder of `TrainResult.save`, `RunDirectory` or `clipline train`, with its guarantee.

    A folder holds numbers and text, and no code. Nothing is unpickled, and no file is run that you do not name.

    Args:
      path: The folder.
      model: What the numbers belong to: an untrained module of the same class and shapes, which is copied, or a
        function that makes one. For a run of `clipline train FILE.py` it is the path of that file, which is run. For a
        run of one of clipline's own tasks leave it out.
      predict: `predict(model, batch)` makes the predictions of a batch, which maps field names to tensors.
      classes: Names of the model's outputs in order, or the field that is predicted, whose categories are then the
        names. Left out, it is the `LABEL` of the task's file.
      device: Where the model goes.

    Returns:
      The model in eval mode, its guarantee, and `predict`.

    Raises:
      RunError: If the folder holds no model.
      ModuleError: If the model has other parameters, shapes or types.

    Example:
      >>> saved = cl.load("runs/rides", model=make_model)
      >>> saved.predict("new_rides.parquet")
    """
    folder = checked_path(path)
    if predict is not None and not callable(predict):
        raise refuse("predict", predict, "a function", 'give predict=lambda model, batch: model(batch["x"])')
    tensors, card, guarantee = _read(folder)
    class_names(classes, card)  # refuses what names nothing
    code = code_of(card.get("task", {}), model, folder)
    if classes is None and code.label in card.get("fields", {}):
        classes = code.label
    module = _made(code)
    tensors |= _of_base(card.get("left_out", {}), module, folder / MODEL)
    _check_same(tensors, module, folder / MODEL)
    if layers_text(module) != card["model"]["layers"]:
        warnings.warn(
            f"the model given prints other layers than the one saved in {str(path)!r}: compare it with its card",
            OtherCodeWarning,
            stacklevel=2,
        )
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:  # names, shapes and types agree: a weight takes no plain numbers, a quantised one
        said = str(error).strip().splitlines()[-1].strip()[:300]
        raise ModuleError(
            f"{str(folder / MODEL)!r} cannot be put into the model given ({said}): give the model as it was before its "
            "weights were quantised; adapters go into a quantised base by PeftModel.from_pretrained(base, folder)"
        ) from None
    trained = _moved(module, device).eval()
    return SavedModel(trained, guarantee, card["metrics"], card, predict or code.predict, classes)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], Guarantee]:
    """Tensors, card and guarantee of a folder."""
    file = path / MODEL
    if not is_file(file):
        unfinished = can_go_on(path)
        shown = str(path)[:200]
        raise RunError(
            f"path={shown!r} holds an unfinished run and no {MODEL}: resume it first"
            if unfinished
            else f"path={shown!r} must be a folder with {MODEL}, and has none: give one of result.save or of a run"
        )
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        text, wrong = metadata[CARD_KEY], damage(file)
    except KeyError:
        raise RunError(
            f"{str(file)!r} has no card, so clipline.load does not know its guarantee: save it by result.save, or read "
            "the tensors alone by safetensors.torch.load_file"
        ) from None
    except _UNREADABLE as error:
        raise RunError(f"{str(file)!r} cannot be read as a saved model ({short(error)}): save it again") from None
    if wrong is not None:
        raise RunError(f"{str(file)!r} is damaged, {wrong}: restore it, or save the model again")
    return tensors, *_checked_card(text, file)


def _checked_card(text: str, file: Path) -> tuple[dict[str, Any], Guarantee]:
    """The card of a file, which may be damaged, and the guarantee in it."""
    try:
        card = json.loads(text)
        ColumnOptions.of(card.get("columns", {}))
        for name, one in card.get("fields", {}).items():
            if one["dtype"] not in _NUMBERS or not all(axis >= 0 for axis in one["shape"]):
                raise ValueError(f"field {name[:80]!r} holds no numbers")
        metrics = [number for number in card["metrics"].values() if number is not None]
        texts = [card["model"]["layers"], card.get("task", {}).get("name", "")]
        dict(card.get("left_out", {}))  # names, and checksums that only have to be equal
        if not all(math.isfinite(number) for number in metrics) or not all(isinstance(one, str) for one in texts):
            raise ValueError("a metric is no number, or a name no text")
        return card, guarantee_from(card["guarantee"])
    except _DAMAGED as error:
        said = "".join(one for one in str(error) if one.isprintable())[:300]
        raise RunError(f"{str(file)!r} has a damaged card ({said}): save the model again") from None


@dataclass(frozen=True)
class Code:
    """What makes an untrained model, how it predicts, and what, if that is known."""

    make: Callable[[], object]
    predict: Predict | None = None
    label: str | None = None  # the field that is predicted, if that is known


def code_of(task: Mapping[str, Any], model: object, folder: Path) -> Code:
    """What makes the model: what the caller gives, a file that the caller names, or the task that the card names.

    A file is run only if the caller names it: who wrote the card also wrote the name and the checksum in it, and may
    have put a file of that name beside the folder.
    """
    if isinstance(model, nn.Module):
        return Code(lambda: copy.deepcopy(uncompiled(model)))
    if model is not None and not isinstance(model, str):
        if callable(model):
            return Code(model)
        limit = "a module, a function that makes one, or the name of a task"
        raise refuse("model", model, limit, "give model=MyModel()")
    name = model or task.get("name")
    if not isinstance(name, str):
        raise SettingError(
            f"path={str(folder)!r} does not say what makes its model, as it was not written by clipline train: give "
            "load(path, model=MyModel()), an untrained one of the same class and shapes, or --model FILE.py with a "
            "function model() that makes one"
        )
    if not is_task_file(name):
        options = task.get("options")
        return Code(partial(_built_in, task_named(name), options if isinstance(options, dict) else {}))
    if model is None:
        raise RunError(
            f"the model was defined in the file {name[:200]!r}, and no code is run that you have not named: read that "
            'file, then give load(path, model="FILE.py") or --model FILE.py'
        )
    code = Code(*model_of(name))
    if isinstance(stored := task.get("code"), str) and file_checksum(name) != stored:
        warnings.warn(
            f"{name!r} is not the file that the model was trained with, or has changed since: compare what it predicts "
            "with the metrics of the card",
            OtherCodeWarning,
            stacklevel=3,
        )
    return code


def _built_in(task: Task, options: Mapping[str, Any]) -> nn.Module:
    """The model of a task of clipline with these options, made on as few generated users as will do."""
    chosen = {name: value for name, value in options.items() if name in SETTINGS}
    few: dict[str, Any] = {"population_size": task.settings.cohort_size}
    if task.settings.test_users is not None:
        few |= {"test_users": 2, "data": STAND_IN}  # one to validate on, one to test on
    return task.load(task.settings.overridden({**chosen, **few}, "the card")).make(0)


def _made(code: Code) -> nn.Module:
    """What the code makes, which must be a module; a class that wants arguments is refused."""
    try:
        inspect.signature(code.make).bind()
    except TypeError:
        raise ModuleError(
            "model needs arguments to be made but is called without: give model=MyModel(...), or a function that makes "
            "it"
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    module = code.make()
    if not isinstance(module, nn.Module):
        raise ModuleError(f"model gave {type(module).__name__} but must give a torch.nn.Module: return the module")
    return module


def _moved(module: nn.Module, device: Any) -> nn.Module:
    try:
        return module.to(torch.device(device))
    except (RuntimeError, TypeError, AssertionError) as error:
        raise refuse("device", str(device)[:80], f"one that torch can use here ({short(error)})", "use cpu") from None


def _check_same(tensors: Mapping[str, Tensor], module: nn.Module, file: Path) -> None:
    """Refuse a module with other parameters or buffers than those stored, by the first difference."""
    own = module.state_dict()
    for name in [*own, *(name for name in tensors if name not in own)]:
        there, here = (_described(one.get(name)) for one in (tensors, own))
        if there != here:
            raise ModuleError(
                f"{name!r} is {there} in {str(file)!r} and {here} in the model given: give a model made as the "
                "trained one was"
            )


def _of_base(sums: Mapping[str, int], module: nn.Module, file: Path) -> dict[str, Tensor]:
    """The parameters that are not stored, from the module given; others than those trained with are refused."""
    own = module.state_dict()
    for name, stored in sums.items():
        if name not in own or checksum(own[name]) != stored:
            raise ModuleError(
                f"{name!r} is not stored in {str(file)!r}, as it did not train, and the model given has "
                f"{'another' if name in own else 'none'}: give model= with the base that was trained on"
            )
    return {name: own[name] for name in sums}


def _personal_file(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file."""
    if not is_file(path):
        raise RunError(f"values={str(path)[:200]!r} is no file: give tensors by name, or a safetensors file of them")
    try:
        return load_file(path)
    except _UNREADABLE as error:
        raise RunError(f"{str(path)!r} cannot be read as safetensors ({short(error)}): save it again") from None


def _described(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


class _Fields(dict[str, Tensor]):
    """A batch that says what it has when it is asked for something else; `unread` are the data's other columns."""

    unread: Sequence[str] = ()

    def __missing__(self, name: str) -> Tensor:
        raise SettingError(f"data has no field {name!r} but {', '.join(self) or 'none'}: {self.way_out(name)}")

    def way_out(self, name: str) -> str:
        """What to do about a field that is not there; a column that may have been renamed is pointed at."""
        return perhaps_renamed(name, self.unread) or "give it, by that name"


def _called(model: nn.Module, batch: Batch) -> Any:
    """The model called with the fields that its `forward` names, or else with the only field."""
    if len(batch) == 1:
        return model(*batch.values())
    arguments = inspect.signature(model.forward).parameters.values()
    named = [one for one in arguments if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    needed = [one.name for one in named if one.default is one.empty]
    if any(name in batch for name in needed):  # so its arguments are fields; one that is not there is named
        given = [one.name for one in named if one.name in needed or one.name in batch]
        return model(**{name: batch[name] for name in given})
    wanted, there = ", ".join(needed) or "nothing by name", ", ".join(batch)
    limit = f"given where the model takes {wanted} and the data have {there}"
    raise refuse("predict", None, limit, f"{_PREDICT}, or data with one field")


def _checked(answer: object, examples: int) -> Mapping[str, Tensor]:
    """Predictions by name, one for each example."""
    named = dict(answer) if isinstance(answer, Mapping) else {_ONLY: answer}
    if not named:
        raise refuse("prediction", {}, "at least one, by name", _PREDICT)
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != examples:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            limit = f"a tensor with {examples} rows, one for each example"
            raise refuse(f"prediction {name!r}" if name else "prediction", got, limit, _PREDICT)
    return named  # type: ignore[return-value]  # checked above


def _tensor(array: NDArray[Any], like: Tensor) -> Tensor:
    return in_batch(torch.tensor(array, device=like.device), like.dtype)


def _numpy(tensor: Tensor) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()
