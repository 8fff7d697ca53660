"""Write docs/results/paper.md, our findings beside the paper's, from study directories that `clipline reproduce` made.

python studies/paper_results.py STUDY... [--out docs/results/paper.md]

The page is generated and never edited by hand.
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "docs"))
from wrap import wrapped

from clipline.errors import CliplineError, RunError
from clipline.plotting import PALETTE, new_figure, save_figure
from clipline.privacy import rounded_up
from clipline.study import StudyDirectory
from clipline_paper.facts import FACTS
from clipline_paper.study.experiments import EXPERIMENTS, MEDIAN_IS_WORST, Findings, noise_that_helps
from clipline_paper.study.figures import averaged, clipping_panel, draw
from clipline_paper.study.protocol import NOISES, PAPER_COHORT, Protocol, differences, protocol_for
from clipline_paper.study.recompute import findings_of, paper_experiments
from clipline_paper.study.rules import DEGRADED, ClipComparison, percents
from clipline_paper.study.without_training import TableRow, figure1, figure2, table1

# Section 3.3 of the paper, by its Figure 7: how the median clip did beside the best fixed clip on the test set.
PAPER_COMPARISON = {
    "cifar100": "better",
    "emnist_ae": "better",
    "shakespeare": "better",
    "emnist_cr": "as good",
    "so_nwp": "as good",
    "so_lr": "worse",
}
# What is known of a clip that ran away and is not in the records: docs/howto/reproduce.md.
_CURES = {
    "emnist_ae": "In one run, which is not among these records, a server rate of 1 kept the clip near 1.4. That rate "
    "is outside the paper's grid (1.78 and more)."
}
# Section 3.1, by its Figure 3: how clipping without noise did beside no clipping. Nothing is said of EMNIST-CR.
PAPER_CLIPPING = {
    "cifar100": "better",
    "emnist_ae": "better",
    "so_nwp": "better",
    "shakespeare": "slightly worse",
    "so_lr": "slightly worse",
}
GREY = "0.35"
_FIGURES = {
    "learning-rates": "Learning rates",
    "fig3": "Figure 3: clipping without noise",
    "fig4": "Figure 4: the clip while training",
    "fig5": "Figure 5: adaptive clips and noise",
    "fig6": "Figure 6: fixed clips and noise",
    "fig7": "Figure 7: the median against the best fixed clip",
}


@dataclass(frozen=True)
class Entry:
    """One experiment on one task, with the words for its data, what computed it, and the epsilon of its final runs."""

    findings: Findings
    data: str
    devices: tuple[str, ...]
    precisions: tuple[str, ...]
    runs: int
    epsilon: float | None


@dataclass(frozen=True)
class Group:
    """The experiments on one task at one scale, by name: fig7, say."""

    task: str
    scale: str
    entries: dict[str, Entry]

    @property
    def name(self) -> str:
        """As tables have it: cifar100, 400 rounds of 10."""
        return f"{self.task}, {self.scale}"

    @property
    def protocol(self) -> Protocol:
        """Of Figure 7, or of the first experiment there is."""
        return (self.entries.get("fig7") or next(iter(self.entries.values()))).findings.protocol

    @property
    def numbers(self) -> dict[str, Any]:
        """Those about the range of clips and of Figure 7."""
        found = [entry.findings.numbers for entry in self.entries.values()]
        return {name: number for numbers in found if "clip_min" in numbers for name, number in numbers.items()}


def write_results_page(studies: Sequence[Path], page: Path, *, without_training: bool = True) -> Path:
    """Write the page of these studies, with its pictures in a folder of the page's name beside it.

    Every number is computed anew from the records. Where two studies hold the same experiment at the same scale, the
    later one counts; an experiment that is not finished is named and left out. Table 1 and Figures 1 and 2 are computed
    too, unless `without_training` is False.
    """
    groups, unfinished = _collect(studies)
    if not groups:
        raise RunError(f"{', '.join(map(str, studies))} hold no finished experiment of the paper: run one first")
    pictures = page.with_suffix("")
    pictures.mkdir(parents=True, exist_ok=True)
    for group in groups:
        for what, entry in group.entries.items():
            draw(entry.findings, pictures / _picture(group, what), entry.data)
    compared = [(group, group.numbers) for group in groups if "comparison" in group.numbers]
    if compared:
        labels = [f"{group.name} (no noise)" if found["z_star"] == 0 else group.name for group, found in compared]
        rows = [found["comparison"] for _, found in compared]
        _draw_summary(pictures / "summary.png", list(zip(labels, rows, strict=True)))
    third = {group.task: group.entries["fig3"].findings for group in reversed(groups) if "fig3" in group.entries}
    if third:  # of each task the paper's scale, where it is there
        _draw_fig3(pictures / "fig3.png", list(reversed(third.values())))
    table = list[TableRow]()
    if without_training:
        figure1(pictures, overwrite=True)
        figure2(pictures, overwrite=True)
        for data in pictures.glob("fig[12].csv"):
            data.unlink()
        table = table1()
    page.write_text(wrapped(_text(groups, unfinished, pictures.name, table)), encoding="utf-8")
    return page


def _picture(group: Group, what: str) -> str:
    return f"{what}-{group.task}{'-paper' if group.scale == _PAPER else ''}.png"


_PAPER = "paper's scale"


def _scale(protocol: Protocol) -> str:
    """A scale in words: where rounds, cohort and the clip's start are the paper's, it is the paper's."""
    if (protocol.rounds, protocol.cohort_size, protocol.clip_start) == (FACTS[protocol.task].rounds, PAPER_COHORT, 0.1):
        return _PAPER
    return f"{protocol.rounds:,} rounds of {protocol.cohort_size}"


