"""The look of the page: that of the report, with what a tuning adds to it."""

from __future__ import annotations

from importlib import resources

_ADDED = """
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .7rem 1rem; overflow: auto; }
.noises { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 35rem), 1fr)); }
.noises td, .noises th { white-space: nowrap; min-width: 0; }
.rates th, .rates td { padding: .5rem .8rem; border: 1px solid var(--line); }
.rates .cell { background: color-mix(in srgb, var(--accent) calc(var(--share) * .45), transparent); }
.rates .chosen { outline: 3px solid var(--ink); outline-offset: -3px; font-weight: 700; }
svg.noise { width: 100%; max-width: 40rem; height: auto; font-size: 13px; }
svg.noise text { fill: var(--ink); }
svg.noise .axis { stroke: var(--quiet); }
svg.noise .limit { stroke: var(--red); stroke-dasharray: 6 4; }
svg.noise .limit-text { fill: var(--red); }
svg.noise .curve { fill: none; stroke: var(--accent); stroke-width: 2; }
svg.noise .point { fill: var(--accent); }
svg.noise .ring { fill: none; stroke: var(--ink); stroke-width: 2; }
@media print { .rates .cell { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def style() -> str:
    """The style sheet of the page."""
    report = resources.files("clipline.study.report").joinpath("assets", "page.css")
    return report.read_text(encoding="utf-8") + _ADDED
