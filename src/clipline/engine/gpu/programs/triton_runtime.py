"""What Triton needs before it launches kernels in several threads: launchers made one at a time.

A launcher is the small C module that hands a kernel its arguments; kernels of the same signature share one. Python
loads a C module that it has loaded before into the module object under its name, and all launchers have one name,
`__triton_launcher`. A thread that loads one between another thread's loading and reading replaces what that reads. Such
a kernel fails ("function takes exactly 20 arguments (24 given)"), or, where both have as many arguments, it is handed
arguments of other types, and nothing fails. So a lock lets one thread at a time make one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

try:
    from triton.runtime import driver as triton_driver  # type: ignore[import-not-found]
except ImportError:  # torch for cores comes without Triton
    triton_driver = None


class OneAtATime:
    """What makes launchers, behind a lock."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make, self._lock = make, threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A launcher."""
        with self._lock:
            return self.make(*args, **kwargs)


def prepare_triton() -> None:
    """For the rest of this process, whoever launches kernels; needs a GPU. A second call changes nothing."""
    if triton_driver is None:
        return
    active = triton_driver.active
    if not isinstance(active.launcher_cls, OneAtATime):
        active.launcher_cls = OneAtATime(active.launcher_cls)
