"""What other packages add to clipline, by entry points: tasks, commands, data sets and kinds of experiments."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from .errors import RunError

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


def names(group: str) -> Sequence[str]:
    """The names that packages register in the group `clipline.GROUP`. Nothing of theirs is imported."""
    return tuple(_registered(group))


def registered(group: str, name: str, kind: type[T]) -> T:
    """The object that a package registers under this name, imported now.

    Raises:
      RunError: If two packages register the name, or if it cannot be imported or is not of this kind.

    """
    entries = _registered(group)[name]
    packages = " and ".join(entry.dist.name if entry.dist else entry.module for entry in entries)
    what = f"the entry point {name!r} of clipline.{group}"
    if len(entries) > 1:
        raise RunError(f"{what} is registered by {packages}, and only one can have it: uninstall the others")
    try:
        found = entries[0].load()
    except Exception as error:  # whatever a module of another package may raise
        reason = (str(error).strip() or "no message").splitlines()[0]
        told = f"{what} of the package {packages} cannot be loaded ({type(error).__name__}: {reason})"
        raise RunError(f"{told}: update {packages}, or uninstall it") from error
    if not isinstance(found, kind):
        told = f"{what} of the package {packages} is a {type(found).__name__} but must be a {kind.__name__}"
        raise RunError(f"{told}: update {packages}, or uninstall it")
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
