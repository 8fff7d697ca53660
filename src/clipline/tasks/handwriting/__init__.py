"""Handwriting, the default task: recognise characters by generated writers; nothing to download.

Begin with `task`; `writers` generates the users and `strokes` has the shapes of the characters.
"""

from .task import TASK

__all__ = ["TASK"]