def _collect(studies: Sequence[Path]) -> tuple[list[Group], list[str]]:
    """What is finished, by task and scale, the paper's scale first; and a sentence for each that is not."""
    found: dict[tuple[str, str], dict[str, Entry]] = {}
    unfinished = list[str]()
    for path in studies:
        directory = StudyDirectory.existing(path)
        for name, facts in paper_experiments(directory).items():
            try:
                findings = findings_of(directory, facts)
            except CliplineError as error:
                unfinished.append(f"{name}: {error}")
                continue
            if findings.protocol.task not in FACTS:  # a task of somebody's own, of which the paper says nothing
                continue
            key = findings.protocol.task, _scale(findings.protocol)
            found.setdefault(key, {})[findings.what] = _entry(directory, findings, facts["data"])
    tasks, whats = list(FACTS), list(EXPERIMENTS)
    order = sorted(found, key=lambda key: (tasks.index(key[0]), key[1] != _PAPER))
    sort = {key: dict(sorted(found[key].items(), key=lambda item: whats.index(item[0]))) for key in order}
    return [Group(*key, entries) for key, entries in sort.items()], unfinished


def _entry(directory: StudyDirectory, findings: Findings, data: str) -> Entry:
    names = {run for table in findings.tables.values() for row in table.rows for run in row["runs"].split()}
    records = {name: record for name in sorted(names) if (record := directory.record(name)) is not None}
    seeds = findings.tables["seeds"].rows if "seeds" in findings.tables else []
    promises = [records[row["runs"]].guarantee or {} for row in seeds]
    return Entry(
        findings,
        data,
        tuple(sorted({str(record.circumstances.get("device")) for record in records.values()})),
        tuple(sorted({str(record.identity["settings"].get("precision")) for record in records.values()})),
        len(names),
        max((float(promise["epsilon"]) for promise in promises if promise.get("epsilon") is not None), default=None),
    )


