"""What other packages add to clipline, by entry points: tasks, commands, data sets and kinds of experiments."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from .errors import RunError, first_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class BrokenPackageWarning(UserWarning):
    """An installed package registers something that cannot be used; it is left out."""


@cache
def _registered(group: str) -> dict[str, list[EntryPoint]]:
    from importlib.metadata import entry_points  # takes as long as all else that `clipline --help` imports

    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=f"clipline.{group}"):
        found.setdefault(entry.name, []).append(entry)
    return found


def names(group: str, own: Iterable[str] = ()) -> Sequence[str]:
    """Clipline's own names, then those that packages register in `clipline.GROUP`. Nothing of theirs is imported.

    A package cannot take one of clipline's own: it is named in a warning.
    """
    mine = tuple(own)
    for name in mine:
        if name in _registered(group):
            told = f"{_told(group, name)} has a name that clipline has itself: it is left out"
            warnings.warn(told, BrokenPackageWarning, stacklevel=2)
    return tuple(dict.fromkeys([*mine, *_registered(group)]))


def _told(group: str, name: str) -> str:
    packages = [entry.dist.name if entry.dist else entry.module for entry in _registered(group)[name]]
    return f"the entry point {name!r} of clipline.{group} in the package {' and in '.join(sorted(packages))}"


def registered(group: str, name: str, kind: type[T]) -> T:
    """The object that a package registers under this name, imported now.

    Raises:
      RunError: If two packages register the name, or if it cannot be imported or is not of this kind.

    """
    first, *others = _registered(group)[name]
    what, way_out = _told(group, name), "update that package, or uninstall it"
    if others:
        raise RunError(f"{what} stands more than once: uninstall all of these packages but one")
    try:
        found = first.load()
    except Exception as error:  # whatever a module of another package may raise
        reason = first_line(error)
        raise RunError(f"{what} cannot be loaded ({type(error).__name__}: {reason}): {way_out}") from error
    if not isinstance(found, kind):
        raise RunError(f"{what} is a {type(found).__name__} but must be a {kind.__name__}: {way_out}")
    return found


def all_registered(group: str, kind: type[T]) -> dict[str, T]:
    """All objects of a group by name. Warns of those that cannot be used, and leaves them out."""
    found = {}
    for name in names(group):
        try:
            found[name] = registered(group, name, kind)
        except RunError as error:
            warnings.warn(str(error), BrokenPackageWarning, stacklevel=2)
    return found
