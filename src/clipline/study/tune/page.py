"""The page at the end of a tuning: one HTML file that needs no script and no network."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from ...privacy.guarantee import delta_rounded_up, rounded_up
from ...tasks import title_name
from . import summary as words
from .files import Files, data_words
from .noise import change_in_words
from .noise_chart import noise_chart
from .private_search import PrivatelyTuned
from .recipe import RateTrial, Tuned
from .scale import least_cohort
from .style import style

_TOO_MANY = "more than there are"
_GRID_SIDE = 12  # rates on a side: a grid of more is shown as a list


def page(answer: Tuned | PrivatelyTuned, files: Files) -> str:
    """What was tried, what was chosen and why, what it costs in privacy, what to run next."""
    target = answer.question.target
    task = title_name(answer.question.task.name, answer.question.task.settings.task)
    title = f"Tuning {task} for epsilon {target.epsilon:g} with {target.population_size:,} users"
    body = _private(answer) if isinstance(answer, PrivatelyTuned) else _recipe(answer)
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="quiet">{_text(_trial_words(answer))}</p>',
        *(f'<div class="caution"><p>{_text(text)}</p></div>' for text in words.cautions(answer)),
        body,
        _next(answer, files),
        _rests_on(answer),
    ]
    return _document(title, "\n".join(parts))


def _recipe(answer: Tuned) -> str:
    chosen, scale = answer.rates.chosen, answer.scaled
    tiles = [
        ("client rate and server rate", f"{chosen.client_lr:.3g}, {chosen.server_lr:.3g}"),
        (f"noise z borne at m = {answer.question.target.cohort_size}", f"{answer.noise.chosen.noise_multiplier:.3g}"),
    ]
    if scale is not None:
        tiles = [
            ("epsilon", scale.guarantee.epsilon_text),
            ("cohort, users a round", f"{scale.cohort_size:,}"),
            ("noise multiplier", rounded_up(scale.noise_multiplier, 4)),
            *tiles,
            (f"{answer.metric.name} of the trial", f"{answer.noise.chosen.value:.4g}"),
        ]
    return "\n".join(
        [
            _tiles(tiles),
            _statement(answer),
            "<h2>Step 1: client and server rates</h2>",
            f"<p>{_text(words.rates_words(answer))} Cells: {_text(answer.metric.name)}, "
            f"{'lower' if answer.metric.lower_is_better else 'higher'} is better; the chosen pair is framed. "
            "The darker a cell, the better its value.</p>",
            _rates(answer.rates.trials, chosen, lower_is_better=answer.metric.lower_is_better),
            f"<p>{_text(_sentence(words.clip_words(answer)))}</p>",
            "<h2>Step 2: how much noise the model bears</h2>",
            f"<p>{_text(words.noise_words(answer))}</p>",
            f'<div class="noises"><div class="chart">{noise_chart(answer)}</div>{_noises(answer)}</div>',
            "<h2>Step 3: cohort and noise, scaled together</h2>",
            _scale(answer),
        ]
    )


def _private(answer: PrivatelyTuned) -> str:
    price, chosen = answer.price, answer.chosen
    tiles = [
        ("epsilon, search and training", price.guarantee.epsilon_text),
        ("cohort, users a round", f"{price.cohort_size:,}"),
        ("noise multiplier", rounded_up(price.noise_multiplier, 4)),
        ("client rate", f"{chosen.client_lr:.3g}"),
        ("server rate", f"{chosen.server_lr:.3g}"),
        (answer.metric.name, f"{chosen.value:.4g}"),
    ]
    other = "selection" if price.method == "composition" else "composition"
    rows = [
        ("one run alone", price.one_run.epsilon_text),
        (f"this search, by {price.method}", price.guarantee.epsilon_text),
        (f"the same, charged by {other}", price.other.epsilon_text),
        ("every run charged, with five fixed clips for each pair of rates", price.with_clips.epsilon_text),
    ]
    shown = [
        _tiles(tiles),
        f'<div class="statement"><blockquote>{_text(_sentence(words.privacy_words(answer)))}</blockquote></div>',
        "<h2>What the search costs</h2>",
        "<p>The search ran on the private data, at the cohort and the noise of the final training. The chosen run is "
        "the final training: made again from its seed it is the same model, at no further charge.</p>",
        _table(("", "epsilon"), rows, numbers=(1,)),
        "<h2>Rates</h2>",
        f"<p>{len(answer.candidates)} pairs were fixed beforehand: "
        + _text("; ".join(f"{client:.3g} and {server:.3g}" for client, server in answer.candidates))
        + ".</p>",
    ]
    if answer.trials:
        shown.append(_rates(answer.trials, chosen, lower_is_better=answer.metric.lower_is_better))
    return "\n".join(shown)


def _statement(answer: Tuned) -> str:
    if answer.scaled is None:
        assert answer.refusal is not None
        first = str(answer.refusal).partition("\n")[0]
        rows = [(one.change, one.meaning) for one in answer.refusal.alternatives]
        return (
            f'<div class="banner"><h2>The target cannot be met</h2><p>{_text(first)}</p>'
            f"{_table(('change', 'what it means'), rows)}</div>"
        )
    privacy = _sentence(words.privacy_words(answer))
    return f'<div class="statement"><blockquote>{_text(privacy)}</blockquote></div>'


def _rates(trials: Sequence[RateTrial], chosen: RateTrial, *, lower_is_better: bool) -> str:
    """Client rates down, server rates across, the better the darker; a list where the rates are no grid."""
    clients = sorted({trial.client_lr for trial in trials})
    servers = sorted({trial.server_lr for trial in trials})
    if len(clients) > _GRID_SIDE or len(servers) > _GRID_SIDE:
        sign = 1 if lower_is_better else -1
        rows = [
            (f"{trial.client_lr:.3g}", f"{trial.server_lr:.3g}", _value(trial), trial.run[:10])
            for trial in sorted(trials, key=lambda trial: sign * trial.value)
        ]
        return _table(("client rate", "server rate", "metric", "run"), rows, numbers=(0, 1, 2))
    shares = _shares([trial.value for trial in trials], lower_is_better=lower_is_better)
    by_rates = {(trial.client_lr, trial.server_lr): trial for trial in trials}
    head = "".join(f'<th scope="col" class="number">{server:.3g}</th>' for server in servers)
    lines = [
        f'<tr><th></th><th colspan="{len(servers)}" scope="colgroup">server rate</th></tr>',
        f'<tr><th scope="col">client rate</th>{head}</tr>',
    ]
    for client in clients:
        cells = []
        for server in servers:
            trial = by_rates.get((client, server))
            if trial is None:
                cells.append('<td class="number quiet" title="not tried">–</td>')
                continue
            share = shares.get(trial.value, 0.0)
            frame = " chosen" if trial is chosen else ""
            # The colour adds to the number, which can be read without it.
            cells.append(
                f'<td class="number cell{frame}" style="--share:{100 * share:.0f}%" title="run {_text(trial.run)}">'
                f"{_text(_value(trial))}</td>"
            )
        lines.append(f'<tr><th scope="row" class="number">{client:.3g}</th>{"".join(cells)}</tr>')
    return f'<div class="scroll"><table class="rates">{"".join(lines)}</table></div>'


def _shares(values: Sequence[float], *, lower_is_better: bool) -> dict[float, float]:
    """How dark each value is drawn: 1 for the best, falling with the distance from it, 0 for one that diverged.

    The scale ends at the worst value, or at twice the median distance: one pair that fails must not leave all others
    in one colour.
    """
    finite = [value for value in values if math.isfinite(value)]
    best = (min if lower_is_better else max)(finite, default=0.0)
    away = {value: abs(value - best) for value in finite}
    distances = [away[value] for value in finite]
    span = min(max(distances, default=0.0), 2 * median(distances or [0.0])) or max(distances, default=0.0) or 1.0
    return {value: max(0.0, 1 - distance / span) for value, distance in away.items()}


def _value(trial: RateTrial) -> str:
    if not math.isfinite(trial.value):
        return "diverged"
    return f"{trial.value:.4g}" + (" (pruned)" if trial.pruned else "")


def _noises(answer: Tuned) -> str:
    """Each noise tried: what it costs in the metric, and what cohort the target would need with it."""
    limit, rows = answer.question.degradation, list[tuple[str, ...]]()
    losses = dict(answer.noise.losses(answer.metric))
    for trial in sorted(answer.noise.trials, key=lambda trial: trial.noise_multiplier):
        loss = losses[trial.noise_multiplier]
        cohort = least_cohort(answer.question.target, trial.noise_multiplier)
        verdict = "chosen" if trial == answer.noise.chosen else "borne" if loss <= limit else "too much"
        rows.append(
            (
                f"{trial.noise_multiplier:.3g}",
                f"{trial.value:.4g}" if math.isfinite(trial.value) else "diverged",
                "" if len(rows) == 0 or not math.isfinite(loss) else change_in_words(loss),
                _TOO_MANY if cohort is None else f"{cohort:,}",
                verdict,
                trial.run[:10],
            )
        )
    heads = ("z", answer.metric.name, "change", "cohort needed", "", "run")
    return _table(heads, rows, numbers=(0, 1, 2, 3))


def _scale(answer: Tuned) -> str:
    """The factor, and what other promises and other populations would take."""
    if answer.scaled is None:
        return "<p>No cohort of the users there are meets the target; see above for what would.</p>"
    target, z = answer.question.target, answer.noise.chosen.noise_multiplier
    variants = [
        (f"epsilon {target.epsilon * f:g}", replace(target, epsilon=target.epsilon * f)) for f in (0.25, 0.5, 2)
    ]
    variants += [
        (f"{users:,} users", replace(target, population_size=users))
        for f in (0.1, 10)
        if (users := int(target.population_size * f)) >= target.cohort_size
    ]
    rows = [("as asked", f"{answer.scaled.cohort_size:,}", rounded_up(answer.scaled.noise_multiplier, 4))]
    untried = answer.more_noise_untried
    for name, other in variants:
        cohort = least_cohort(other, z)
        noise = "" if cohort is None else rounded_up(z * cohort / target.cohort_size, 4)
        most = "at most " if untried and cohort is not None and cohort > target.cohort_size else ""
        none = "not tried" if untried else _TOO_MANY
        rows.append((name, none if cohort is None else f"{most}{cohort:,}", noise))
    note = (
        f" More noise than z = {z:.3g} at m = {target.cohort_size} was not tried, because it meets the promise that "
        "was asked for. The model may tolerate more: tune for the other promise in the same folder to find out."
    )
    return (
        f"<p>{_text(words.scale_words(answer))}</p><p>The same model with another promise, or for another number of "
        f"users.{_text(note if untried else '')}</p>"
        f"{_table(('', 'cohort, users a round', 'noise multiplier'), rows, numbers=(1, 2))}"
    )


def _next(answer: Tuned | PrivatelyTuned, files: Files) -> str:
    commands = words.next_words(answer, files)
    if not commands:
        return ""
    listed = "\n".join(_text(command) for command in commands)
    return f"<h2>What to run next</h2><pre>{listed}</pre>"


def _rests_on(answer: Tuned | PrivatelyTuned) -> str:
    question, target = answer.question, answer.question.target
    trial = question.trial
    rows = [
        ("trial", data_words(question)),
        ("measured", f"{answer.metric.name}, mean over what was measured in the last {answer.metric.window} rounds"),
        ("rounds", f"{trial.rounds}, of the trial and of the final training alike"),
        ("clip", f"tracks quantile {trial.quantile:g} of the update norms, from {trial.clip_start:g} on"),
        ("local training", f"{trial.client_epochs} epoch(s), batches of {trial.batch_size}"),
        ("server", f"{trial.server}" + (f", momentum {trial.server_momentum:g}" if trial.server == "sgd" else "")),
        ("sampling", "Poisson; every user takes part in a round with the same chance, by a public rate"),
        ("neighbours", f"{target.relation.value} one user"),
        ("users", f"{target.population_size:,}, declared beforehand and not read from the data"),
        ("delta", delta_rounded_up(target.delta_value) + (" = users^-1.1" if target.delta is None else "")),
    ]
    return f"<h2>What it rests on</h2>{_table(('', ''), rows)}"


def _trial_words(answer: Tuned | PrivatelyTuned) -> str:
    paper = "The paper's recipe for practice (Andrew et al., NeurIPS 2021, last section)."
    return f"{paper} Trial on {data_words(answer.question)}."


def _tiles(pairs: Iterable[tuple[str, str]]) -> str:
    tiles = "".join(f'<div class="tile"><b>{_text(value)}</b>{_text(name)}</div>' for name, value in pairs)
    return f'<div class="tiles">{tiles}</div>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def cell(tag: str, place: int, text: str) -> str:
        return f'<{tag} class="{"number" if place in numbers else "words"}">{_text(text)}</{tag}>'

    head = "".join(cell("th", place, text) for place, text in enumerate(heads)) if any(heads) else ""
    body = "".join(f"<tr>{''.join(cell('td', place, text) for place, text in enumerate(row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _document(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,"><title>{_text(title)}</title>\n'
        f"<style>{style()}</style></head>\n<body><main>{body}</main></body></html>\n"
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _text(text: object) -> str:
    return html.escape(str(text))
