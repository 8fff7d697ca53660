"""Whether an installed package holds every file that its source has: `python tests/package_files.py SOURCE`.

Templates, styles, scripts and C code are data to a packager, and are missed without a word until they are needed.
"""

import sys
from importlib import import_module
from pathlib import Path


def files_in(folder: Path) -> set[str]:
    """The files of a package by their paths in it; what Python writes itself is left out."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if "__pycache__" not in path.parts and path.suffix != ".pyc"}


def main() -> None:
    """Compare, and end with exit code 1 if something is missing or there is too much."""
    installed, source = Path(import_module(Path(sys.argv[1]).name).__file__).parent, Path(sys.argv[1])
    if installed.resolve() == source.resolve():
        sys.exit(f"{installed} is the source itself: install the package first")
    missing, extra = files_in(source) - files_in(installed), files_in(installed) - files_in(source)
    data = sorted(file for file in files_in(installed) if not file.endswith(".py"))
    print(f"{len(files_in(installed))} files installed; besides Python: {', '.join(data)}")
    if missing or extra:
        sys.exit(f"missing in the package: {sorted(missing)}; not in the source: {sorted(extra)}")


if __name__ == "__main__":
    main()
