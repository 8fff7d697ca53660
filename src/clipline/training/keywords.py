"""Where a keyword argument belongs that was given to `Training` itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import ParamSpec

from ..errors import SettingError, shown
from ..federated.clip_controllers import QuantileClip
from ..federated.local_sgd import LocalSGD
from ..federated.server_optimisers import ServerSGD
from ..synonyms import SYNONYMS, meant
from .options import Compute, Privacy

Given = ParamSpec("Given")

_PARTS = {"privacy": Privacy, "local": LocalSGD, "clip": QuantileClip, "server": ServerSGD, "compute": Compute}


def says_where_keywords_belong(init: Callable[Given, None]) -> Callable[Given, None]:
    """A constructor that refuses an unknown keyword argument with the place where it belongs.

    Checked first: a call with `epsilon=4` also leaves out `privacy`, and Python would report only what is missing.
    """
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(*args: Given.args, **keywords: Given.kwargs) -> None:
        for name, value in keywords.items():
            if name not in known:
                raise _misplaced(name, value, known)
        init(*args, **keywords)

    return checked


def _misplaced(name: str, value: object, known: Iterable[str]) -> SettingError:
    """The error for a keyword that `Training` has not.

    Of the settings' names those of the command line count too, and those that other libraries have for them.
    """
    if SYNONYMS.get(name) == "clip":  # `LocalSGD` has a clip_norm too, which has nothing to do with privacy
        return SettingError(
            f"{name}={shown(value)} is no argument of Training: give clip=FixedClip({shown(value)}), or leave it out, "
            "and the clip follows the median of the users' norms"
        )
    for word in (name, SYNONYMS.get(name, name)):
        for keyword, part in _PARTS.items():
            for taken in fields(part):
                if word in (taken.name, taken.metadata.get("setting")):
                    place = f"{keyword}={part.__name__}({taken.name}={shown(value)})"
                    return SettingError(
                        f"{name}={shown(value)} is no argument of Training but of {part.__name__}: give {place}"
                    )
    return SettingError(
        f"{name}={shown(value)} is no argument of Training, nor of its parts: {meant(name, [*known][1:])}"
    )