def _text(groups: Sequence[Group], unfinished: Sequence[str], pictures: str, table: Sequence[TableRow]) -> str:
    lines = [
        "# The paper's experiments, made again",
        "",
        *_wrapped(_INTRODUCTION, ""),
        *_how_far(groups),
        *_conclusions(groups, pictures),
        *_clipping(groups, pictures),
        *_beside_the_paper(groups),
    ]
    for group in groups:
        lines += _of_group(group, pictures)
    if table:
        lines += _without_training(table, pictures)
    begun = {group.task for group in groups}
    waiting = [task for task in PAPER_COMPARISON if task not in begun]
    if unfinished or waiting:
        lines += ["## Not finished", "", *(f"- {said}" for said in unfinished)]
        lines += [*(f"- {task}: no experiment has ended yet" for task in waiting), ""]
    return "\n".join(lines)


_INTRODUCTION = (
    "This page is written by `python studies/paper_results.py studies/paper studies/paper_scale`, from the records of "
    "the runs alone. The `README.md` of both folders has the commands that made the runs. Sections and figures are "
    "those of *Differentially Private Learning with Adaptive Clipping*. z* is the largest noise that was tolerated: "
    "up to it, the best of the median and the five fixed clips stays within 5% of what it reaches without noise. C* is "
    "the best fixed clip at z*: [all rules](../howto/reproduce.md#the-rules). z is given for 100 users a round. With m "
    "users a round, runs have z m / 100, so the mean update has the same noise. A server rate is the task's own times "
    "the best of the factors listed."
)


def _wrapped(said: str, mark: str = "- ") -> list[str]:
    """A list item, or a paragraph, in lines."""
    folded = textwrap.wrap(mark + said, 110, subsequent_indent=" " * len(mark), break_on_hyphens=False)
    return folded if mark else [*folded, ""]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)] + [""]


def _how_far(groups: Sequence[Group]) -> list[str]:
    """What has to be known before anything is concluded: how these runs differ from the paper's and from a scale's."""
    rows, by_hand, shares, near = list[list[str]](), list[str](), list[float](), list[str]()
    for group in groups:
        protocol, numbers, facts = group.protocol, group.numbers, FACTS[group.task]
        fig7 = group.entries.get("fig7")
        share = protocol.rounds * protocol.cohort_size / (facts.rounds * PAPER_COHORT)
        changed = _set_by_hand(protocol)
        if group.scale != _PAPER:
            shares.append(share)
            by_hand += [group.name] if changed else []
        ends = numbers.get("median_clip_ends", [])
        middle = sum(ends) / len(ends) if ends else math.nan
        ran_away = bool(numbers.get("median_clip_ran_away"))  # where such a clip ended says nothing of a start
        if group.scale != _PAPER and not ran_away and 0.5 <= middle / protocol.clip_start <= 2:
            near.append(group.task)
        rows.append([
            group.name,
            f"{100 * share:.2g}%" if share < 0.995 else "all",
            "the same" if protocol.cohort_size == PAPER_COHORT else f"{PAPER_COHORT / protocol.cohort_size:.3g} times",
            f"{protocol.clip_start:g}",
            (f"{min(ends):.3g} to {max(ends):.3g}" if ends else "-") + " (ran away)" * ran_away,
            " and ".join(sorted({one for entry in group.entries.values() for one in entry.precisions})),
            str(protocol.seeds) if fig7 else "-",
            "-" if fig7 is None else "no noise" if fig7.epsilon is None else f"{math.ceil(fig7.epsilon):,}",
            ", ".join(changed) or "nothing",
        ])  # fmt: skip
    short = [group for group in groups if group.scale != _PAPER]
    starts = sorted({group.protocol.clip_start for group in short})
    epsilons = [e.epsilon for group in groups for e in group.entries.values() if e.epsilon is not None]
    said = list[str]()
    if all(entry.data.startswith("substitute") for group in groups for entry in group.entries.values()):
        said.append(
            "**Other data.** No task was trained on the paper's data. Each section names the substitute, which is what "
            "a verdict is about."
        )
    never = [task for task in PAPER_COMPARISON if task not in {group.task for group in groups if group.scale == _PAPER}]
    if never:
        said.append(
            f"**Not at the paper's scale.** {', '.join(never)}: no run has the paper's rounds and users a round, which "
            "take a GPU. Nothing here says what these tasks do at that scale."
        )
    if short:
        all_of_them = len(by_hand) == len(short) > 1
        of_these = f"All {len(short)} of these" if all_of_them else f"{len(by_hand)} of these {len(short)}"
        said += [
            f"**Short runs.** {len(short)} of {len(groups)} sets of runs have {min(shares):.1%} to {max(shares):.1%} "
            "of the paper's user updates (rounds times users a round).",
            f"**Set by hand.** {of_these} have other settings than their `--scale`: rounds, "
            "users a round and the clip's start were chosen for the time at hand.",
            f"**The clip's start was chosen too.** It is {starts[0]:g} to {starts[-1]:g}, where the paper has 0.1 on "
            f"every task. On {len(near)} of {len(short)} ({', '.join(near) or 'none'}) it is within a factor of two of "
            "where the median's clip ended, so that nobody may call that clip untuned. Clips that ran away are not "
            "counted.",
        ]
    said += [
        "**One seed a point.** Figures 3 to 6, and the choice of z*, C* and server rates, rest on one seed.",
        "**Few seeds.** An interval is a bootstrapped 95% interval over the seeds of Figure 7. With so few it is too "
        "narrow, so that better and worse are less sure than they look.",
        "**Arithmetic.** The table names it: bf16 is bfloat16, of which the paper says nothing.",
    ]
    if epsilons:
        low, high = (math.ceil(extreme(epsilons)) for extreme in (min, max))
        said.append(
            f"**Not private.** The final runs with noise have an epsilon of {low:,} to {high:,} (fixed-size sampling, "
            "replace one user, delta = n^-1.1). They study noise, not privacy."
        )
    header = [
        "runs", "of the paper's user updates", "sampling variance, of the paper's", "clip's start (paper: 0.1)",
        "median's clip at the end", "arithmetic", "seeds, Figure 7", "epsilon", "otherwise than the scale has it",
    ]  # fmt: skip
    return ["## Read this first", "", *(line for one in said for line in _wrapped(one)), "", *_table(header, rows)]


