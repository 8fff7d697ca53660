"""What a caller asks of named columns (gaps, categories, timestamps, widths, scales), stored with the population.

Everything here is given by the caller and nothing is learned from the data, so it costs no privacy. (A scale may come
from private statistics, which have been charged where they were made.)
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PopulationError, SettingError, check_whole, nearest, refuse
from ..privacy.events import GaussianEvent
from .chunks import FieldChunk
from .packed_field import Field, PackedField, stored_values

ZERO_UPDATE = "zero-update"
_SINCE = re.compile(r"(seconds|minutes|hours|days) since (\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2})?)?)")
_SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
_BY_COLUMN = ("fill", "categories", "timestamps", "lengths", "scale")

_WIDEST = 1 << 24  # entries of a list, more than which no batch could hold


@dataclass(frozen=True)
class ColumnOptions:
    """How columns become numbers that are not numbers yet, or not all of them.

    `missing`: None refuses gaps (NaN, None, null), a number fills them, "zero-update" keeps them as NaN: then a user
    who trains on one adds nothing. `fill` fills by column, and goes first. `categories` lists the values of a column,
    in the order of their codes 0, 1, ...; whatever is not listed, a gap too, gets the code after the last. `timestamps`
    says what to count, as in "hours since 2026-01-01"; times without a zone are UTC. `lengths` is the width to which
    the lists of a column are cut or, with `pad`, filled; see `sequences`. `scale` maps a column to (subtract, divide),
    numbers or one for each entry of a row, and comes last.
    """

    missing: float | str | None = None
    fill: Mapping[str, float | str] = field(default_factory=dict)
    categories: Mapping[str, Sequence[str | int]] = field(default_factory=dict)
    timestamps: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    pad: float = 0
    scale: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = self.missing == ZERO_UPDATE if isinstance(self.missing, str) else _is_number(self.missing)
        if self.missing is not None and not known:
            shown = self.missing if isinstance(self.missing, str) else type(self.missing).__name__
            raise refuse(
                "missing", shown, f'a finite number or "{ZERO_UPDATE}"',
                "0.0 fills gaps with zero; leave it out to refuse gaps",
            )  # fmt: skip
        for name in _BY_COLUMN:
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise refuse(name, type(value).__name__, "a dict by column", f"give {name}={{'column': ...}}")
        for column, value in self.fill.items():
            if not isinstance(value, str) and not _is_number(value):
                raise refuse(f"fill[{column!r}]", value, "a finite number", "give what stands in for a gap, such as 0")
        for column, listed in self.categories.items():
            _check_categories(column, listed)
        for column, since in self.timestamps.items():
            if not isinstance(since, str) or not _SINCE.fullmatch(since):
                raise refuse(
                    f"timestamps[{column!r}]", since, "seconds, minutes, hours or days since a date",
                    'give it as "hours since 2026-01-01"',
                )  # fmt: skip
            _origin(column, since)
        for column, width in self.lengths.items():
            way_out = "give the most entries of a list that you want to keep, as in lengths={'tokens': 128}"
            check_whole(f"lengths[{column!r}]", width, at_least=1, at_most=_WIDEST, way_out=way_out)
        if not _is_number(self.pad):
            shown = self.pad if isinstance(self.pad, str) else type(self.pad).__name__
            raise refuse("pad", shown, "a finite number", "0 is usual: a model tells padding by the length, not by it")
        for column, both in self.scale.items():
            _check_scale(column, both)

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> ColumnOptions:
        """From what `entries` gave, as a manifest holds it. What is unknown or out of range is refused."""
        known = [one.name for one in fields(cls)]
        if not isinstance(entries, Mapping):
            raise refuse("column_options", type(entries).__name__, f"a dict with {', '.join(known)}", "give one")
        for name in entries:
            if name not in known:
                raise SettingError(f"{name!r} is no option of columns: {nearest(name, known)}")
        return cls(**entries)

    def entries(self) -> dict[str, Any]:
        """What was asked for, as JSON can hold it; empty if nothing."""
        everything = {
            "missing": self.missing if self.missing is None or isinstance(self.missing, str) else _plain(self.missing),
            "fill": {name: value if isinstance(value, str) else _plain(value) for name, value in self.fill.items()},
            "categories": {
                name: [one if isinstance(one, str) else int(one) for one in listed]
                for name, listed in self.categories.items()
            },
            "timestamps": dict(self.timestamps),
            "lengths": {name: int(width) for name, width in self.lengths.items()},
            "pad": _plain(self.pad) if self.pad != 0 else None,
            "scale": {
                name: [np.asarray(one, np.float64).tolist() for one in both] for name, both in self.scale.items()
            },
        }
        return {name: value for name, value in everything.items() if value is not None and value != {}}

    def check_columns(self, names: Iterable[str]) -> None:
        """Refuse an option for a column that is not there: a misspelt name would do nothing in silence."""
        known = list(names)
        for option in _BY_COLUMN:
            for column in getattr(self, option):
                if column not in known:
                    raise PopulationError(f"{option} names {column!r}, which is no field: {nearest(column, known)}")

    def fill_of(self, name: str) -> float | str | None:
        """What stands in for gaps of a column; None if nothing does."""
        everywhere = None if self.missing == ZERO_UPDATE else self.missing
        return self.fill.get(name, everywhere)

    def shaping(self, name: str) -> dict[str, Any]:
        """What decides the meaning of the numbers of a field; equal for two fields that mean the same."""
        entries = self.entries()
        one = {option: entries[option][name] for option in _BY_COLUMN[1:] if name in entries.get(option, {})}
        return {**one, "pad": self.pad} if "lengths" in one else one

    def concern(self, name: str) -> bool:
        """Whether any option says something of this column."""
        return self.fill_of(name) is not None or any(name in getattr(self, option) for option in _BY_COLUMN)

    def only_of(self, name: str) -> ColumnOptions:
        """The options of one column alone."""
        entries = self.entries()
        for option in _BY_COLUMN:
            entries[option] = {column: value for column, value in entries.get(option, {}).items() if column == name}
        return ColumnOptions.of(entries)

    def as_text(self) -> set[str]:
        """Columns whose categories are text: in CSV their values are read as they are written, 007 too."""
        return {name for name, listed in self.categories.items() if isinstance(listed[0], str)}

    def scales_alike(self, name: str) -> bool:
        """Whether one pair of numbers scales all entries of a row of this column."""
        return np.ndim(self.scale[name][0]) == 0

    def scaled(self, name: str, field: Field) -> Field:
        """A field of numbers (rows, ...) less its offset, over its divisor; as it is, where it has no scale.

        Lists whose entries are not all scaled alike are padded.
        """
        if name not in self.scale:
            return field
        if isinstance(field, PackedField) and self.scales_alike(name):
            return field.converted(lambda values: self.scaled_array(name, values))
        return self.scaled_array(name, np.asarray(field))

    def scaled_array(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """What `scaled` does to an array; the column has a scale."""
        subtract, divide = (np.asarray(one, np.float64) for one in self.scale[name])
        if array.dtype.kind not in "biuf" or any(
            one.ndim and one.shape != array.shape[1:] for one in (subtract, divide)
        ):
            raise PopulationError(
                f"field {name!r} is {array.dtype} with rows of shape {array.shape[1:]} but its scale is for numbers of "
                f"shape {subtract.shape}: give one number, or one for each entry of a row"
            )
        with np.errstate(over="ignore"):  # what becomes infinite is refused where fields are checked
            return np.asarray((array.astype(np.float64) - subtract) / divide)

    def checked(self, chunks: Iterable[FieldChunk]) -> Iterator[FieldChunk]:
        """The chunks of a population, refused at their end if no value of a column is among its categories.

        These are then misspelt, most likely: as categories all values would be "anything else", and easy to predict.
        """
        rows = dict.fromkeys(self.categories, 0)
        for ids, columns in chunks:
            # Of lists without their padding, which may have a category's code.
            present = {name: stored_values(columns[name]) for name in rows if name in columns}
            for name, values in present.items():
                if not values.size:
                    continue
                none_listed = bool((values == len(self.categories[name])).all())
                rows[name] = rows[name] + len(columns[name]) if none_listed else -(2**62)
            yield ids, columns
        for name, unlisted in rows.items():
            if unlisted > 0:
                raise PopulationError(
                    f"none of the {unlisted} values of {name!r} is among its {len(self.categories[name])} categories: "
                    "give them as they are written in the data, capitals and spaces too"
                )

    def applied(self, name: str, column: NDArray[Any]) -> NDArray[Any]:
        """A column with its options applied but for widths and scales; as it is, where none concerns it."""
        if name in self.categories:
            return _codes(name, column, self.categories[name])
        if name in self.timestamps:
            column = _counted(name, column, self.timestamps[name])
        stand_in = self.fill_of(name)
        if column.dtype.kind == "f" and stand_in is not None and (gaps := np.isnan(column)).any():
            return np.where(gaps, column.dtype.type(number_for(name, stand_in)), column)
        return column


def charges_of(options: Mapping[str, Any]) -> tuple[GaussianEvent, ...]:
    """The private statistics among what was given as options: a vocabulary as categories, moments as a scale."""
    found: dict[GaussianEvent, None] = {}
    for value in options.values():
        for one in (value, *(value.values() if isinstance(value, Mapping) else ())):
            if isinstance(event := getattr(one, "event", None), GaussianEvent):
                found[event] = None
    return tuple(found)


def number_for(name: str, stand_in: float | str) -> float:
    """The number that fills gaps of a column of numbers; text is refused."""
    if isinstance(stand_in, str):
        raise SettingError(f"fill[{name!r}] is text but the column holds numbers: give a number")
    return stand_in


def _is_number(value: object) -> bool:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return bool(np.isfinite(float(value)))
    except OverflowError:  # a whole number of hundreds of digits
        return False


def _plain(value: float) -> float | int:
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _check_categories(column: str, listed: object) -> None:
    way_out = "list the values that you know beforehand, as in ['bus', 'tram']"
    name = f"categories[{column!r}]"
    if isinstance(listed, str | bytes) or not isinstance(listed, Sequence | np.ndarray) or not len(listed):
        raise refuse(name, type(listed).__name__, "a list of at least 1 value", way_out)
    whole = [isinstance(one, numbers.Integral) and not isinstance(one, bool) for one in listed]
    if not all(whole) and not all(isinstance(one, str) for one in listed):
        raise refuse(name, "a list", "all text or all whole numbers", way_out)
    if len(set(listed)) < len(listed):
        raise refuse(name, "a list", "without a value that comes twice", "list each once")


def _check_scale(column: str, both: object) -> None:
    name, way_out = f"scale[{column!r}]", "as in scale={'age': (40, 20)}: 40 is subtracted, then 20 divides"
    if isinstance(both, str | bytes) or not isinstance(both, Sequence | np.ndarray) or len(both) != 2:
        raise refuse(name, type(both).__name__, "two: what is subtracted, and what divides", way_out)
    try:
        subtract, divide = (np.asarray(one, np.float64) for one in both)
    except (ValueError, TypeError, OverflowError):
        raise refuse(name, "a list", "numbers, or lists of them of equal shape", way_out) from None
    if not np.isfinite(subtract).all() or not np.isfinite(divide).all() or not (divide > 0).all():
        raise refuse(name, "a list", "finite, and what divides above 0", way_out)
    if subtract.shape != divide.shape:
        raise refuse(name, "a list", "two numbers, or two lists of equal shape", way_out)


def _codes(name: str, column: NDArray[Any], listed: Sequence[str | int]) -> NDArray[np.int32]:
    """The place of each value in the list, or the number after the last: (rows,) int32."""
    if column.ndim != 1:
        raise PopulationError(f"field {name!r} has {column.ndim} axes but categories need 1: give one value an example")
    as_text = isinstance(listed[0], str)
    values = column.tolist()
    if _another_kind(column.dtype.kind, values, as_text):
        held, given = ("numbers", "text") if as_text else ("text or dates", "numbers")
        raise PopulationError(f"field {name!r} holds {held} but its categories are {given}: give both as one kind")
    places: dict[object, int] = {one: place for place, one in enumerate(listed)}
    return np.fromiter((places.get(value, len(listed)) for value in values), np.int32, len(values))


def _another_kind(kind: str, values: list[Any], as_text: bool) -> bool:
    """Whether a column holds numbers where categories are text, or the other way round: nothing would be found."""
    if kind != "O":
        return kind in "iufb" if as_text else kind in "USM"
    present = [one for one in values if isinstance(one, str) or (isinstance(one, numbers.Real) and one == one)]
    return bool(present) and all(isinstance(one, str) != as_text for one in present)


def _origin(column: str, since: str) -> tuple[int, np.datetime64]:
    """Seconds of the unit, and the time that counts as 0."""
    match = _SINCE.fullmatch(since)
    assert match is not None
    try:
        return _SECONDS[match[1]], np.datetime64(match[2].replace(" ", "T"), "us")
    except ValueError:
        raise refuse(f"timestamps[{column!r}]", since, "since a day of the calendar", "mend the date") from None


def _counted(name: str, column: NDArray[Any], since: str) -> NDArray[np.float64]:
    """Units since the origin, float64; a gap is NaN."""
    unit, origin = _origin(name, since)
    if column.dtype.kind != "M":
        raise PopulationError(
            f"field {name!r} is {column.dtype} but timestamps need dates: convert it, as with pd.to_datetime"
        )
    gaps = np.isnat(column)
    # Microseconds as int64 reach 290,000 years; the difference is exact before it becomes a fraction.
    passed = (column.astype("M8[us]") - origin).astype(np.int64)
    return np.where(gaps, np.nan, passed / (unit * 1e6))


NO_OPTIONS = ColumnOptions()
