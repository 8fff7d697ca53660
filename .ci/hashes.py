#!/usr/bin/env python3
"""Writes constraints-hashes.txt: each pin of constraints.txt with the SHA-256 of its files on the package index.

    .ci/hashes.py [FILE.whl ...]

Files for Linux on x86-64 and CPython 3.11 or later count, and an sdist where a release has no such wheel. Wheels that
are named, such as a build of torch from another index, are added by their own hash. `packaging` must be installed.
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from urllib.request import urlopen

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.utils import parse_sdist_filename as parse_sdist

INDEX = "https://pypi.org/simple"
HEAD = """\
# Made from constraints.txt by .ci/hashes.py and the wheel of torch for CPUs that tests run with:
# what pip installs is then, to the last bit, what was tested. Linux on x86-64, and Python 3.11 for that build.
# Install with --no-deps --require-hashes -r constraints-hashes.txt, then with --no-deps --no-build-isolation .
"""


def fits(tags: frozenset) -> bool:
    """Whether a wheel can be installed by the CI: any of its tags."""
    return any(
        (one.platform == "any" or ("linux" in one.platform and one.platform.endswith("x86_64")))
        and "musl" not in one.platform
        and (one.interpreter.startswith("py3") or one.abi == "abi3" or re.fullmatch(r"cp31[1-9]", one.abi))
        for one in tags
    )


def hashes(name: str, version: str) -> list[str]:
    """Of the files of a release that fit."""
    with urlopen(f"{INDEX}/{canonicalize_name(name)}/", timeout=60) as page:
        links = re.findall(r'href="[^"#]*/([^"/#]+)#sha256=([0-9a-f]{64})"', page.read().decode())
    wheels, sdists = [], []
    for file, digest in links:
        try:
            if file.endswith(".whl"):
                _, released, _, tags = parse_wheel_filename(file)
                wheels += [digest] if str(released) == version and fits(tags) else []
            elif file.endswith(".tar.gz"):
                sdists += [digest] if str(parse_sdist(file)[1]) == version else []
        except (InvalidWheelFilename, InvalidSdistFilename):  # files of the index's first years
            continue
    if not wheels and not sdists:
        raise SystemExit(f"{INDEX} has no file of {name}=={version}: change the pin in constraints.txt")
    return sorted(set(wheels or sdists))


def main(*wheels: str) -> None:
    """Write the file."""
    root = Path(__file__).parents[1]
    pins = re.findall(r"^([\w.-]+)==(\S+)", (root / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda pin: hashes(*pin), pins))
    for file in map(Path, wheels):
        name, released, _, _ = parse_wheel_filename(file.name)
        place = next(place for place, pin in enumerate(pins) if canonicalize_name(pin[0]) == name)
        if str(released).split("+")[0] != pins[place][1]:
            raise SystemExit(f"{file.name} is not {pins[place][0]}=={pins[place][1]}: name a wheel of that version")
        found[place] = [sha256(file.read_bytes()).hexdigest()]
    lines = [
        " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{one}" for one in digests)])
        for (name, version), digests in zip(pins, found, strict=True)
    ]
    (root / "constraints-hashes.txt").write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