_SETTINGS = {
    "rounds": "rounds",
    "cohort_size": "users a round",
    "clip_start": "clip's start",
    "average_over": "rounds averaged over",
    "evaluate_every": "how often measured",
    "seeds": "seeds",
    "server_rates": "server rates",
    "noises": "noises",
    "max_examples": "most examples of a user",
}


def _set_by_hand(protocol: Protocol) -> list[str]:
    """What differs from the scale that was named."""
    scale = protocol_for(protocol.task, protocol.scale)
    return [words for name, words in _SETTINGS.items() if getattr(protocol, name) != getattr(scale, name)]


def _conclusions(groups: Sequence[Group], pictures: str) -> list[str]:
    """The verdict of each comparison beside the paper's, and what has to be said of it."""
    compared = [(group, group.numbers["comparison"]) for group in groups if "comparison" in group.numbers]
    if not compared:
        return []
    rows = []
    for group, found in compared:
        z_star, paper = group.numbers["z_star"], PAPER_COMPARISON[group.task]
        verdict = f"{found.verdict} (without noise)" if z_star == 0 else found.verdict
        difference = percents(found.difference) if math.isfinite(found.difference.mean) else "a run diverged"
        agrees = "open: no noise here" if z_star == 0 else agreement(found, paper)
        rows.append([group.name, f"{z_star:g}", difference, verdict, paper, agrees])
    named = {
        word: [row for row, (_, found) in zip(rows, compared, strict=True) if found.word == word] for word in _WORDS
    }
    counted = [
        f"**{word.capitalize()}**: {'; '.join(row[0] + row[3].removeprefix(word) for row in of_word)}."
        for word, of_word in named.items()
        if of_word
    ]
    missing = [task for task in PAPER_COMPARISON if task not in {group.task for group, _ in compared}]
    counted += [f"Not compared yet: {', '.join(missing)}."] if missing else []
    remarks = [f"{group.name}: {said}" for group, _ in compared for said in _remarks(group)]
    return [
        "## What was found",
        "",
        *_wrapped(_CLAIM, ""),
        f"![The median clip less the best fixed clip, in percent of the metric]({pictures}/summary.png)",
        "",
        *_table(["runs", "z*", "median less best fixed clip", "verdict", "the paper: the median is", "agree"], rows),
        *_wrapped(_PAPERS_WORDS, ""),
        *(line for one in counted for line in _wrapped(one)),
        "",
        *(["What these verdicts do not say:", ""] if remarks else []),
        *(line for one in remarks for line in _wrapped(one)),
        *([""] if remarks else []),
    ]


