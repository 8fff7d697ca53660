"""What a run promises, in words and numbers with all it rests on; and what about it is not private."""

from __future__ import annotations

from typing import Any

from ...privacy.guarantee import delta_rounded_up, rounded_up
from ...privacy.relations import Relation
from ...random.streams import GUESSABLE
from .run import UNPRIVATE, ReportedRun

MUCH = 10.0  # an epsilon above which little is promised
_HIDDEN = {  # what a report says in the place of a seed, by where the noise came from
    "seed": "not shown: whoever knows it can subtract the noise",
    "system": "not shown: cohorts and noise came from the operating system, not from it",
}
_INSIDERS = "other examples of the training users"


def words(run: ReportedRun) -> str:
    """The statement to quote."""
    if run.promise is not None and run.promise.words:
        return run.promise.words
    if not run.round and not run.of_study:
        return "Nothing was released yet."
    return "No guarantee is on record: claim none."


def basis(run: ReportedRun) -> list[tuple[str, str]]:
    """Everything that the statement rests on, as names and values; what is not known is left out."""
    promise, resolved = run.promise, {**run.settings, **run.resolved}
    relation = None if promise is None else promise.relation
    users = run.setting("population_size") or run.resolved.get("population_size")
    counted = resolved.get("users")
    epsilon = None if promise is None else promise.epsilon
    adapts = run.target is not None
    rows: list[tuple[str, Any]] = [
        ("epsilon", None if promise is None else
         "infinite: nothing is promised" if epsilon is None else rounded_up(epsilon, 3)),
        ("delta", None if promise is None or promise.delta is None else delta_rounded_up(promise.delta)),
        ("sampler", None if promise is None else promise.sampling),
        ("neighbouring relation", None if relation is None else f"{relation}: {_meaning(relation)}"),
        ("accountant", None if promise is None else promise.accountant),
        ("rounds charged", None if promise is None else promise.rounds),
        ("population", f"{users:,} users, declared beforehand" if isinstance(users, int) else
         f"{counted:,} users, counted in the data: their number is public" if isinstance(counted, int) else None),
        ("users a round", run.setting("cohort_size")),
        ("noise of a round, z", _plain(run.noise_multiplier)),
        ("of it on the updates, z_delta", _plain(resolved.get("delta_noise_multiplier"))),
        ("and on the count within the clip", f"{_plain(resolved['count_stddev'])} users" if adapts and
         resolved.get("count_stddev") is not None else None if adapts else "no count is released"),
        ("clip", run.clip),
        ("source of noise", _source(run)),
    ]  # fmt: skip
    return [(name, str(value)) for name, value in rows if value is not None and value != ""]


def warnings(run: ReportedRun) -> list[str]:
    """What makes a run, or a part of its record, not private: for the red banner."""
    found = []
    promise = run.promise
    if run.noise_multiplier == 0:
        found.append("no noise was added")
    elif promise is not None and promise.epsilon is None:
        found.append("no finite epsilon")
    elif promise is None and run.round:
        found.append("no guarantee is on record")
    if run.unclipped:
        found.append("updates were not clipped")
    if run.resolved.get("shows_errors") is True:
        found.append("errors of users are shown (on_error='raise'), which no guarantee covers")
    relation = promise.relation if promise is not None else run.resolved.get("relation") or run.setting("relation")
    if relation == Relation.PAPER.value:
        found.append("accounted in the paper's convention, which is not a guarantee")
    private_noise = run.noise_multiplier is None or run.noise_multiplier > 0
    if private_noise and run.setting("noise_source") == "seed" and _seed_known(run):
        found.append("the seed of its noise is known or easily guessed: whoever has it can subtract the noise")
    unprivate = [name for name in run.columns if name.startswith(UNPRIVATE)]
    if unprivate:
        shown = ", ".join(unprivate[:6]) + (" and more" if len(unprivate) > 6 else "")
        found.append(f"its record holds numbers that no guarantee covers ({shown})")
    if str(run.about.get("measured_on", "")).startswith(_INSIDERS):
        found.append("metrics were measured on other examples of the training users, which no guarantee covers")
    return found


def cautions(run: ReportedRun) -> list[str]:
    """What a reader should know and that does not break the promise."""
    found = list(run.problems)
    promise = run.promise
    if promise is not None and promise.epsilon is not None and promise.epsilon > MUCH:
        found.append(f"an epsilon above {MUCH:g} promises little")
    if run.state == "interrupted" and promise is not None and run.planned and promise.words != run.planned:
        found.append(f"it was interrupted: if because of what was seen, quote what was planned: {run.planned}")
    if run.setting("noise_source") == "seed" and (not warnings(run) or (promise is None and not _seed_known(run))):
        found.append("cohorts and noise come from the seed in settings.toml: keep that file secret")
    if run.about.get("data") == "stand-in":
        found.append("trained on a stand-in, generated: not comparable with results on the original data")
    checksum = run.about.get("unprivate_data_checksum")
    if checksum not in (None, "generated"):
        found.append("the checksum of the data is shown: where the data are private, it tells who has the same")
    return found


def shown_settings(run: ReportedRun) -> dict[str, str]:
    """The settings as text, less the seed of a run with noise: a report is made to be given away.

    A study's record tells it anyway, and its runs are told apart by it.
    """
    shown = {}
    for name, value in run.settings.items():
        hidden = name == "seed" and not run.of_study and run.noise_multiplier != 0
        shown[name] = _HIDDEN.get(str(run.setting("noise_source")), "not shown") if hidden else _plain(value)
    return shown


def _seed_known(run: ReportedRun) -> bool:
    """A study's record tells the seed of every run; that of a training is a secret if it is hard to guess."""
    seed = run.setting("seed")
    return run.of_study or (isinstance(seed, int) and seed < GUESSABLE)


def _source(run: ReportedRun) -> str | None:
    source = run.setting("noise_source")
    if source == "system":
        return "the operating system's generator"
    return "a seed, which must be kept secret" if source == "seed" else None


def _meaning(relation: str) -> str:
    try:
        return Relation(relation).meaning
    except ValueError:
        return "unknown"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
