"""Advice at the end of errors about a model's missing code: for callers in Python, and for the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WaysOut:
    """What an error message advises, in each case of missing code."""

    file: str  # to name the file that defines the model
    module: str  # to bring the model itself
    predict: str  # to say how the model predicts
    saved: str  # where the model was stored without saying what makes it


PYTHON = WaysOut(
    file='give load(path, model="FILE.py")',
    module="give load(path, model=MyModel())",
    predict='give load(..., predict=lambda model, batch: model(batch["x"])), say',
    saved="give load(path, model=MyModel()), an untrained one of the same class and shapes",
)
COMMAND_LINE = WaysOut(
    file="give --model FILE.py",
    module="load it in Python, with clipline.load(path, model=MyModel())",
    predict="define predict(model, batch) in FILE.py and give --model FILE.py",
    saved="give --model FILE.py, a file with a function model() that makes an untrained one",
)
