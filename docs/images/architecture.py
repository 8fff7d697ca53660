"""Draws architecture.svg: the rooms of src/clipline, and the way of one round through them.

python docs/images/architecture.py
"""

from pathlib import Path

WIDTH, HEIGHT = 980, 560
INK, GREY, PAPER, ENGINE, PRIVATE, PUBLIC = "#1b1f24", "#57606a", "#eaf2fb", "#f3f0e7", "#b42318", "#1a7f37"
parts: list[str] = []


def text(
    x: float, y: float, words: str, size: int = 13, colour: str = INK, weight: str = "normal", anchor: str = "start"
) -> None:
    """One line of text."""
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    parts.append(
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{words}</text>'
    )


def box(x: float, y: float, w: float, h: float, title: str, lines: tuple[str, ...] = (), fill: str = "#ffffff") -> None:
    """A room or a file: a title in bold, and lines below."""
    parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="{GREY}"/>')
    text(x + 10, y + 19, title, 13, weight="bold")
    for number, line in enumerate(lines):
        text(x + 10, y + 37 + 16 * number, line, 12, GREY)


def arrow(
    x1: float, y1: float, x2: float, y2: float, words: str = "", colour: str = INK, dx: float = 0, dy: float = -6
) -> None:
    """An arrow with words at its middle."""
    parts.append(
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="1.6" '
        f'marker-end="url(#head-{colour[1:]})"/>'
    )
    if words:
        text((x1 + x2) / 2 + dx, (y1 + y2) / 2 + dy, words, 12, colour, anchor="middle")


box(20, 20, 450, 330, "federated/: Algorithm 1, nothing else", fill=PAPER)
box(510, 20, 450, 330, "engine/: how a cohort is trained", fill=ENGINE)
box(40, 60, 190, 62, "1  round.py", ("one round, one screen", "draws.py: cohort, noise"))
box(40, 165, 190, 46, "5  mechanism.py", ("adds noise, rounds to a grid",))
box(40, 236, 190, 62, "6  server_optimisers.py", ("moves the model", "clip_controllers.py: the clip"))
box(260, 165, 190, 62, "4  clipping.py", ("the only clip-and-sum", "PartialSums, ClippedSum"))
box(530, 60, 200, 62, "2  workers/", ("one process, forked workers,", "torchrun: shares out users"))
box(530, 150, 200, 62, "3  core/one_by_one.py", ("local SGD of each user,", "on batches.py"))
box(530, 228, 200, 62, "or stacked/", ("trainer.py: many at once,", "single_step.py: one example"))
box(755, 60, 190, 46, "choose.py", ("which trainer, which workers",))
box(755, 150, 190, 62, "isolation/", ("no user finds what", "another one left"))
box(755, 228, 190, 62, "gpu/", ("kernels, compiled programs,", "streams"))
text(530, 312, "Imports inside: isolation, core, gpu, stacked and workers, choose.py.", 12, GREY)
text(530, 330, "Privacy needs one thing of it: an update is its own user's alone.", 12, GREY)

arrow(230, 82, 528, 82, "CohortRequest", INK)
arrow(630, 122, 630, 148)
arrow(530, 190, 452, 190, "updates", PRIVATE, dx=4)
arrow(260, 188, 232, 188, "", PRIVATE)
text(246, 156, "ClippedSum", 12, PRIVATE, anchor="middle")
arrow(135, 211, 135, 234, "Release", PUBLIC, dx=32, dy=4)
text(260, 262, "red: PRIVATE, opened by", 12, PRIVATE)
text(260, 278, "the mechanism alone", 12, PRIVATE)
text(260, 298, "green: PUBLIC, and charged", 12, PUBLIC)
text(40, 330, "random/: all randomness, by purpose and by user id", 12, GREY)

box(
    20,
    370,
    290,
    76,
    "privacy/: what is promised",
    ("accountant, ledger, calibration, planning;", "renyi, feasibility; pld/"),
    PAPER,
)
box(
    330,
    370,
    310,
    76,
    "training/: many rounds",
    ("training.py, loop.py (the one loop),", "callbacks: evaluate, run directory, progress"),
)
box(660, 370, 300, 76, "data/  tasks/", ("tables become stores; tasks by name,", "also of packages: clipline_paper"))
box(20, 466, 300, 60, "serve/", ("a stored model predicts",))
box(340, 466, 300, 60, "study/", ("many runs, tuning, reports",))
box(660, 466, 300, 60, "cli/", ("the same objects as commands",))
text(
    20,
    548,
    "Imports go down only: base, privacy, federated, engine, training, data, tasks, serve and study, cli, the paper. "
    "A test reads them.",
    12,
    GREY,
)

heads = "".join(
    f'<marker id="head-{c[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    f'<path d="M0,0 L8,4 L0,8 z" fill="{c}"/></marker>'
    for c in (INK, PRIVATE, PUBLIC)
)
Path(__file__).with_suffix(".svg").write_text(
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Helvetica, sans-serif">'
    f'<defs>{heads}</defs><rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>{"".join(parts)}</svg>\n',
    encoding="utf-8",
)
