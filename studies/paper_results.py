"""Write docs/results/paper.md from study directories that `clipline reproduce` made. The page is never edited by hand.

python studies/paper_results.py STUDY... [--out docs/results/paper.md]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from clipline.errors import CliplineError
from clipline_paper.study.results_page import write_results_page


def main() -> None:
    """Read the arguments, write the page and its pictures, print where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "studies", nargs="+", type=Path, help="study directories; of the same experiment the last counts"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results/paper.md"), help="the page to write")
    given = parser.parse_args()
    try:
        print(write_results_page(given.studies, given.out))
    except CliplineError as error:
        sys.exit(f"paper_results: {error}")


if __name__ == "__main__":
    main()
