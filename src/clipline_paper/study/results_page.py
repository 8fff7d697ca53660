"""A page in Markdown from study directories: our findings beside the paper's. It is generated, never typed."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipline.errors import CliplineError, RunError
from clipline.study import StudyDirectory

from ..facts import FACTS
from .experiments import EXPERIMENTS
from .figures import draw
from .findings import Findings
from .protocol import NOISES, PAPER_COHORT, differences
from .recompute import findings_of, paper_experiments

# Section 3.3 of the paper, by its Figure 7: how the median clip did beside the best fixed clip on the test set.
PAPER_COMPARISON = {
    "cifar100": "better",
    "emnist_ae": "better",
    "shakespeare": "better",
    "emnist_cr": "as good",
    "so_nwp": "as good",
    "so_lr": "worse",
}
# Section 3.1, by its Figure 3: how clipping without noise did beside no clipping. Nothing is said of EMNIST-CR.
PAPER_CLIPPING = {
    "cifar100": "better",
    "emnist_ae": "better",
    "so_nwp": "better",
    "shakespeare": "slightly worse",
    "so_lr": "slightly worse",
}
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
    """One experiment on one task, with the words for its data and what computed it."""

    findings: Findings
    data: str
    devices: tuple[str, ...]
    runs: int


def write_results_page(studies: Sequence[Path], page: Path) -> Path:
    """Write the page of these studies, with its pictures in a folder of the page's name beside it.

    Every number is computed anew from the records. Where two studies hold the same experiment, the later one counts;
    an experiment that is not finished is named and left out.
    """
    entries, unfinished = _collect(studies)
    if not entries:
        raise RunError(f"{', '.join(map(str, studies))} hold no finished experiment of the paper: run one first")
    pictures = page.with_suffix("")
    pictures.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        draw(entry.findings, pictures / f"{entry.findings.name}.png", entry.data)
    page.write_text(_text(entries, unfinished, pictures.name), encoding="utf-8")
    return page


def _collect(studies: Sequence[Path]) -> tuple[list[Entry], list[str]]:
    found: dict[tuple[str, str], Entry] = {}
    unfinished = {}
    for path in studies:
        directory = StudyDirectory.existing(path)
        for name, facts in paper_experiments(directory).items():
            try:
                findings = findings_of(directory, facts)
            except CliplineError as error:
                unfinished[name] = f"{name}: {error}"
                continue
            if findings.protocol.task not in FACTS:  # a task of somebody's own, of which the paper says nothing
                continue
            runs = sorted(
                {run for table in findings.tables.values() for row in table.rows for run in row["runs"].split()}
            )
            records = [record for record in map(directory.record, runs) if record is not None]
            devices = tuple(sorted({str(record.circumstances.get("device")) for record in records}))
            found[findings.protocol.task, findings.what] = Entry(findings, facts["data"], devices, len(runs))
    done = {entry.findings.name for entry in found.values()}
    tasks, whats = list(FACTS), list(EXPERIMENTS)
    order = sorted(found, key=lambda key: (tasks.index(key[0]), whats.index(key[1])))
    return [found[key] for key in order], [said for name, said in unfinished.items() if name not in done]


def _text(entries: Sequence[Entry], unfinished: Sequence[str], pictures: str) -> str:
    lines = [
        "# The paper's experiments, made again",
        "",
        "This page is written by `python studies/paper_results.py studies/paper`, from the records of the runs alone.",
        "Section and figure numbers are those of *Differentially Private Learning with Adaptive Clipping*. z* is the",
        "largest noise tried up to which the best of the median and the five fixed clips stays within 5% of what it",
        "reaches without noise, and C* the best fixed clip at z*: [all rules](../reproduce.md#the-rules). z is given",
        "for 100 users a round: with m users a round, runs have z m / 100, so that the mean update has the same noise.",
        "A server rate is the task's own times one of the factors listed, the one that was best.",
        "",
        "An interval is a bootstrapped 95% interval over seeds. Two sides are called as good as each other where the",
        "interval of their difference holds 0, which few seeds make easy: the difference stands with each Figure 7.",
        "Such intervals are too narrow for few seeds, so that better and worse are less sure than they look.",
        "",
        *_conclusions(entries),
        *_beside_the_paper(entries),
    ]
    for task in dict.fromkeys(entry.findings.protocol.task for entry in entries):
        lines += _of_task(task, [entry for entry in entries if entry.findings.protocol.task == task], pictures)
    begun = {entry.findings.protocol.task for entry in entries}
    waiting = [task for task in PAPER_COMPARISON if task not in begun]
    if unfinished or waiting:
        lines += ["## Not finished", "", *(f"- {said}" for said in unfinished)]
        lines += [*(f"- {task}: no experiment has ended yet" for task in waiting), ""]
    return "\n".join(lines)


def _conclusions(entries: Sequence[Entry]) -> list[str]:
    """Does the claim hold: the untuned median is as good as the best fixed clip chosen in hindsight, on most tasks?"""
    compared = {
        e.findings.protocol.task: e.findings.numbers["comparison"] for e in entries if e.findings.what == "fig7"
    }
    lines = ["## What agrees with the paper, and what does not", ""]
    if compared:
        counted = [task for task in compared if task in PAPER_COMPARISON] or list(compared)
        well = [task for task in counted if compared[task] in ("better", "as good")]
        holds = "holds" if len(well) * 2 > len(counted) else "does not hold"
        missing = [task for task in PAPER_COMPARISON if task not in compared]
        verdict = f"**It {holds} here**" if not missing else f"**Compared so far: {len(counted)} of 6 tasks**"
        lines += [
            "The claim: the untuned median clip is as good as the best fixed clip chosen in hindsight, on most tasks.",
            f"{verdict}: as good or better on {len(well)} of {len(counted)}"
            + (f" ({', '.join(well)})" if well else "")
            + (f". Not compared yet: {', '.join(missing)}." if missing else "."),
            "",
            "| task | ours: the median is | the paper's | agree |",
            "| --- | --- | --- | --- |",
        ]  # fmt: skip
        for task, found in compared.items():
            paper = PAPER_COMPARISON.get(task)
            lines.append(f"| {task} | {found} | {paper or 'not among its tasks'} | {_agreement(found, paper)} |")
        lines += ["", *_run_away(entries)]
    clipping = [entry.findings for entry in entries if entry.findings.what == "fig3"]
    if clipping:
        lines += [
            "| task | ours: clipping to the median without noise | the paper's (Figure 3) |",
            "| --- | --- | --- |",
        ]
        for findings in clipping:
            said = findings.summary[-1].removeprefix("clipping to the median without noise ")
            lines.append(f"| {findings.protocol.task} | {said} | {PAPER_CLIPPING.get(findings.protocol.task, '-')} |")
        lines += [
            "",
            "The unclipped run has the paper's rates, which it chose for its own number of rounds; a clipped run has",
            "the best of several server rates. With few rounds this favours clipping. Figures 3 to 6 have one seed a",
            "point, so that small differences in them may be chance. Where it says -, the paper says nothing.",
            "",
        ]
    return lines


def _run_away(entries: Sequence[Entry]) -> list[str]:
    """Where noise drove the median's clip up, in words."""
    lines = list[str]()
    for entry in entries:
        numbers, task = entry.findings.numbers, entry.findings.protocol.task
        if not numbers.get("median_clip_ran_away"):
            continue
        highest, z_star, alone = numbers["median_clip_highest"], numbers["z_star"], numbers["median_z_star"]
        said = (
            f"On {task} the median's clip ran away: at z* = {z_star:g} it rose to {highest:.3g}, where clips without "
            f"noise stay within {numbers['clip_max']:.3g}. Noise is in proportion to the clip, so that a "
            "[rise feeds itself](../reproduce.md#a-clip-that-runs-away); a fixed clip cannot rise."
        )
        if alone < z_star:
            said += (
                f" By itself the median stays within 5% up to z = {alone:g}: z* goes by the best of all clips that are "
                "compared, which here was a fixed one."
            )
        lines += [*textwrap.wrap(said, 110, break_on_hyphens=False, break_long_words=False), ""]
    return lines


