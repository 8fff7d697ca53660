"""The command line: every command says what it does, checks first, and fails in one sentence with exit code 2."""

from __future__ import annotations

import io
import os
import sys

from ..errors import CliplineError
from .planner import answered


def main() -> None:
    """Entry point of the `clipline` command."""
    # Work is shared among processes. NumPy's own threads gain nothing there, and wait for each other on a busy machine.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A path need not be text, nor a terminal know every letter: what cannot be printed is printed as \x, \u and digits.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if not answered(sys.argv[1:]):
            from .app import app

            app()
    except CliplineError as error:
        print(f"clipline: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # whoever reads has read enough
        sys.stdout = None
        sys.exit(1)
    except OSError as error:  # a path that cannot be read or written; nothing of ours raises it otherwise
        print(f"clipline: {error.filename or 'a file'}: {error.strerror or error}: give another path", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("Aborted.", file=sys.stderr)
        sys.exit(130)
