#!/usr/bin/env python3
"""Looks up every pinned package in the advisory database: `.ci/audit.py [FILE]`, with pip-audit installed.

pip-audit skips what the database does not answer for and says that nothing was found. Here a package that was not
looked up is a failure, as a known vulnerability is.
"""

import json
import re
import subprocess
import sys
from pathlib import Path


def verdict(pins: int, found: dict) -> tuple[list[str], int]:
    """What is wrong, and how many packages were looked up: by pip-audit's JSON, for so many pins."""
    packages = found["dependencies"]
    skipped = [one for one in packages if "skip_reason" in one]
    problems = [f"not looked up: {one['name']} ({one['skip_reason']})" for one in skipped]
    if len(packages) != pins:
        problems.append(f"{pins} packages are pinned and pip-audit answers for {len(packages)}")
    for one in packages:
        problems += [f"{one['name']} {one['version']}: {each['id']}" for each in one.get("vulns", [])]
    return problems, len(packages) - len(skipped)


def main(file: str = "constraints.txt") -> int:
    """0 if all packages were looked up and nothing is known of any."""
    pins = len(re.findall(r"^[\w.-]+==", Path(file).read_text(encoding="utf-8"), re.MULTILINE))
    how = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    said = subprocess.run(["pip-audit", "-r", file, *how], stdout=subprocess.PIPE, text=True).stdout
    problems, looked_up = verdict(pins, json.loads(said) if said.strip() else {"dependencies": []})
    print(*problems, f"{looked_up} of {pins} packages looked up, {len(problems)} problems", sep="\n")
    return 1 if problems or not pins else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