_WORDS = ("equivalent", "better", "worse", "undecided")
_CLAIM = (
    "The claim: clipping to the median does as well as the best fixed clip chosen in hindsight, on most tasks. Each "
    "line compares the two on test users over seeds, in pairs where both sides have the same seeds. The margin is 5% "
    "of the metric, the paper's own tolerance. *Equivalent*: the whole interval of the difference is inside the "
    "margin. *Better*, *worse*: the interval leaves out 0 and is not inside the margin. *Undecided*: anything else. A "
    "difference is negative where the median is worse, also where the metric is an error."
)
_PAPERS_WORDS = (
    "What the paper says is from its section 3.3 and Figure 7: there the median *outperforms* the best fixed clip "
    "(better), is *comparable* (as good), or the fixed clip does *somewhat better* (worse). It names no margin, so "
    "that *agree* compares two rules."
)
# How a substitute differs from the paper's data, where norms of updates depend on it.
_OTHER_DATA = {"so_lr": "other data, with shorter texts and fewer tags"}


def _remarks(group: Group) -> Iterator[str]:
    """What a verdict does not say by itself."""
    numbers = group.numbers
    z_star, alone = numbers["z_star"], numbers["median_z_star"]
    if z_star == 0:
        yield "z* is 0, so that clips are compared without noise. The verdict says nothing about noise."
    if numbers["median_clip_ran_away"]:
        yield (
            f"the median's clip ran away: at z* = {z_star:g} it rose to {numbers['median_clip_highest']:.3g}, where "
            f"clips without noise stay within {numbers['clip_max']:.3g}. Noise is in proportion to the clip, so that a "
            "[rise feeds itself](../howto/reproduce.md#a-clip-that-runs-away); a fixed clip cannot rise. "
            + _CURES.get(group.task, "A lower server rate may cure it.")
        )
    if alone < z_star:
        yield (
            f"by itself the median stays within 5% up to z = {alone:g} only. z* goes by the best of all clips that are "
            "compared, which here was a fixed one."
        )
    if numbers["median_is_worst"]:
        yield f"{MEDIAN_IS_WORST}."
    yield from _other_clips(group)
    if numbers["noise_helps"]:
        yield f"{noise_that_helps(numbers['noise_helps'])}."


def _other_clips(group: Group) -> Iterator[str]:
    """Where clips are far from the paper's: ranges that do not overlap, or a C* more than three times another."""
    numbers, facts = group.numbers, FACTS[group.task]
    assert facts.clip_min is not None
    assert facts.clip_max is not None
    low, high, best = numbers["clip_min"], numbers["clip_max"], numbers["c_star"]
    apart = high < facts.clip_min or low > facts.clip_max
    if apart or not 1 / 3 <= best / facts.best_clip <= 3:
        yield (
            f"its clips, {low:.3g} to {high:.3g} with C* = {best:.3g}, are far from the paper's, {facts.clip_min:g} to "
            f"{facts.clip_max:g} with C* = {facts.best_clip:g}: {_OTHER_DATA.get(group.task, 'other data')}. So it "
            "tests the method, not the paper's numbers."
        )