def _agreement(ours: str, paper: str | None) -> str:
    if paper is None:
        return "-"
    if ours == paper:
        return "yes"
    good = ("better", "as good")
    return "in part: as good or better in both" if ours in good and paper in good else "**no**"


def _beside_the_paper(entries: Sequence[Entry]) -> list[str]:
    """One table: z*, C* and the clip range, ours and the paper's."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if "clip_min" in entry.findings.numbers:
            found.setdefault(entry.findings.protocol.task, {}).update(entry.findings.numbers)
    if not found:
        return []
    lines = [
        "## z*, C* and the range of clips",
        "",
        "| task | z* | paper's z* | C* | paper's C* | C_min to C_max | paper's | median, test | best fixed, test |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task, numbers in found.items():
        facts = FACTS[task]
        own = facts.clip_min is None
        cells = [
            task,
            f"{numbers['z_star']:g}" if "z_star" in numbers else "-",
            "-" if own else f"{facts.noise_at_100:g}",
            f"{numbers['c_star']:g}" if "c_star" in numbers else "-",
            "-" if own else f"{facts.best_clip:g}",
            f"{numbers['clip_min']:.3g} to {numbers['clip_max']:.3g}",
            "-" if own else f"{facts.clip_min:g} to {facts.clip_max:g}",
            *(str(numbers[side]) if side in numbers else "-" for side in ("median", "fixed")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if any(numbers.get("z_star") == numbers.get("largest_noise", math.nan) for numbers in found.values()):
        lines += [
            "",
            "A z* that is the largest noise tried may be larger still; so may the paper's 0.1.",
        ]
    fig7 = [entry.findings for entry in entries if "z_star" in entry.findings.numbers]
    tried = {findings.protocol.task: findings.protocol.noises for findings in fig7}
    for task, numbers in found.items():
        if "z_star" in numbers and (too_much := _coarse_step(numbers["z_star"], tried[task])):
            between = f"On {task} no noise between z = {numbers['z_star']:g} and {too_much:g} was tried"
            lines += ["", f"{between}: z* may be larger."]
    return [*lines, ""]


def _coarse_step(z_star: float, tried: Sequence[float]) -> float | None:
    """The next noise that was tried above z*, if the paper tried another between the two."""
    too_much = min((noise for noise in tried if noise > z_star), default=z_star)
    return too_much if any(z_star < noise < too_much for noise in NOISES) else None


def _of_task(task: str, entries: Sequence[Entry], pictures: str) -> list[str]:
    facts = FACTS[task]
    direction = ", lower is better" if facts.lower_is_better else ""
    lines = [f"## {task} ({facts.metric_name.replace('_', ' ')}{direction})", ""]
    shown: list[str] = []
    for entry in entries:
        protocol = entry.findings.protocol
        table = _difference_table(entry)
        if table != shown:  # once for all figures that share it
            lines += [*table, ""]
            shown = table
        lines += [f"### {_FIGURES[entry.findings.what]}", "", f"![{_FIGURES[entry.findings.what]}, {task}]"
                  f"({pictures}/{entry.findings.name}.png)", ""]  # fmt: skip
        lines += [f"- {line.strip()}" for line in entry.findings.summary]
        scaled = "" if protocol.cohort_size == PAPER_COHORT else f" of {protocol.cohort_size} users a round"
        lines += ["", f"{entry.runs} runs{scaled}, on {' and '.join(entry.devices)}.", ""]
    return lines


def _difference_table(entry: Entry) -> list[str]:
    protocol = entry.findings.protocol
    rows = [f"| {one.what} | {one.ours} | {one.paper} |" for one in differences(protocol, entry.data)]
    return [
        f"Scale `{protocol.scale}`. Otherwise than in the paper:",
        "",
        "| | here | paper |",
        "| --- | --- | --- |",
        *rows,
    ]
