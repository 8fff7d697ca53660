"""Whose code is whose: what belongs to a library is not inspected, what is the caller's is."""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Any

_TRUSTED = {"clipline", "torch", "numpy", "triton", *sys.stdlib_module_names} - {"__main__"}
_callers: set[str] = set()  # installed packages that a loss came from


def installed_folders(search_path: Iterable[str]) -> tuple[str, ...]:
    """Folders of installed libraries: this environment's, and those that it looks into as well.

    With `pip install --user` or `--system-site-packages` libraries are in other folders than those of the environment.
    """
    others = (path for path in search_path if PurePath(path).name in ("site-packages", "dist-packages"))
    return tuple(dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *others)))


_INSTALLED = installed_folders(sys.path)
_PYTHON = (sys.prefix, sys.base_prefix, sys.base_exec_prefix, str(PurePath(types.__file__).parent), *_INSTALLED)


def add_caller(loss: Callable[..., Any]) -> None:
    """From now on the package of this loss is the caller's, although it is installed: only a caller writes losses."""
    while isinstance(loss, functools.partial | types.MethodType):
        loss = loss.func if isinstance(loss, functools.partial) else loss.__func__
    where = loss.__globals__.get("__name__") if isinstance(loss, types.FunctionType) else type(loss).__module__
    package = str(where).partition(".")[0]
    if package not in _callers:
        _callers.add(package)
        from_installed.cache_clear()


@functools.cache
def from_installed(module_name: str) -> bool:
    """Whether a Python module belongs to a library: Python's, torch's, or one that is installed.

    Not so an installed package that a loss came from: that is the caller's own.
    """
    top = module_name.partition(".")[0]
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if top in _TRUSTED:  # but a file of the caller's may have the name of one of Python's, as profile.py
        return not (top in sys.stdlib_module_names and isinstance(file, str) and not file.startswith(_PYTHON))
    if not isinstance(file, str) or not file.startswith(_INSTALLED):
        return False
    return top not in _callers


def installed(thing: Any) -> bool:
    """Whether a class or function belongs to a library: those are not inspected.

    For a function its globals decide: `functools.wraps` copies another function's `__module__`.
    """
    if isinstance(thing, types.FunctionType):
        return from_installed(str(thing.__globals__.get("__name__", "")))
    name = getattr(thing, "__module__", None)
    return from_installed(name if isinstance(name, str) and name else "builtins")  # of Cython's classes it is no text
