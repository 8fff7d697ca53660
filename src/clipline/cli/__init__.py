"""The command line. Begin with `parser`, which names the commands and makes flags of settings; each has a file.

Every command checks before it works, and fails in one sentence with exit code 2.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from ..console import fail, rendered, say, tell
from ..errors import CliplineError, printable
from ..lazy_names import lazily

if TYPE_CHECKING:
    from .parser import Argument, Command, Option, flags_for

__all__ = ["Argument", "Command", "Option", "fail", "flags_for", "main", "say", "tell"]
__getattr__, __dir__ = lazily(__name__, {".parser": "Argument Command Option flags_for"})


def main() -> None:
    """Entry point of the `clipline` command."""
    warnings.formatwarning = _form_warning
    # Work is shared among processes. NumPy's own threads gain nothing there, and wait for each other on a busy machine.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A path need not be valid text, and a terminal need not have every letter: print what it has not as \x or \u.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    import click

    from .parser import app

    try:
        code = app.main(prog_name="clipline", standalone_mode=False)  # errors and exit codes are ours
        if code:
            sys.exit(code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        help_of = f" See {context.command_path} --help." if context is not None else ""
        fail(f"{error.format_message()}{help_of}")
        sys.exit(error.exit_code)
    except CliplineError as error:
        fail(error)
        sys.exit(2)
    except BrokenPipeError:  # the reader of a pipe has closed it
        sys.stdout = None
        sys.exit(1)
    except OSError as error:  # a path that cannot be read or written; nothing of ours raises it otherwise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "make room, or give another path" if full else "give another path"
        where = error.filename or ("a file cannot be written" if full else "a file")
        fail(CliplineError(f"{where}: {error.strerror or error}", hint))
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        tell("Aborted.")
        sys.exit(130)


_usual_form = warnings.formatwarning


def _form_warning(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> str:
    """How a warning is printed: one of ours as a sentence, without the place in the code; others as usual."""
    if category.__module__.split(".")[0] == __name__.split(".")[0]:
        return rendered(f"warning: {message}", sys.stderr)
    return printable(_usual_form(message, category, *place, **options))
