"""Handwriting: the default task, whose writers are drawn by rule. Begin with `task`; `writers` draws the users."""

from .task import TASK

__all__ = ["TASK"]
