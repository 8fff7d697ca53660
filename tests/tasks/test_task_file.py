"""A file with a task is run as it stands."""

import os
import sys

from clipline.tasks.task_file import TaskFile


def test_pitfall_a_file_changed_within_a_second_is_not_run_from_the_bytecode_of_before(tmp_path, monkeypatch):
    """Python takes stored bytecode for current if the file's length and its time in seconds are unchanged."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "mine.py"
    for rounds in (1, 2):
        path.write_text(f"SETTINGS = {{'rounds': {rounds}}}\n")
        os.utime(path, (1e9, 1e9))
        assert TaskFile(str(path)).value("SETTINGS") == {"rounds": rounds}
    assert [file.name for file in tmp_path.iterdir()] == ["mine.py"]  # and nothing is left beside it
