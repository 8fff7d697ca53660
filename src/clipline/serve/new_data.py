"""New data as fields of a batch, by the rules of the training, and predictions of classes as columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..data.array_checks import check_finite
from ..data.chunks import Text, is_file, is_folder
from ..data.column_options import NO_OPTIONS, ZERO_UPDATE, ColumnOptions
from ..data.fields import fields_of_arrays, without_lengths
from ..data.packed_field import Field, PackedField, stored_values
from ..data.population import Population
from ..data.readers.dataframes import column_names, read_column, read_fields
from ..data.readers.tables import members, whole_table
from ..errors import PopulationError, SettingError, nearest, refuse

_WAY_OUT = "give a dataframe, a table file, a Population, or arrays by field name"
_WAYS = {  # ways out of the training's errors, and what they are here
    "fill the gaps": "fill the gaps or drop the rows, as the training had no filling for them",
    "drop these examples": "drop the rows with gaps, as the training had no filling for them",
    "leave it out of the fields": "give numbers, as in the training, or the same text=... as there",
    "mend the data": "give numbers in all rows",
}
USER = "user"  # of a population: whose example it is
_SHAPING = ("categories", "timestamps", "lengths", "pad", "scale")  # options that decide what a number means


PREDICTION = "prediction"
_OTHER = "other"  # the class after the listed ones, of whatever is not listed
_SUM = 1e-3  # how far from 1 the chances of a row may add up, in 16 bits


@dataclass(frozen=True, eq=False)
class NewData:
    """Fields by name, all with as many examples, names of what was not read, and columns to keep as they are."""

    fields: dict[str, Field]  # lists of a population as they are, of other data padded
    unread: list[str]
    kept: dict[str, NDArray[Any]]


def arrays_of(
    data: Any,
    trained: Sequence[str],
    *,
    only: str,
    options: ColumnOptions = NO_OPTIONS,
    text: Text | None = None,
    keep: Sequence[str] = (),
) -> NewData:
    """New data as fields; a single array is named `only`. `keep` names columns that are handed through.

    Of a table only columns in `trained` are read, or all if that is empty. `options` are those of the training: columns
    of tables and of mappings become fields by them, and those of text by `text`. A population has fields already, which
    must have come about so.
    """
    try:
        if isinstance(data, str | Path):
            data = _read_file(Path(data), trained, options, keep)
        fields, unread = _arrays_of(data, trained, only, options, text)
        return NewData(fields, unread, kept_columns(data, keep, len(next(iter(fields.values())))))
    except PopulationError as error:
        found, given, _ = re.split(rf": ({'|'.join(_WAYS)})|$", str(error), maxsplit=1)
        if given is None:
            raise
        # Column options were given when the training's population was made, and none can be given here.
        raise PopulationError(f"{found}: {_WAYS[given]}") from None


def _arrays_of(
    data: Any, trained: Sequence[str], only: str, options: ColumnOptions, text: Text | None
) -> tuple[dict[str, Field], list[str]]:
    fields: dict[str, Field]
    given: list[Any] = []
    if isinstance(data, Population):
        _check_alike(data, trained, options)
        fields = dict(data.fields)
    elif isinstance(data, Mapping):
        chosen = [name for name in without_lengths(map(str, data), options.entries()) if not trained or name in trained]
        given = list(data)
        _check_some(chosen, given, trained)
        fields = {}
        for name in chosen:
            fields |= _mapped(name, data[name], options, text)
    elif _is_frame(data):
        given = column_names(data)
        fields = _columns(data, given, trained, options, text)
    elif any(option in _SHAPING for option in options.entries()):
        raise refuse(
            "data", type(data).__name__, "columns by name where the training had column options", 'give {"x": values}'
        )
    else:
        fields = {only: _array("data", data)}
    sizes = {name: len(array) for name, array in fields.items()}
    if len(set(sizes.values())) > 1:
        raise refuse("numbers of examples", sizes, "the same in all fields", "give as many of each")
    return fields, [str(name) for name in given if name not in fields]


def kept_columns(data: Any, names: Sequence[str], rows: int) -> dict[str, NDArray[Any]]:
    """Columns of the data as they are, (rows,) each. Of a population, USER is the id of each example's user."""
    if isinstance(names, str):
        raise refuse("keep", names, "a list of columns", f"give [{names!r}]")
    if not names:
        return {}
    if isinstance(data, Population):
        ids = np.arange(len(data)) if data.user_ids is None else data.user_ids
        columns: dict[Any, Any] = {USER: np.repeat(ids, np.diff(data.offsets)), **data.fields}
    elif _is_frame(data):
        columns = dict.fromkeys(column_names(data))
    elif isinstance(data, Mapping):
        columns = dict(data)
    else:
        raise refuse("keep", list(names), "left out where data have no names", 'give {"x": values, "id": ids}')
    kept: dict[str, NDArray[Any]] = {}
    for name in names:
        if name not in columns:
            raise PopulationError(f"data has no column {name!r} to keep: {nearest(name, map(str, columns))}")
        values = read_column(data, name) if _is_frame(data) else columns[name]
        known = isinstance(values, np.ndarray | PackedField)
        kept[name] = np.asarray(values) if known else _plain_array(values)
        if kept[name].shape != (rows,):
            raise refuse(f"shape of {name!r}", kept[name].shape, f"({rows},), a value for each row", "leave it out")
    return kept