def agreement(ours: ClipComparison, paper: str) -> str:
    """Whether our verdict is the paper's. It gives no margin: inside ours, only the direction can be compared."""
    if ours.word == "undecided":
        return "open"
    if ours.word in ("better", "worse"):
        return "yes" if ours.word == paper else "**no**"
    if paper == "as good":
        return "yes"
    if not ours.direction:
        return "**no**: no difference here"
    return "in direction, inside the margin" if ours.direction == paper else "**no**: the other direction"


def _clipping(groups: Sequence[Group], pictures: str) -> list[str]:
    """Figure 3 of all tasks: no clipping against the median."""
    third = [(group, group.entries["fig3"].findings) for group in groups if "fig3" in group.entries]
    if not third:
        return []
    before = "clipping to the median without noise "
    rows = [
        [
            group.name,
            found.numbers.get("verdict", "every run diverged").removeprefix(before)
            + (
                f"; {group.entries['learning-rates'].findings.numbers['beside']}"
                if "learning-rates" in group.entries
                else ""
            ),
            PAPER_CLIPPING.get(group.task, "-"),
        ]
        for group, found in third
    ]
    return [
        "## Clipping without noise",
        "",
        f"![Figure 3: clipping without noise, all tasks, at the paper's scale where it was run]({pictures}/fig3.png)",
        "",
        *_table(["runs", "ours: clipping to the median without noise", "the paper's (Figure 3)"], rows),
        *_wrapped(
            "Each is one run beside one run, so that small differences may be chance. The unclipped run has the "
            "paper's rates, which it chose for its own number of rounds; with few rounds this favours clipping, which "
            "has the best of several server rates. Where it says -, the paper says nothing.",
            "",
        ),
    ]


def _beside_the_paper(groups: Sequence[Group]) -> list[str]:
    """One table: z*, C* and the clip range, ours and the paper's."""
    shown = [group for group in groups if "clip_min" in group.numbers]
    if not shown:
        return []
    header = ["runs", "z*", "paper's z*", "C*", "paper's C*", "C_min to C_max", "paper's", "median, test"]
    rows = []
    for group in shown:
        numbers, facts = group.numbers, FACTS[group.task]
        rows.append([
            group.name,
            f"{numbers['z_star']:g}" if "z_star" in numbers else "-",
            f"{facts.noise_at_100:g}",
            f"{numbers['c_star']:g}" if "c_star" in numbers else "-",
            f"{facts.best_clip:g}",
            f"{numbers['clip_min']:.3g} to {numbers['clip_max']:.3g}",
            f"{facts.clip_min:g} to {facts.clip_max:g}",
            *(str(numbers[side]) if side in numbers else "-" for side in ("median", "fixed")),
        ])  # fmt: skip
    said = list[str]()
    small: dict[int, list[str]] = {}
    for group in shown:
        small.setdefault(group.protocol.cohort_size, []).append(group.task)
    more = [
        f"{m} users a round have {PAPER_COHORT / m:.3g} times the sampling variance of 100 ({', '.join(small[m])})"
        for m in sorted(small)
        if m < PAPER_COHORT
    ]
    if more:
        said.append(
            "z* beside the paper's: noise on the mean update is the same, but "
            + "; ".join(more)
            + ". So much variance "
            "hides noise: a z* above the paper's does not mean that more noise can be borne."
        )
    if any(group.numbers.get("z_star") == group.numbers.get("largest_noise", math.nan) for group in shown):
        said.append("A z* that is the largest noise tried may be larger still; so may the paper's 0.1.")
    for group in shown:
        z_star = group.numbers.get("z_star")
        if z_star is not None and (too_much := _coarse_step(z_star, group.protocol.noises)):
            between = f"On {group.name}, no noise between z = {z_star:g} and {too_much:g} was tried"
            said.append(f"{between}: z* may be larger.")
    lines = [line for one in said for line in _wrapped(one)]
    return ["## z*, C* and the range of clips", "", *_table([*header, "best fixed, test"], rows), *lines, ""]


