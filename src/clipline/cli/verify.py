"""`clipline verify`: whether the files of a run agree, what they come to, and the seal to note."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import say, tell
from ..errors import RunError
from .parser import JSON, PATH, Argument, Command, Option

if TYPE_CHECKING:
    from ..trust.verify import Verified


def verify(run: Path, seal: str | None, sign: Path | None, verify_signature: Path | None, as_json: bool) -> int:
    """Compute the guarantee of a run again, from its ledger, and compare all that its files say with it.

    Ends with exit code 1 if anything is wrong, and says what. The seal is one digest of ledger, settings, metrics and
    model: note it where the run's folder cannot be changed, and compare it later with --seal.
    """
    from ..trust.verify import check_signature, sign_run
    from ..trust.verify import verify as check

    found = check(run)
    problems = list(found.problems)
    if seal is not None and seal.strip().lower() != found.seal:
        problems.append(f"the seal is {found.seal}, and not {seal}: a file has changed since it was noted")
    by = None
    if verify_signature is not None:
        try:
            by = check_signature(run, verify_signature)
        except RunError as error:
            problems.append(str(error))
    if sign is not None and not problems:
        sign_run(run, sign)
    if as_json:
        answer = {**_answer(found), "problems": problems, "warnings": found.warnings, "signed_by": by}
        print(json.dumps(answer))
        return 1 if problems or found.guarantee is None else 0
    for problem in problems:
        tell(f"error: {problem}")
    for warning in found.warnings:
        tell(f"warning: {warning}")
    if found.guarantee is None:
        say(f"{run}: no guarantee")
        return 1
    say(f"{run}: {found.guarantee}" if found.both is None else f"{run}:\n{found.both}")
    say(f"  epsilon    {found.guarantee.epsilon:.6g} by privacy loss, {found.renyi:.6g} by Renyi")
    say(f"  rounds     {found.guarantee.rounds} charged")
    say(f"  seal       {found.seal}")
    if by is not None:
        say(f"  signed by  {by}")
    if not found.finished:
        say("  the run has not ended: its model and card are still to come")
    say("  the files contradict each other: do not rely on this" if problems else "  all files agree with the ledger")
    return 1 if problems else 0


def _answer(found: Verified) -> dict[str, object]:
    promise = found.guarantee
    return {
        "guarantee": None if promise is None else str(promise),
        "epsilon": None if promise is None or not promise.private else promise.epsilon,
        "epsilon_renyi": found.renyi if promise is not None and promise.private else None,
        "delta": None if promise is None else promise.delta,
        "against_server": None if found.both is None else found.both.against_server,
        "seal": found.seal,
        "finished": found.finished,
    }


command = Command(
    "verify",
    verify,
    [
        Argument(["run"], type=PATH, metavar="RUN", help="A run directory."),
        Option(["--seal"], metavar="HEX", help="Compare with a seal that was noted before."),
        Option(["--sign"], type=PATH, metavar="KEY", help="Sign the seal with an SSH key, into seal.sig of the run."),
        Option(
            ["--verify-signature"],
            type=PATH,
            metavar="SIGNERS",
            help="Check seal.sig: names and public keys, a line each.",
        ),
        JSON,
    ],
)
