"""Many runs, kept in a folder (`runs/`): the tuning recipe (`tune/`), experiments that packages add, their page.

Begin with `runs/study.py`, which runs what is missing and keeps the records; `report/` writes the page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import lazily

if TYPE_CHECKING:
    from .kinds import ExperimentKind
    from .report.page import write_report
    from .runs.data_checksum import data_checksum
    from .runs.directory import StudyDirectory
    from .runs.progress import NoProgress, StudyProgress
    from .runs.record import RunRecord, RunSpec
    from .runs.study import Study

__all__ = [
    "ExperimentKind", "NoProgress", "RunRecord", "RunSpec", "Study", "StudyDirectory", "StudyProgress", "data_checksum",
    "write_report",
]  # fmt: skip
__getattr__, __dir__ = lazily(
    __name__,
    {
        ".kinds": "ExperimentKind",
        ".report.page": "write_report",
        ".runs.data_checksum": "data_checksum",
        ".runs.directory": "StudyDirectory",
        ".runs.progress": "NoProgress StudyProgress",
        ".runs.record": "RunRecord RunSpec",
        ".runs.study": "Study",
    },
)
