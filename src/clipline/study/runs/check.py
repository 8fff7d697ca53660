"""The audit of a record: does it agree with itself?"""

from __future__ import annotations

import math

from .record import RunRecord


def contradictions(record: RunRecord) -> list[str]:
    """Where a record does not agree with itself: rounds, clips and metrics against settings and outcome."""
    found, settings, rounds = list[str](), record.settings, record.rounds
    count = len(rounds["round"])
    if list(rounds["round"]) != list(range(count)):
        found.append("its rounds are not numbered from 0 on without a gap")
    if record.outcome == "finished" and count != settings["rounds"]:
        found.append(f"it has {count} rounds but finished, and its settings say {settings['rounds']}")
    if count > settings["rounds"]:
        found.append(f"it has {count} rounds and its settings say at most {settings['rounds']}")
    clips = {clip for clip in rounds["clip"] if clip is not None}
    fixed = settings.get("fixed_clip") if settings["clip"] == "fixed" else settings["clip"]
    if isinstance(fixed, float | int) and any(not math.isclose(clip, fixed, rel_tol=1e-9) for clip in clips):
        found.append(f"its clip is fixed at {fixed:g}, and a round had another")
    for name, value in record.final.items():
        if name not in rounds or (count and rounds[name][-1] != value):
            found.append(f"{name} of the last model is not that of the last round")
    return found
