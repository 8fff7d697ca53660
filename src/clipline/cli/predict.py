"""`clipline predict`: what a trained model says of each row of a table, as a file."""

from __future__ import annotations

import csv
import json
import zipfile
from pathlib import Path
from typing import Any

from ..console import say
from ..errors import PopulationError, RunError, SettingError, check_choice, refuse
from .parser import JSON, PATH, Argument, Command, Option

_ENDINGS = (".csv", ".jsonl", ".parquet", ".npz")


def predict(
    run: Path, data: Path, out: Path, model: str | None, keep: tuple[str, ...], classes: str | None, as_json: bool
) -> None:
    """Predict with a trained model, a row for each row of a table, in its order.

    clipline predict runs/rides --model rides.py --data new_rides.csv --out predicted.csv

    RUN is a run directory of clipline train, or a folder of result.save. --model names the file that defines the model,
    which is run; it is left out for clipline's own tasks. Columns are read as in the training; the label and the user
    column may be missing. Where the file has LABEL, or --classes says what is predicted, a column has the name of the
    class and others the chance of each; --keep brings columns such as an id along.
    """
    check_choice("ending of out", out.suffix, _ENDINGS)
    if out.exists():
        raise RunError(f"out={str(out)!r} is there already: give a new file")
    from ..serve.load import load

    given = next(csv.reader([classes], skipinitialspace=True)) if classes else []
    named = given if len(given) > 1 else classes
    saved = load(run, model, classes=named)
    answer = saved.predict(data, keep=[name for one in keep for name in next(csv.reader([one], skipinitialspace=True))])
    rows = len(next(iter(answer.values())) if isinstance(answer, dict) else answer)
    if rows == 0:
        raise PopulationError(f"data={str(data)!r} has no rows: give a table with examples")
    columns = _columns(answer)
    _write(columns, out)
    if as_json:
        print(json.dumps({"out": str(out), "rows": rows, "columns": list(columns), "guarantee": str(saved)}))
        return
    say(f"{out}: {rows:,} predictions ({', '.join(columns)})")
    say(f"the model is {saved}")


def _columns(answer: Any) -> dict[str, Any]:
    """One column for each number that is predicted of a row: prediction, or prediction_0, prediction_1, ..."""
    named = answer if isinstance(answer, dict) else {"prediction": answer}
    columns: dict[str, Any] = {}
    for name, array in named.items():
        flat = array.reshape(len(array), -1)
        some = {name: array} if array.ndim == 1 else {f"{name}_{place}": one for place, one in enumerate(flat.T)}
        for twice in columns.keys() & some.keys():
            raise refuse("keep", twice, "named other than the predictions", "rename that column")
        columns |= some
    return columns


def _write(columns: dict[str, Any], out: Path) -> None:
    """Write the columns as the name ends; the file is there whole or not at all."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial{out.suffix}")
    try:
        if out.suffix == ".npz":
            with zipfile.ZipFile(partial, "w") as archive:  # numpy.savez has arguments, and no columns of their names
                for name, column in columns.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                        np.lib.format.write_array(file, _no_objects(column), allow_pickle=False)
        elif out.suffix == ".jsonl":
            rows = zip(*(column.tolist() for column in columns.values()), strict=True)
            lines = (json.dumps(dict(zip(columns, row, strict=True)), default=_text) + "\n" for row in rows)
            partial.write_text("".join(lines), encoding="utf-8")
        elif out.suffix == ".csv":
            pyarrow.csv.write_csv(pa.table(columns), partial)
        else:
            pyarrow.parquet.write_table(pa.table(columns), partial)
        partial.replace(out)
    except (pa.ArrowException, ValueError) as error:
        raise SettingError(
            f"out={str(out)!r} cannot hold these columns ({error}): give a file that ends in .jsonl"
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def _text(value: object) -> str:
    """What JSON has no kind for, such as a date or a decimal."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _no_objects(column: Any) -> Any:
    """Text of fixed width in the place of Python objects, which NPZ would pickle."""
    return column.astype(str) if column.dtype == object else column


command = Command(
    "predict",
    predict,
    [
        Argument(["run"], type=PATH, help="A folder with a trained model."),
        Option(["--data"], type=PATH, required=True, metavar="FILE|DIR", help="The table, or a folder made of one."),
        Option(["--out"], type=PATH, required=True, help=f"A new file: {', '.join(_ENDINGS)}."),
        Option(
            ["--model"], metavar="FILE.py|TASK", unset="that of the training, if it is clipline's own",
            help="Where the model is defined; the file is run.",
        ),
        Option(
            ["--keep", "--id", "keep"], metavar="COLUMN", multiple=True,
            help="A column of the table to write too, such as an id; several as a,b (quotes keep a comma).",
        ),
        Option(
            ["--classes"], metavar="COLUMN|A,B,...", unset="LABEL of the file",
            help="The column that is predicted, or names of the classes in the order of the model's outputs.",
        ),
        JSON,
    ],
)  # fmt: skip