def _coarse_step(z_star: float, tried: Sequence[float]) -> float | None:
    """The next noise that was tried above z*, if the paper tried another between the two."""
    too_much = min((noise for noise in tried if noise > z_star), default=z_star)
    return too_much if any(z_star < noise < too_much for noise in NOISES) else None


def _of_group(group: Group, pictures: str) -> list[str]:
    facts = FACTS[group.task]
    direction = ", lower is better" if facts.lower_is_better else ""
    lines = [f"## {group.name} ({facts.metric_name.replace('_', ' ')}{direction})", ""]
    shown: list[str] = []
    for what, entry in group.entries.items():
        protocol = entry.findings.protocol
        table = [f"Scale `{protocol.scale}`. Otherwise than in the paper:", ""]
        table += _table(["", "here", "paper"], differences(protocol, entry.data))
        if table != shown:  # once for all figures that share it
            lines += table
            shown = table
        numbers = entry.findings.numbers
        verdict = f": {numbers['comparison'].verdict}" if "comparison" in numbers else ""
        alt = f"{_FIGURES[what]}, {group.name}{verdict}"
        lines += [f"### {_FIGURES[what]}", "", f"![{alt}]({pictures}/{_picture(group, what)})", ""]
        lines += [f"- {line.strip().partition(': give --')[0]}" for line in entry.findings.summary]
        scaled = "" if protocol.cohort_size == PAPER_COHORT else f" of {protocol.cohort_size} users a round"
        computed = f"{' and '.join(entry.devices)}, in {' and '.join(entry.precisions)}"
        lines += ["", f"{entry.runs} runs{scaled}, on {computed}.", ""]
    return lines


def _without_training(rows: Sequence[TableRow], pictures: str) -> list[str]:
    """Table 1 and Figures 1 and 2, which need no training."""
    header = ["task", "rounds", "z*", "printed", "ours", "epsilon, fixed-size", "epsilon, Poisson"]
    cells = [
        [
            row.task, f"{row.rounds:,}", f"{row.noise_at_100:g}", f"{row.paper_cohort:,}",
            f"{row.paper_convention_cohort:,}", rounded_up(row.fixed_epsilon, 4), rounded_up(row.poisson_epsilon, 4),
            f"{row.fixed_cohort:,}", f"{row.poisson_cohort:,}",
        ]
        for row in rows
    ]  # fmt: skip
    return [
        "## Table 1, and Figures 1 and 2",
        "",
        *_wrapped(
            "Users a round for epsilon 5 at delta = n^-1.1, with n = 1,000,000 users and noise z = z* m / 100. *Ours* "
            "follows the paper's convention and meets its table. It is no guarantee, since exchanging a user moves the "
            "sum by two clips. Beside it stand the epsilon that the printed number really has, and the users that are "
            "really needed: fixed-size sampling with one user replaced, Poisson sampling with one added or removed.",
            "",
        ),
        *_table([*header, "users, fixed-size", "users, Poisson"], cells),
        f"![Figure 1: the loss whose minimum is the quantile]({pictures}/fig1.png)",
        "",
        f"![Figure 2: the clip finds its quantile]({pictures}/fig2.png)",
        "",
    ]


