"""The folder of a run: what was asked, released and charged, and how a run goes on after a crash.

Begin with `run_directory`; `circumstances` says what must be the same on resume.
"""
