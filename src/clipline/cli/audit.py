"""`clipline audit`: what canary users in one training show of its epsilon."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import say, tell
from .parser import JSON, PATH, Command, Option
from .selftest import task_of_file

if TYPE_CHECKING:
    from ..trust.audit import Audited


def audit(
    model: str | None,
    data: str | None,
    user_column: str | None,
    rounds: int | None,
    canaries: int,
    out: Path | None,
    as_json: bool,
) -> int:
    """Train with canary users and bound epsilon from below, by what is released.

    Without --model made-up users train. With it your own task trains, on your own data: that is a run of its own, and
    what is told of it has cost its epsilon. Ends with exit code 1 if a bound is above the claim.
    """
    from ..trust.audit import audit as run
    from ..trust.audit import draw_audit, made_up_training

    if model is None:
        training = made_up_training(**({} if rounds is None else {"rounds": rounds}))
    else:
        task = task_of_file(model, {"data": data, "user_column": user_column, "rounds": rounds})
        training = task.training(task.settings)
    found = run(training, canaries=canaries)
    answer = _answer(found)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        draw_audit(found, out / "audit.png")
        (out / "audit.json").write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(answer))
        return 1 if found.refuted else 0
    for line in report(found):
        say(line)
    if found.refuted:
        tell("error: a bound is above the claim: the guarantee of this training does not hold. Do not rely on it")
    return 1 if found.refuted else 0


def report(found: Audited) -> list[str]:
    """The audit in lines."""
    from ..trust.audit import CONFIDENCE

    inside, outside = len(found.views[0].inside), len(found.views[0].outside)
    lines = [
        f"claimed: {found.claim}",
        f"{inside} canaries were in {found.took_part:.3g} of {found.rounds} rounds each; {outside} were left out",
        f"epsilon is at least, with {CONFIDENCE:.0%} confidence for all together:",
    ]
    for view in found.views:
        shot = "too few parameters" if view.one_shot is None else f"{view.one_shot:.3f}"
        lines.append(f"  by the {view.name:<17} one run {view.one_run:.3f}, one shot {shot}")
    if not found.claim.private:
        lines.append("nothing is claimed, so nothing can be refuted")
    elif not found.refuted:
        lines.append("nothing contradicts the claim; an audit can refute a guarantee, and never prove one")
    return lines


def _answer(found: Audited) -> dict[str, Any]:
    from ..trust.audit import CONFIDENCE

    views = [{**asdict(view), "inside": view.inside.tolist(), "outside": view.outside.tolist()} for view in found.views]
    return {
        "refuted": found.refuted,
        "guarantee": str(found.claim),
        "epsilon": found.claim.epsilon if found.claim.private else None,
        "delta": found.claim.delta,
        "confidence": CONFIDENCE,
        "rounds": found.rounds,
        "parameters": found.dim,
        "rounds_of_a_canary": found.took_part,
        "views": views,
    }


command = Command(
    "audit",
    audit,
    [
        Option(["--model"], metavar="FILE.py:name", help="Audit your own model and loss, as train takes them."),
        Option(["--data"], metavar="PATH", help="The table or folder that --model trains on."),
        Option(["--user-column"], metavar="NAME", help="The column of the table that says whose row it is."),
        Option(["--rounds"], type=int, metavar="N", help="Rounds to train, if not those of the task."),
        Option(["--canaries"], type=int, default=1000, metavar="N", help="Canaries, half of them left out. [1000]"),
        Option(["--out"], type=PATH, metavar="DIR", help="Write audit.png and audit.json there."),
        JSON,
    ],
)
