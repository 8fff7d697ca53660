"""The report of runs and studies: one HTML file that needs nothing else, and a page that follows a running training.

Begin with `page`, which writes the file; `collect` reads the folders, `content` says what is shown, `live` serves.
"""

from .page import write_report

__all__ = ["write_report"]
