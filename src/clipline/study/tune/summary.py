"""A tuning in words: what was tried, what was chosen and why, what it costs, what to run next."""

from __future__ import annotations

import math

from ...privacy.guarantee import rounded_up
from .files import Files, data_words
from .private_search import PrivatelyTuned
from .rates import runs_with_fixed_clips
from .recipe import Tuned, told


def rates_words(answer: Tuned) -> str:
    """Step 1 in a sentence or two."""
    trials, metric = answer.rates.trials, answer.metric
    diverged = sum(not math.isfinite(trial.value) for trial in trials)
    pruned = sum(trial.pruned for trial in trials)
    notes = [f"{diverged} diverged" if diverged else "", f"{pruned} were pruned" if pruned else ""]
    pairs = "1 pair of rates was" if len(trials) == 1 else f"{len(trials)} pairs of rates were"
    counted = "; ".join([f"{pairs} tried", *filter(None, notes)])
    edge = " Neighbours of it were not tried for want of --runs." if answer.rates.on_edge else ""
    return f"{counted}: {told(answer.rates.chosen, metric)}.{edge}"


def noise_words(answer: Tuned) -> str:
    """Step 2 in a sentence or two."""
    noise, limit = answer.noise, 100 * answer.question.degradation
    rising = sorted(trial.noise_multiplier for trial in noise.trials)
    z = noise.chosen.noise_multiplier
    if z == noise.enough and z == rising[-1]:
        why = f"with it m = {answer.question.target.cohort_size} meets the target as it is, so that more was not tried"
    elif z == rising[-1]:
        why = f"the most that a cohort of {answer.question.target.cohort_size} can have"
    else:
        above = min(other for other in rising if other > z)
        loss = dict(noise.losses(answer.metric))[above]
        cost = "diverged" if math.isinf(loss) else f"costs {100 * loss:.3g}% of the {answer.metric.name}"
        why = f"the next one tried, z = {above:.3g}, {cost}"
    return f"z = {z:.3g} is borne at a loss of at most {limit:g}%; {why}."


def scale_words(answer: Tuned) -> str:
    """Step 3 in a sentence."""
    target, scaled = answer.question.target, answer.scaled
    if scaled is None:
        return f"no cohort of the {target.population_size:,} users meets epsilon {target.epsilon:g}: see below."
    z = answer.noise.chosen.noise_multiplier
    if scaled.alpha == 1:
        return f"m = {target.cohort_size} and z = {z:.4g} meet epsilon {target.epsilon:g} as they are: alpha = 1."
    return (
        f"alpha = {scaled.alpha:.4g} takes (m, z) from ({target.cohort_size}, {z:.3g}) to ({scaled.cohort_size:,}, "
        f"{rounded_up(scaled.noise_multiplier, 4)}): the least that meets epsilon {target.epsilon:g}. Noise on the "
        "mean update, and on the fraction within the clip, stays the same."
    )


def clip_words(answer: Tuned) -> str:
    """What a fixed clip would have added."""
    runs = len(answer.rates.trials)
    return (
        f"the clip followed the median: {runs} runs. Five fixed clips for each pair of rates would have taken "
        f"{runs_with_fixed_clips(runs)}."
    )


def privacy_words(answer: Tuned | PrivatelyTuned) -> str:
    """What the search and the final training cost."""
    if isinstance(answer, PrivatelyTuned):
        price = answer.price
        way = (
            f"each of {price.runs} runs charged in full"
            if price.method == "composition"
            else f"the best of a random number of runs, {price.runs} on average"
        )
        return (
            f"search and final training together, {way}: {price.guarantee}. One run alone: epsilon "
            f"{price.one_run.epsilon_text}."
        )
    private = "the search used no private data and costs nothing"
    return private if answer.scaled is None else f"{private}; the final training: {answer.scaled.guarantee}."


def next_words(answer: Tuned | PrivatelyTuned, files: Files) -> list[str]:
    """The commands to run next."""
    if isinstance(answer, Tuned) and answer.scaled is None:
        return []
    known = answer.question.private_data is not None or not answer.question.trial.stored
    data = "" if known else " --data DATA"
    curves = [] if isinstance(answer, PrivatelyTuned) else [f"clipline report {files.folder}"]
    return [f"clipline plan --config {files.final}", f"clipline train --config {files.final}{data}", *curves]


def cautions(answer: Tuned | PrivatelyTuned) -> list[str]:
    """What a reader must know before believing the numbers."""
    found = []
    question = answer.question
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
    if len(answer.noise.trials) > 1 and answer.noise.chosen.noise_multiplier == question.noise_multiplier:
        found.append(
            "No more than the least noise was borne, which makes the cohort large. A longer training may bear more."
        )
    return found


def summary(answer: Tuned | PrivatelyTuned, files: Files) -> str:
    """The whole for a terminal."""
    question, metric = answer.question, answer.metric
    better = "lower" if metric.lower_is_better else "higher"
    lines = [
        f"trial     {data_words(question)}",
        f"measured  {metric.name} ({better} is better), mean over what was measured in the last "
        f"{metric.window} of {question.trial.rounds} rounds",
    ]
    if isinstance(answer, PrivatelyTuned):
        lines.append(f"rates     {len(answer.candidates)} pairs fixed beforehand; {told(answer.chosen, metric)}")
    else:
        lines += [
            f"1 rates   {rates_words(answer)}",
            f"2 noise   {noise_words(answer)}",
            f"3 scale   {scale_words(answer)}",
            f"clip      {clip_words(answer)}",
        ]
    lines.append(f"privacy   {privacy_words(answer)}")
    lines += [f"caution   {text}" for text in cautions(answer)]
    lines += [f"page      {files.page}"]
    lines += [f"next      {command}" for command in next_words(answer, files)]
    return "\n".join(lines)
