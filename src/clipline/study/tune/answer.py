"""What a tuning leaves behind: `final.toml` to train with, `tune.json` for programs, `tune.html` for people."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import os
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from ...console import aligned
from ...errors import RunError
from ...plotting import ACCENT, PALETTE, new_figure, save_figure
from ...privacy.guarantee import Guarantee, delta_rounded_up, rounded_up
from ...privacy.planning import plan
from ...settings import toml_text
from ...tasks import file_and_name, is_task_file, short_name
from ...training import durable
from ..directory import CLAIMS, STUDY, StudyDirectory
from .private_search import FOLDER, PrivatelyTuned
from .question import Question, final_settings, least_cohort
from .recipe import Tuned, change_in_words
from .trials import Metric, Trial

Answer = Tuned | PrivatelyTuned

FINAL, FACTS, PAGE = "final.toml", "tune.json", "tune.html"
# Of what is asked, as file names say it.
_NAMED = ("epsilon", "users", "delta", "relation", "degradation", "rounds", "noise")
_PLANNED = (
    *("population_size", "cohort_size", "rounds", "noise_multiplier", "delta", "sampling", "relation"),
    *("count_stddev", "noise", "bands"),
)


@dataclass(frozen=True)
class Files:
    """Where the answer to one question goes: settings to train with, everything for programs, everything for people."""

    folder: Path
    final: Path
    facts: Path
    page: Path

    @classmethod
    def named(cls, folder: Path, suffix: str = "") -> Files:
        """`final.toml`, `tune.json` and `tune.html`, or the like with a suffix."""
        names = (name.replace(".", f"{suffix}.", 1) for name in (FINAL, FACTS, PAGE))
        return cls(folder, *(folder / name for name in names))

    @classmethod
    def of(cls, question: Question, folder: Path) -> Files:
        """Those of the folder's first question have plain names; those of another one say what it asks otherwise.

        So `final.toml` stays what it was when the folder is asked for another epsilon: that one's settings are in
        `final-epsilon-1.toml`. A folder whose first question had no answer has no `final.toml`, and the name is free.
        """
        plain = cls.named(folder)
        try:
            first = json.loads(plain.facts.read_text(encoding="utf-8"))["asked"] if plain.final.exists() else None
        except (OSError, ValueError, LookupError, TypeError):
            first = None
        if not isinstance(first, dict):
            return plain
        now = asked(question)
        changed = [name for name in _NAMED if first.get(name) != now[name]]
        if question.target.delta is None and "users" in changed and "delta" in changed:
            changed.remove("delta")  # it follows from the users
        values = {name: f"{now[name]:.12g}" if isinstance(now[name], float) else now[name] for name in changed}
        return cls.named(folder, "".join(f"-{name}-{value}" for name, value in values.items()))


def asked(question: Question) -> dict[str, Any]:
    """What the final training must promise, and for whom."""
    target = question.target
    return {
        "epsilon": target.epsilon, "delta": target.delta_value, "users": target.population_size,
        "rounds": target.rounds, "relation": target.relation.value, "degradation": question.degradation,
        "noise": "banded" if target.banded else "independent",
    }  # fmt: skip


def check_out(path: Path) -> None:
    """Refuse a folder that holds something else than a tuning or a study."""
    if not path.exists():
        return
    if not path.is_dir():
        raise RunError(f"out={str(path)!r} must be a folder, and it is a file: give another --out")
    ours = any((path / name).exists() for name in (STUDY, FACTS, FOLDER, CLAIMS))  # the last is there first
    if not ours and any(path.iterdir()):
        raise RunError(
            f"out={str(path)!r} must be new, empty or a tuning, and it holds other files: give another --out"
        )


def task_facts(folder: Path, question: Question) -> dict[str, Any]:
    """What the study in `folder` notes of its task: a file by its path from there, as both may be moved together."""
    task, file = question.trial.task, None
    if is_task_file(task):
        file = Path(os.path.relpath(Path(file_and_name(task)[0]).resolve(), folder.resolve())).as_posix()
    return {"task": short_name(task), "file": file, "code": question.task.code}


def check_task(path: Path, question: Question) -> None:
    """Refuse the tuning of another task, whose answer would be replaced: two projects may both have a `task.py`."""
    for folder in (path, path / FOLDER):
        noted, now = StudyDirectory(folder).experiments.get("tune"), task_facts(folder, question)
        if not isinstance(noted, dict) or all(noted.get(part, now[part]) == now[part] for part in ("task", "file")):
            continue
        file = folder.resolve() / str(noted.get("file"))
        if file.exists() or noted != {**now, "file": noted.get("file")}:  # else the same code, moved since then
            held = os.path.relpath(file) if noted.get("file") else noted.get("task")
            raise RunError(f"out={str(path)!r} holds the tuning of {held}: give --out DIR")


def write_final(
    path: Path, settings: Mapping[str, Any], *, words: str, epsilon: float, secret: bool = False
) -> Guarantee:
    """Write the settings of the final training, and give what `clipline plan --config` makes of them.

    Read back and accounted before they are written: a file that costs more than `epsilon` never is. A `secret` one,
    which holds a seed, is for its owner's eyes.
    """
    text = "".join(f"# {line}\n" for line in words.splitlines()) + toml_text(settings)
    read = tomllib.loads(text)
    guarantee = plan(**{name: read[name] for name in _PLANNED if name in read}).guarantee
    if not guarantee.epsilon <= epsilon:
        much = guarantee.epsilon_text
        raise RunError(f"{path.name} would promise epsilon {much} where at most {epsilon:g} was asked: tell us")
    path.parent.mkdir(parents=True, exist_ok=True)
    with durable.replacing(path) as partial:
        durable.write(partial, text, mode=0o600 if secret else 0o644)
    durable.sync_folder(path.parent)
    return guarantee


def final_of(answer: Answer) -> dict[str, Any] | None:
    """The settings of the final training; None where the target cannot be met."""
    if isinstance(answer, PrivatelyTuned):
        return {name: value for name, value in asdict(answer.spec.settings).items() if value is not None}
    if answer.scaled is None:
        return None
    return final_settings(answer.question, answer.rates.chosen.rates | answer.scaled.settings)


def facts(answer: Answer, out: Path) -> dict[str, Any]:
    """Everything that was asked, tried and chosen, with the runs behind each number. No infinity: null."""
    question, metric = answer.question, answer.metric
    common: dict[str, Any] = {
        "task": question.task.name,
        "asked": asked(question),
        "trial": {
            "data": data_words(question), "cohort_size": question.target.cohort_size,
            "noise_multiplier": question.noise_multiplier,
        },
        "metric": metric.name,
        "lower_is_better": metric.lower_is_better,
        "averaged_over_rounds": metric.window,
        "final": final_of(answer),
        "out": str(out),
    }  # fmt: skip
    if isinstance(answer, PrivatelyTuned):
        price = answer.price
        common["final"] = {name: value for name, value in (common["final"] or {}).items() if name != "seed"}
        search = {
            "method": price.method, "runs": price.runs, "epsilon": price.guarantee.epsilon,
            "epsilon_of_one_run": price.one_run.epsilon, "guarantee": str(price.guarantee),
        }  # fmt: skip
        return {**common, "private_search": search, "chosen": _plain(answer.chosen)}
    scaled, refusal = answer.scaled, answer.refusal
    return {
        **common,
        "rates": [_plain(trial) for trial in answer.rates.trials],
        "chosen": _plain(answer.rates.chosen),
        "noises": [
            {**_plain(trial), "degradation": _finite(answer.losses[trial.noise_multiplier])} for trial in answer.noises
        ],
        "noise_borne": answer.chosen.noise_multiplier,
        "noise_enough_without_scaling": answer.enough,
        "alpha": None if scaled is None else scaled.alpha,
        "bands": None if scaled is None else scaled.bands,
        "epsilon": None if scaled is None else scaled.guarantee.epsilon,
        "guarantee": None if scaled is None else str(scaled.guarantee),
        "refused": None if refusal is None else str(refusal),
        "alternatives": [] if refusal is None else [asdict(one) for one in refusal.alternatives],
    }


def write_file(path: Path, content: str | Mapping[str, Any]) -> None:
    """Write the page, or the facts as JSON."""
    text = content if isinstance(content, str) else json.dumps(content, indent=1, allow_nan=False) + "\n"
    with durable.replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _plain(trial: Trial) -> dict[str, Any]:
    return {**asdict(trial), "value": _finite(trial.value)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# In words, for the terminal and the page


def data_words(question: Question) -> str:
    """What the trial ran on."""
    used = question.task.data_used(question.trial)
    if question.private_search:
        return f"the private data themselves, charged: {used.title}"
    return f"{'proxy data' if question.trial.stored else 'generated data in the place of a proxy'}: {used.title}"


def _measured(answer: Answer) -> str:
    metric, rounds = answer.metric, answer.question.trial.rounds
    way = "lower" if metric.lower_is_better else "higher"
    return (
        f"{metric.name} ({way} is better), mean over what was measured in the last {metric.window} of {rounds} rounds"
    )


def _rates_words(answer: Tuned) -> str:
    """Step 1 in a sentence or two."""
    trials = answer.rates.trials
    diverged = sum(not math.isfinite(trial.value) for trial in trials)
    pruned = sum(trial.pruned for trial in trials)
    notes = [f"{diverged} diverged" if diverged else "", f"{pruned} were pruned" if pruned else ""]
    pairs = "1 pair of rates was" if len(trials) == 1 else f"{len(trials)} pairs of rates were"
    counted = "; ".join([f"{pairs} tried", *filter(None, notes)])
    edge = " Neighbours of it were not tried for want of --runs." if answer.rates.on_edge else ""
    return f"{counted}: {answer.metric.words(answer.rates.chosen)}.{edge}"


def _noise_words(answer: Tuned) -> str:
    """Step 2 in a sentence or two."""
    m, z, above = answer.question.target.cohort_size, answer.chosen.noise_multiplier, answer.next_above
    if above is None and z == answer.enough:
        why = f"with it m = {m} meets the target as it is, so that more was not tried"
    elif above is None:
        why = f"the most that a cohort of {m} can have"
    else:
        loss = answer.losses[above]
        cost = "diverged" if math.isinf(loss) else f"costs {100 * loss:.3g}% of the {answer.metric.name}"
        why = f"the next one tried, z = {above:.3g}, {cost}"
    return f"z = {z:.3g} is borne at a loss of at most {100 * answer.question.degradation:g}%; {why}."


def _scale_words(answer: Tuned) -> str:
    """Step 3 in a sentence."""
    target, scaled = answer.question.target, answer.scaled
    if scaled is None:
        return f"no cohort of the {target.population_size:,} users meets epsilon {target.epsilon:g}: see below."
    z = answer.chosen.noise_multiplier
    if scaled.alpha == 1 and scaled.bands == 1:
        return f"m = {target.cohort_size} and z = {z:.4g} meet epsilon {target.epsilon:g} as they are: alpha = 1."
    if scaled.bands > 1:
        return (
            f"alpha = {scaled.alpha:.4g} takes m from {target.cohort_size} to {scaled.cohort_size:,}. Noise with "
            f"{scaled.bands} bands meets epsilon {target.epsilon:g} at z = {rounded_up(scaled.noise_multiplier, 4)}, "
            f"and as much of it stays in the models as of independent noise at z = {z * scaled.alpha:.4g}."
        )
    return (
        f"alpha = {scaled.alpha:.4g} takes (m, z) from ({target.cohort_size}, {z:.3g}) to ({scaled.cohort_size:,}, "
        f"{rounded_up(scaled.noise_multiplier, 4)}): the least that meets epsilon {target.epsilon:g}. Noise on the "
        "mean update, and on the fraction within the clip, stays the same."
    )


def privacy_words(answer: Answer) -> str:
    """What the search and the final training cost."""
    if isinstance(answer, Tuned):
        private = "the search used no private data and costs nothing"
        return private if answer.scaled is None else f"{private}; the final training: {answer.scaled.guarantee}."
    price = answer.price
    way = (
        f"each of {price.runs} runs charged in full"
        if price.method == "composition"
        else f"the best of a random number of runs, {price.runs} on average"
    )
    one_run = f"One run alone: epsilon {price.one_run.epsilon_text}."
    return f"search and final training together, {way}: {price.guarantee}. {one_run}"


def _commands(answer: Answer, files: Files) -> list[str]:
    """What to run next."""
    if isinstance(answer, Tuned) and answer.scaled is None:
        return []
    known = answer.question.private_data is not None or not answer.question.trial.stored
    data = "" if known else " --data DATA"
    curves = [] if isinstance(answer, PrivatelyTuned) else [f"clipline report {files.folder}"]
    task = answer.question.trial.task
    named = f"{shlex.quote(task)} " if is_task_file(task) else ""  # no code runs that is not named
    train = f"clipline train {named}--config {files.final}{data}"
    return [f"clipline plan --config {files.final}", train, *curves]


def _cautions(answer: Answer) -> list[str]:
    """What a reader must know before believing the numbers."""
    question, found = answer.question, list[str]()
    if isinstance(answer, PrivatelyTuned):
        found.append(
            "Runs were compared on the users that the task measures on. The price holds if those are public, or not "
            "among the users that the promise is for."
        )
        if answer.price.method == "selection":
            found.append("Nothing but the chosen run may leave: not how many runs there were, nor what they gave.")
        return found
    if not question.trial.stored:
        found.append(
            "No proxy was given, so that the trial ran on generated users. Rates and noise carry over as far as these "
            "are like yours: give --proxy DATA with non-private data of your own kind."
        )
    if answer.rates.on_edge:
        found.append("The best pair of rates stands on the edge of what was tried: give more --runs.")
    if len(answer.noises) > 1 and answer.chosen.noise_multiplier == question.noise_multiplier:
        found.append(
            "No more than the least noise was borne, which makes the cohort large. A longer training may bear more."
        )
    return found


def summary(answer: Answer, files: Files) -> str:
    """Warnings, then the whole, for a terminal."""
    if isinstance(answer, PrivatelyTuned):
        best = answer.metric.words(answer.chosen)
        steps = [("rates", f"{len(answer.candidates)} pairs fixed beforehand; {best}")]
    else:
        steps = [
            ("1 rates", _rates_words(answer)),
            ("2 noise", _noise_words(answer)),
            ("3 scale", _scale_words(answer)),
        ]
    rows = [
        ("trial", data_words(answer.question)),
        ("measured", _measured(answer)),
        *steps,
        ("privacy", privacy_words(answer)),
        ("page", str(files.page)),
        *(("next", command) for command in _commands(answer, files)),
    ]
    return "\n".join([*(f"warning: {text}" for text in _cautions(answer)), aligned(rows)])


# The page: one HTML file that needs no script and no network

_GRID_SIDE = 12  # rates on a side: a grid of more is shown as a list
_STYLE = """
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .7rem 1rem; overflow: auto; }
.noises { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 35rem), 1fr)); }
.noises td, .noises th { white-space: nowrap; min-width: 0; }
.rates th, .rates td { padding: .5rem .8rem; border: 1px solid var(--line); }
.rates .cell { background: color-mix(in srgb, var(--accent) calc(var(--share) * .45), transparent); }
.rates .chosen { outline: 3px solid var(--ink); outline-offset: -3px; font-weight: 700; }
img.noise { width: 100%; max-width: 40rem; height: auto; }
@media print { .rates .cell { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(answer: Answer, files: Files) -> str:
    """What was tried, what was chosen and why, what it costs in privacy, what to run next."""
    question, target, commands = answer.question, answer.question.target, _commands(answer, files)
    task = question.task.name
    title = _text(f"Tuning {task} for epsilon {target.epsilon:g} with {target.population_size:,} users")
    paper = "The paper's recipe for practice (Andrew et al., NeurIPS 2021, last section)."
    tiles, sections = _private(answer) if isinstance(answer, PrivatelyTuned) else _recipe(answer)
    shown = "".join(f'<div class="tile"><b>{_text(value)}</b>{_text(name)}</div>' for name, value in tiles)
    body = [
        f"<h1>{title}</h1>",
        f'<p class="quiet">{_text(f"{paper} Trial on {data_words(question)}.")}</p>',
        *(f'<div class="caution"><p>{_text(text)}</p></div>' for text in _cautions(answer)),
        f'<div class="tiles">{shown}</div>',
        *sections,
        "<h2>What to run next</h2><pre>" + "\n".join(map(_text, commands)) + "</pre>" if commands else "",
        f"<h2>What it rests on</h2>{_table(('', ''), _rests_on(answer))}",
    ]
    style = resources.files("clipline.study.report").joinpath("assets", "page.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,"><title>{title}</title>\n'
        f"<style>{style}{_STYLE}</style></head>\n<body><main>" + "\n".join(body) + "</main></body></html>\n"
    )


def _recipe(answer: Tuned) -> tuple[list[tuple[str, str]], list[str]]:
    chosen, scale, metric, refusal = answer.rates.chosen, answer.scaled, answer.metric, answer.refusal
    tiles = [
        ("client rate and server rate", f"{chosen.client_lr:.3g}, {chosen.server_lr:.3g}"),
        (f"noise z borne at m = {answer.question.target.cohort_size}", f"{answer.chosen.noise_multiplier:.3g}"),
    ]
    if scale is not None:
        tiles = [
            ("epsilon", scale.guarantee.epsilon_text),
            ("cohort, users a round", f"{scale.cohort_size:,}"),
            ("noise multiplier", rounded_up(scale.noise_multiplier, 4)),
            *([("bands", str(scale.bands))] if scale.bands > 1 else []),
            *tiles,
            (f"{metric.name} of the trial", f"{answer.chosen.value:.4g}"),
        ]
    answered = _statement(privacy_words(answer))
    if refusal is not None:
        rows = [(one.change, one.meaning) for one in refusal.alternatives]
        why = f"<h2>The target cannot be met</h2><p>{_text(str(refusal).partition(chr(10))[0])}</p>"
        answered = f'<div class="banner">{why}{_table(("change", "what it means"), rows)}</div>'
    cells = "The chosen pair is framed. The darker a cell, the better its value."
    return tiles, [
        answered,
        f"<h2>Step 1: client and server rates</h2><p>{_text(f'{_rates_words(answer)} {cells}')}</p>",
        _rates(answer.rates.trials, chosen, metric),
        f"<h2>Step 2: how much noise the model bears</h2><p>{_text(_noise_words(answer))}</p>",
        f'<div class="noises"><div class="chart">{_noise_chart(answer)}</div>{_noises(answer)}</div>',
        "<h2>Step 3: cohort and noise, scaled together</h2>",
        _scale(answer),
    ]


def _private(answer: PrivatelyTuned) -> tuple[list[tuple[str, str]], list[str]]:
    price, chosen = answer.price, answer.chosen
    tiles = [
        ("epsilon, search and training", price.guarantee.epsilon_text),
        ("cohort, users a round", f"{price.cohort_size:,}"),
        ("noise multiplier", rounded_up(price.noise_multiplier, 4)),
        ("client rate", f"{chosen.client_lr:.3g}"),
        ("server rate", f"{chosen.server_lr:.3g}"),
        (answer.metric.name, f"{chosen.value:.4g}"),
    ]
    rows = [
        ("one run alone", price.one_run.epsilon_text),
        (f"this search, by {price.method}", price.guarantee.epsilon_text),
    ]
    pairs = "; ".join(f"{one['client_lr']:.3g} and {one['server_lr']:.3g}" for one in answer.candidates)
    return tiles, [
        _statement(privacy_words(answer)),
        "<h2>What the search costs</h2>",
        "<p>The search ran on the private data, at the cohort and the noise of the final training. The chosen run is "
        "the final training: made again from its seed it is the same model, at no further charge.</p>",
        _table(("", "epsilon"), rows, numbers=(1,)),
        f"<h2>Rates</h2><p>{len(answer.candidates)} pairs were fixed beforehand: {_text(pairs)}.</p>",
        _rates(answer.trials, chosen, answer.metric) if answer.trials else "",
    ]


def _rates(trials: Sequence[Trial], chosen: Trial, metric: Metric) -> str:
    """Client rates down, server rates across, the better the darker; a list where the rates are no grid."""
    clients, servers = sorted({trial.client_lr for trial in trials}), sorted({trial.server_lr for trial in trials})
    if max(len(clients), len(servers)) > _GRID_SIDE:
        best_first = sorted(trials, key=lambda trial: metric.sign * trial.value)
        rows = [(f"{one.client_lr:.3g}", f"{one.server_lr:.3g}", _value(one), one.run[:10]) for one in best_first]
        return _table(("client rate", "server rate", "metric", "run"), rows, numbers=(0, 1, 2))
    shares = _shares([trial.value for trial in trials], metric)
    by_rates = {(trial.client_lr, trial.server_lr): trial for trial in trials}

    def cell(trial: Trial | None) -> str:
        if trial is None:
            return '<td class="number quiet" title="not tried">–</td>'
        # The colour adds to the number, which can be read without it.
        return (
            f'<td class="number cell{" chosen" * (trial is chosen)}" title="run {_text(trial.run)}" '
            f'style="--share:{100 * shares.get(trial.value, 0.0):.0f}%">{_text(_value(trial))}</td>'
        )

    head = "".join(f'<th scope="col" class="number">{server:.3g}</th>' for server in servers)
    lines = [
        f'<tr><th></th><th colspan="{len(servers)}" scope="colgroup">server rate</th></tr>',
        f'<tr><th scope="col">client rate</th>{head}</tr>',
    ]
    for client in clients:
        cells = "".join(cell(by_rates.get((client, server))) for server in servers)
        lines.append(f'<tr><th scope="row" class="number">{client:.3g}</th>{cells}</tr>')
    return f'<div class="scroll"><table class="rates">{"".join(lines)}</table></div>'


def _shares(values: Sequence[float], metric: Metric) -> dict[float, float]:
    """How dark each value is drawn: 1 for the best, falling with the distance from it, 0 for one that diverged.

    The scale ends at the worst value, or at twice the median distance: one pair that fails must not leave all others
    in one colour.
    """
    finite = [value for value in values if math.isfinite(value)]
    best = min(finite, key=lambda value: metric.sign * value, default=0.0)
    distances = [abs(value - best) for value in finite] or [0.0]
    span = min(max(distances), 2 * median(distances)) or max(distances) or 1.0
    return {value: max(0.0, 1 - abs(value - best) / span) for value in finite}


def _value(trial: Trial) -> str:
    return f"{trial.value:.4g}{' (pruned)' * trial.pruned}" if math.isfinite(trial.value) else "diverged"


def _noises(answer: Tuned) -> str:
    """Each noise tried: what it costs in the metric, and what cohort the target would need with it."""
    rows = list[tuple[str, ...]]()
    for trial in answer.noises:
        z, loss = trial.noise_multiplier, answer.losses[trial.noise_multiplier]
        cohort = least_cohort(answer.question.target, z)
        verdict = "chosen" if trial == answer.chosen else "borne" if loss <= answer.question.degradation else "too much"
        change = change_in_words(loss) if rows and math.isfinite(loss) else ""
        needed = "more than there are" if cohort is None else f"{cohort:,}"
        rows.append((f"{z:.3g}", _value(trial), change, needed, verdict, trial.run[:10]))
    return _table(("z", answer.metric.name, "change", "cohort needed", "", "run"), rows, numbers=(0, 1, 2, 3))


def _scale(answer: Tuned) -> str:
    """The factor, and what other promises and other populations would take."""
    if answer.scaled is None:
        return "<p>No cohort of the users there are meets the target; see above for what would.</p>"
    target, z = answer.question.target, answer.chosen.noise_multiplier
    epsilons = [target.epsilon * f for f in (0.25, 0.5, 2)]
    variants = [(f"epsilon {epsilon:g}", replace(target, epsilon=epsilon)) for epsilon in epsilons]
    sizes = [int(target.population_size * f) for f in (0.1, 10)]
    variants += [(f"{n:,} users", replace(target, population_size=n)) for n in sizes if n >= target.cohort_size]
    rows = [("as asked", f"{answer.scaled.cohort_size:,}", rounded_up(z * answer.scaled.alpha, 4))]
    noise = "noise that stays in the models" if target.banded else "noise multiplier"
    untried = answer.more_noise_untried
    for name, other in variants:
        cohort = least_cohort(other, z)
        if cohort is None:
            rows.append((name, "not tried" if untried else "more than there are", ""))
            continue
        most = "at most " if untried and cohort > target.cohort_size else ""
        rows.append((name, f"{most}{cohort:,}", rounded_up(z * cohort / target.cohort_size, 4)))
    note = (
        f" More noise than z = {z:.3g} at m = {target.cohort_size} was not tried, because it meets the promise that "
        "was asked for. The model may tolerate more: tune for the other promise in the same folder to find out."
    )
    return (
        f"<p>{_text(_scale_words(answer))}</p><p>The same model with another promise, or for another number of "
        f"users.{_text(note if untried else '')}</p>"
        f"{_table(('', 'cohort, users a round', noise), rows, numbers=(1, 2))}"
    )


def _rests_on(answer: Answer) -> list[tuple[str, str]]:
    trial, target = answer.question.trial, answer.question.target
    return [
        ("trial", data_words(answer.question)),
        ("measured", _measured(answer)),
        ("rounds", f"{trial.rounds}, of the trial and of the final training alike"),
        ("clip", f"tracks quantile {trial.quantile:g} of the update norms, from {trial.clip_start:g} on"),
        ("local training", f"{trial.client_epochs} epoch(s), batches of {trial.batch_size}"),
        ("server", trial.server_name + (f", momentum {trial.server_momentum:g}" if trial.server_name == "sgd" else "")),
        ("sampling", "Poisson; every user takes part in a round with the same chance, by a public rate"),
        ("neighbours", f"{target.relation.value} one user"),
        ("users", f"{target.population_size:,}, declared beforehand and not read from the data"),
        ("delta", delta_rounded_up(target.delta_value) + (" = users^-1.1" if target.delta is None else "")),
    ]


def _noise_chart(answer: Tuned) -> str:
    """The metric over the noise as a picture in the page, with the loss that is allowed; the choice is ringed."""
    metric, chosen, picture = answer.metric, answer.chosen, io.BytesIO()
    allowed, reference = answer.question.degradation, answer.noises[0].value
    limit = reference + metric.sign * allowed * abs(reference)
    known = [trial for trial in answer.noises if math.isfinite(trial.value)]
    figure, (axis,) = new_figure(1, 1, width=6.2, height=3.6)
    axis.plot([trial.noise_multiplier for trial in known], [trial.value for trial in known], "-o", color=PALETTE[0])
    axis.plot(chosen.noise_multiplier, chosen.value, "o", ms=15, mfc="none", mec="black")
    axis.axhline(limit, color=ACCENT, ls="--", lw=1.2)
    said = f"{100 * allowed:g}% worse than with little noise"
    aside: dict[str, Any] = {"fontsize": 8, "color": ACCENT}
    axis.annotate(said, (0.02, limit), (0, 4), xycoords=("axes fraction", "data"), textcoords="offset points", **aside)
    noises = [*answer.losses]
    for trial in answer.noises:
        if trial not in known:
            at = (trial.noise_multiplier, 0.02)
            axis.annotate("diverged", at, xycoords=("data", "axes fraction"), ha="center", **aside)
    axis.set_xscale("log")
    ticks = [z for place, z in enumerate(noises) if place == 0 or z > 1.3 * noises[place - 1]]  # apart from each other
    axis.set_xticks(ticks, [f"{z:.2g}" for z in ticks])
    axis.set_xticks([], minor=True)
    axis.set(xlabel=f"noise z of a round of {answer.question.target.cohort_size} users", ylabel=metric.name)
    save_figure(figure, picture)
    label = f"{metric.name} over noise; the chosen noise {chosen.noise_multiplier:.3g} is ringed"
    encoded = base64.b64encode(picture.getvalue()).decode()
    return f'<img class="noise" alt="{_text(label)}" src="data:image/png;base64,{encoded}">'


def _statement(text: str) -> str:
    return f'<div class="statement"><blockquote>{_text(text[:1].upper() + text[1:])}</blockquote></div>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def line(tag: str, row: Sequence[str]) -> str:
        kinds = ("number" if place in numbers else "words" for place in range(len(row)))
        cells = (f'<{tag} class="{kind}">{_text(text)}</{tag}>' for kind, text in zip(kinds, row, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    head = line("th", heads) if any(heads) else "<tr></tr>"
    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _text(text: object) -> str:
    return html.escape(str(text))