def _plain_array(values: Any) -> NDArray[Any]:
    """Values of one kind as an array of numbers or text; mixed ones, and those with gaps, as objects."""
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    kinds = {type(one) for one in listed}
    if kinds == {int} and not -(1 << 63) <= min(listed) <= max(listed) < 1 << 63:  # NumPy would round them
        return np.array(listed, "uint64" if min(listed) >= 0 and max(listed) < 1 << 64 else object)
    return np.array(listed) if kinds in ({int}, {float}, {bool}, {str}) else np.array([*listed, None], object)[:-1]


def perhaps_renamed(name: str, others: Iterable[object]) -> str:
    """A way out where a field is missing and one of the `others` may be meant; empty where none is near."""
    known = list(map(str, others))
    same = [one for one in known if one.lower() == name.lower()]
    close = f"did you mean {same[0]!r}?" if same else nearest(name, known)
    return f"{close} Then rename it to {name!r}" if close.startswith("did you mean") else ""


def field_like(name: str, array: Field, trained: Mapping[str, Any]) -> Field:
    """The array in the type that the field had in the training; refused where that would change a value.

    An array without a name takes the type of the only field of its shape. A field that is not known stays as it is.
    """
    if array.dtype.kind not in "fiub":
        raise refuse(f"type of {name!r}", str(array.dtype), "numbers", "turn it into numbers as for the training")
    known = trained.get(name)
    if known is None:
        alike = [one for one in trained.values() if tuple(one["shape"]) == array.shape[1:]]
        if len(alike) != 1:
            return array
        (known,) = alike
    dtype = np.dtype(known["dtype"])
    if dtype.kind == "f" or array.dtype == dtype:
        return array.astype(dtype, copy=False)
    with np.errstate(invalid="ignore"):
        cast = array.astype(dtype)
    if (stored_values(cast) != stored_values(array)).any():
        raise refuse(f"type of {name!r}", str(array.dtype), f"{dtype} as in the training", "round or convert it before")
    return cast


def _array(name: str, values: Any) -> NDArray[Any]:
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError) as error:
        raise PopulationError(f"{name!r} cannot be read as an array ({error}): {_WAY_OUT}") from None
    if array.ndim == 0 or array.dtype == object:
        raise PopulationError(f"{name!r} is {type(values).__name__} and no array of numbers: {_WAY_OUT}")
    return array


def _is_frame(data: Any) -> bool:
    """A dataframe or a table of pyarrow, and no single column."""
    return hasattr(data, "columns") and (
        hasattr(data, "__arrow_c_stream__") or type(data).__module__.partition(".")[0] == "pandas"
    )


def _columns(
    frame: Any, given: Sequence[Any], trained: Sequence[str], options: ColumnOptions, text: Text | None
) -> dict[str, Field]:
    """The columns of a dataframe that were trained on, by the rules of `Population.from_dataframe`."""
    names = [name for name in without_lengths(given, options.entries()) if not trained or name in trained]
    _check_some(names, given, trained)
    fields = read_fields(frame, names, text=text, options=options)
    _check_numbers(fields, options)
    return {**fields}


def _mapped(name: str, values: Any, options: ColumnOptions, text: Text | None) -> dict[str, Field]:
    """A column of a mapping as a field, or as two where it has a declared length."""
    if not hasattr(values, "__len__") or isinstance(values, str) or getattr(values, "ndim", 1) == 0:
        raise PopulationError(f"{name!r} is {type(values).__name__} and no array of numbers: {_WAY_OUT}")
    if text is not None and name not in options.categories and _is_text(values):
        values = text(list(values))
    if not options.concern(name):
        return {name: _array(name, values)}
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    made = fields_of_arrays({name: values}, options.only_of(name))
    fields: dict[str, Field] = {field: np.asarray(values) for field, values in made.items()}
    _check_numbers(fields, options)
    return fields