def _draw_fig3(path: Path, findings: Sequence[Findings]) -> None:
    """Write Figure 3 of several tasks as one PNG: up to three in a row."""
    columns = min(3, len(findings))
    rows = -(-len(findings) // columns)
    figure, axes = new_figure(rows, columns, width=4.4 * columns, height=0.7 + 3.3 * rows)
    for axis, one in zip(axes, findings, strict=False):
        seeds = clipping_panel(axis, one, size=8)
        axis.set_title(f"{one.protocol.task}, {averaged(one.protocol, short=True)}{seeds}", fontsize=9)
    for axis in axes[len(findings) :]:
        axis.set_visible(False)
    figure.suptitle(
        "Figure 3: what clipping does without noise, on the validation users (dashed: no clipping)",
        fontsize=11, x=0.01, ha="left",
    )  # fmt: skip
    said = "quantile of update norms that the clip follows (0.1 clips most), each at its best server rate"
    figure.supxlabel(said, fontsize=10)
    save_figure(figure, path)


def _draw_summary(path: Path, rows: Sequence[tuple[str, ClipComparison]]) -> None:
    """Write the picture that compares the median with the best fixed clip on all tasks, a row each, as PNG."""
    margin = 100 * DEGRADED
    figure, (axis,) = new_figure(1, 1, width=9.5, height=1.9 + 0.42 * len(rows))
    drawn = [one.difference for _, one in rows]
    ends = [abs(end) for one in drawn for end in (one.low, one.mean, one.high) if abs(end) <= 6 * margin]
    limit = 1.12 * max(2 * margin, *ends)
    axis.axvspan(-margin, margin, color="0.5", alpha=0.18, lw=0)
    axis.axvline(0, color=GREY, lw=1)
    for y, (_, compared) in enumerate(rows):
        found, word = compared.difference, compared.word
        marker, colour = _VERDICTS.get(word, ("o", GREY))
        if not math.isfinite(found.mean):
            axis.annotate("a run diverged", (0, y), (6, 0), textcoords="offset points", va="center", fontsize=9)
        elif abs(found.mean) > limit:  # too far to be drawn
            side = math.copysign(1.0, found.mean)
            axis.annotate(
                _percent(round(found.mean)), (side * limit, y), (side * limit * 0.8, y), va="center", color=colour,
                ha="left" if side < 0 else "right", arrowprops={"arrowstyle": "->", "color": colour, "lw": 2},
            )  # fmt: skip
        else:
            for end in (found.low, found.high):
                cut = abs(end) > limit
                axis.annotate(
                    "", (math.copysign(limit, end) if cut else end, y), (found.mean, y),
                    arrowprops={"arrowstyle": "->" if cut else "|-|,widthA=0,widthB=0.45", "color": colour, "lw": 2,
                                "shrinkA": 0, "shrinkB": 0},
                )  # fmt: skip
            face = "white" if word == "undecided" else colour
            axis.plot(found.mean, y, marker, color=colour, mfc=face, mew=1.5, ms=6.5)
        axis.annotate(word, (1.02, y), xycoords=("axes fraction", "data"), va="center", annotation_clip=False)
    axis.set_yticks(range(len(rows)), [label for label, _ in rows])
    axis.set(xlim=(-limit, limit), ylim=(len(rows) - 0.4, -0.6))
    axis.xaxis.set_major_formatter(lambda x, _: _percent(x))
    axis.grid(False, axis="y")
    axis.set_xlabel(
        f"median less best fixed clip, in percent of the metric: right is better for the median\n(mean and paired 95% "
        f"interval over seeds; shaded: the margin of {margin:g}% within which both count as equivalent)"
    )
    figure.suptitle("The median clip against the best fixed clip of five", fontsize=11, x=0.01, ha="left")
    save_figure(figure, path)


def _percent(number: float) -> str:
    return f"{number:+g}%".replace("-", "\u2212") if number else "0%"


_VERDICTS = {"equivalent": ("o", "black"), "better": ("^", PALETTE[0]), "worse": ("v", PALETTE[1])}


def main() -> None:
    """Read the arguments, write the page and its pictures, print where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "studies", nargs="+", type=Path, help="study directories; of the same experiment the last counts"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results/paper.md"), help="the page to write")
    given = parser.parse_args()
    try:
        print(write_results_page(given.studies, given.out))
    except CliplineError as error:
        sys.exit(f"paper_results: {error}")


if __name__ == "__main__":
    main()
