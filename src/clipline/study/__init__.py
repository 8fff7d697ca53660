"""Many runs, kept in a folder: experiments that packages add, the tuning recipe (`tune/`), and their page (`report/`).

Begin with `study.py`, which runs what is missing and keeps the records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import lazily

if TYPE_CHECKING:
    from ..training.durable import replacing
    from .directory import Examined, ExperimentKind, Figure, Look, Point, StudyDirectory
    from .record import RunRecord, RunSpec, data_checksum
    from .report.page import write_report
    from .study import Study, StudyProgress

__all__ = [
    "Examined", "ExperimentKind", "Figure", "Look", "Point", "RunRecord", "RunSpec", "Study", "StudyDirectory",
    "StudyProgress", "data_checksum", "replacing", "write_report",
]  # fmt: skip
__getattr__, __dir__ = lazily(
    __name__,
    {
        "..training.durable": "replacing",
        ".directory": "Examined ExperimentKind Figure Look Point StudyDirectory",
        ".record": "RunRecord RunSpec data_checksum",
        ".report.page": "write_report",
        ".study": "Study StudyProgress",
    },
)