def _is_text(values: Any) -> bool:
    """Whether a column of a mapping holds texts, one an example."""
    return not isinstance(values, str | Tensor) and len(values) > 0 and all(isinstance(one, str) for one in values)


def _check_numbers(fields: Mapping[str, Field], options: ColumnOptions) -> None:
    """Refuse gaps as the training did."""
    if options.missing != ZERO_UPDATE:
        for name, array in fields.items():
            check_finite(f"field {name!r}", array)


def _check_alike(population: Population, trained: Sequence[str], options: ColumnOptions) -> None:
    """Refuse a population whose fields mean something else than those of the training."""
    theirs, ours = ColumnOptions.of(population.column_options), options
    for name in trained:
        if name in population.fields and theirs.shaping(name) != ours.shaping(name):
            raise refuse(
                f"column options of {name!r}", "others", "those of the training, which its card has",
                "make the population with the same, or give the table itself",
            )  # fmt: skip


def _check_some(found: Any, given: Sequence[Any], trained: Sequence[str]) -> None:
    if not found:
        known = ", ".join(trained) or "any"
        way_out = (perhaps_renamed(trained[0], given) if trained else "") or "rename its columns"
        raise PopulationError(
            f"data has {', '.join(map(str, given)) or 'no field'} and none of the fields trained on, {known}: {way_out}"
        )


def _read_file(path: Path, trained: Sequence[str], options: ColumnOptions, keep: Sequence[str]) -> Any:
    """A table, a mapping of arrays or a population, as the name says."""
    if is_folder(path):
        return Population.open(path)
    if not is_file(path):
        raise PopulationError(f"data={str(path)[:200]!r} is no file: {_WAY_OUT}")
    if path.suffix.lower() != ".npz":
        return whole_table(path, options, as_text=[one for one in keep if one not in trained])  # 007 stays so
    return members(path)


def class_names(classes: object, card: Mapping[str, Any]) -> list[str] | None:
    """The classes by name: as given in a list, or the categories of the field that is named; None if it has none.

    A field of categories has one class more than is listed, for all other values.
    """
    if classes is None:
        return None
    if isinstance(classes, str):
        known = card.get("fields", {})
        if known and classes not in known:
            raise SettingError(f"classes={classes!r} is no field of the training: {nearest(classes, known)}")
        listed = card.get("columns", {}).get("categories", {}).get(classes)
        if listed is None:
            return None
        names = list(map(str, listed))
        return [*names, _OTHER if _OTHER not in names else f"{_OTHER} values"]
    if (
        not isinstance(classes, Sequence)
        or not classes
        or len(set(map(str, classes))) < len(classes)
        or any(one is None or not str(one).strip() for one in classes)
    ):
        raise refuse(
            "classes", classes, "a list of different names, or the field that is predicted", 'give ["no", "yes"]'
        )
    return list(map(str, classes))


def named_columns(
    scores: NDArray[Any], names: Sequence[str] | None, *, of_field: bool = False
) -> dict[str, NDArray[Any]]:
    """`prediction` (rows,) and a column for each class, of scores (rows, classes).

    These are called probability_NAME if they are at least 0 and add up to 1 in each row, and score_NAME otherwise. The
    last name `of_field`, for all other values, may be one that the model does not tell. Without names: 0, 1, ...
    Scores that are not numbers are refused: none of them is the largest.
    """
    count = scores.shape[1]
    if spoiled := int(np.isnan(scores).any(axis=1).sum()):
        way_out = "look at the model's parameters and the data, or call it without classes"
        raise refuse("prediction", f"NaN in {spoiled} of {len(scores)} rows", "numbers, to name a class", way_out)
    if names is None:
        names, prediction = list(map(str, range(count))), scores.argmax(axis=1)
    elif count != len(names) and not (of_field and count == len(names) - 1):
        raise refuse("classes", list(names), f"as many as the model predicts, {count}", "give a name for each output")
    else:
        names = list(names)[:count]
        prediction = np.array(names, object)[scores.argmax(axis=1)] if len(scores) else np.array([], object)
    chances = bool((scores >= 0).all()) and bool((np.abs(scores.sum(axis=1) - 1) < _SUM).all())
    kind = "probability" if chances else "score"
    return {PREDICTION: prediction, **{f"{kind}_{name}": scores[:, place] for place, name in enumerate(names)}}
