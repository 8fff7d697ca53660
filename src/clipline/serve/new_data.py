"""New data as fields of a batch, by the rules of the training: from tables, arrays and populations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..data.column_options import ColumnOptions
from ..data.fields import field_array
from ..errors import PopulationError, refuse
from ..federated.population import Population

_ROW = "row of clipline.load"  # a user column for tables that need none: each row is a user, so the order is kept
_WAY_OUT = "give a dataframe, a table file, a Population, or arrays by field name"


def arrays_of(
    data: Any, trained: Sequence[str], options: Mapping[str, Any] | None = None, *, only: str
) -> dict[str, NDArray[Any]]:
    """Fields by name, all with as many examples; a single array is named `only`.

    Of a table only columns in `trained` are read, or all if that is empty. `options` are those of the columns in the
    training, as a population has them: they are applied to tables and named arrays. The fields of a population are
    taken as they are.
    """
    options = {} if options is None else options
    if isinstance(data, str | Path):
        data = _read_file(Path(data), trained, options)
    if isinstance(data, Population):
        fields = dict(data.fields)
    elif isinstance(data, Mapping):
        chosen = [name for name in data if not trained or name in trained]
        fields = {str(name): _array(str(name), data[name], options) for name in chosen}
        _check_some(fields, list(data), trained)
    elif _is_frame(data):
        fields = _columns(data, trained, options)
    else:
        fields = {only: _array("data", data, {})}
    sizes = {name: len(array) for name, array in fields.items()}
    if len(set(sizes.values())) > 1:
        raise refuse("numbers of examples", sizes, "the same in all fields", "give as many of each")
    return fields


def field_like(name: str, array: NDArray[Any], trained: Mapping[str, Any]) -> NDArray[Any]:
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
    if (cast != array).any():
        raise refuse(f"type of {name!r}", str(array.dtype), f"{dtype} as in the training", "round or convert it before")
    return cast


def _array(name: str, values: Any, options: Mapping[str, Any]) -> NDArray[Any]:
    if any(options_for([name], options).values()):
        return field_array(name, values, ColumnOptions.of(options_for([name], options)))
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError) as error:
        raise PopulationError(f"{name!r} cannot be read as an array ({error}): {_WAY_OUT}") from None
    if array.ndim == 0 or array.dtype == object:
        raise PopulationError(f"{name!r} is {type(values).__name__} and no array of numbers: {_WAY_OUT}")
    return array


def options_for(names: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a training that concern these columns: a label that is not there needs none."""
    return {
        option: {name: one for name, one in value.items() if name in names} if isinstance(value, Mapping) else value
        for option, value in options.items()
    }


def _is_frame(data: Any) -> bool:
    """A dataframe or a table of pyarrow, and no single column."""
    return hasattr(data, "columns") and (
        hasattr(data, "__arrow_c_stream__") or type(data).__module__.partition(".")[0] == "pandas"
    )


def _columns(frame: Any, trained: Sequence[str], options: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """The columns of a dataframe that were trained on, by the rules of `Population.from_dataframe`."""
    import pyarrow as pa

    try:
        if type(frame).__module__.partition(".")[0] == "pandas":
            frame = frame[[name for name in frame.columns if not trained or name in trained]]
            table = pa.Table.from_pandas(frame, preserve_index=False)
        else:
            table = pa.table(frame)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise PopulationError(f"dataframe cannot be read ({str(error).partition(chr(10))[0]}): {_WAY_OUT}") from None
    names = [name for name in table.column_names if not trained or name in trained]
    _check_some(names, table.column_names, trained)
    table = table.select(names).append_column(_ROW, pa.array(np.arange(table.num_rows)))
    return dict(Population.from_dataframe(table, user=_ROW, fields=names, **options_for(names, options)).fields)


def _check_some(found: Any, given: Sequence[Any], trained: Sequence[str]) -> None:
    if not found:
        known = ", ".join(trained) or "any"
        raise PopulationError(
            f"data has {', '.join(map(str, given)) or 'no field'} and none of the fields trained on, {known}: rename "
            "its columns"
        )


def _read_file(path: Path, trained: Sequence[str], options: Mapping[str, Any]) -> Any:
    """A table, a mapping of arrays or a population, as the name says."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.json
    import pyarrow.parquet

    if path.is_dir():
        return Population.open(path)
    if not path.is_file():
        raise PopulationError(f"data={str(path)!r} is no file: {_WAY_OUT}")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files if not trained or name in trained}
        if path.suffix == ".parquet":
            return pyarrow.parquet.read_table(path)
        if path.suffix == ".csv":
            listed = options.get("categories", {})
            text = {name: pa.string() for name, values in listed.items() if isinstance(values[0], str)}
            return pyarrow.csv.read_csv(path, convert_options=pyarrow.csv.ConvertOptions(column_types=text))
        if path.suffix == ".jsonl":
            return pyarrow.json.read_json(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise PopulationError(f"{str(path)!r} cannot be read ({error}): mend it or copy it again") from None
    raise PopulationError(f"{str(path)!r} must end in .parquet, .csv, .jsonl or .npz: convert it")
