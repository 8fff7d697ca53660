"""Predictions of classes as columns: the name of the most likely class, and a number for each class under its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SettingError, nearest, refuse

PREDICTION = "prediction"
_OTHER = "other"  # the class after the listed ones, of whatever is not listed
_SUM = 1e-3  # how far from 1 the chances of a row may add up, in 16 bits


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
