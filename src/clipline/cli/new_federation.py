"""`clipline new-federation`: a folder with a Flower app and the scripts of a deployment. Its files stand in assets/."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from ..console import say
from .new_task import unused
from .parser import PATH, Argument, Command

SCRIPTS = ("make_certs", "up", "down")


def new_federation(folder: Path) -> None:
    """Write a federation that runs, to change into your own.

    It runs in one process, on this machine with TLS, or on machines of your own: clipline new-federation rides

    Needs clipline[federation]; the scripts need bash, openssl, ssh-keygen and nginx.
    """
    unused(folder)
    _copy(resources.files(__package__).joinpath("assets", "federation"), folder)
    for name in SCRIPTS:
        (folder / name).chmod(0o755)
    say(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}. Read README.md, then:")
    say(f"  python {folder}/app/in_one_process.py {folder}/run")


def _copy(source: Traversable, target: Path) -> None:
    """Each file without its ending .txt."""
    target.mkdir(parents=True, exist_ok=True)
    for each in source.iterdir():
        if each.is_dir():
            _copy(each, target / each.name)
        else:
            name = each.name.removesuffix(".txt")
            (target / (".gitignore" if name == "gitignore" else name)).write_bytes(each.read_bytes())


command = Command(
    "new-federation",
    new_federation,
    [Argument(["folder"], type=PATH, metavar="DIR", help="The folder to write, new or empty.")],
)
