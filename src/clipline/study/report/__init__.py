"""The report of runs and studies: one HTML file that needs nothing else, and a page that follows a running training."""

from .page import write_report

__all__ = ["write_report"]
