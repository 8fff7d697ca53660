"""Epsilon over rounds as a few lines of text."""

from __future__ import annotations

from .guarantee import rounded_up


def text_curve(points: tuple[tuple[int, float], ...], height: int = 6) -> list[str]:
    """A small picture in eighths of a character, with the axis labelled at both ends."""
    if not points:
        return ["    none: not private"]
    top = max(epsilon for _, epsilon in points)
    lines = []
    for row in range(height, 0, -1):
        bar = "".join(5 * _eighths(epsilon / top * height - (row - 1) if top > 0 else 0.0) for _, epsilon in points)
        label = rounded_up(top, 3) if row == height else "0" if row == 1 else ""
        lines.append(f"    {label:>8} |{bar}")
    first, last = f"{points[0][0]}", f"{points[-1][0]} rounds"
    return [*lines, f"    {'':>8} +{first}{'-' * max(1, 5 * len(points) - len(first) - len(last))}{last}"]


def _eighths(part: float) -> str:
    return " ▁▂▃▄▅▆▇█"[round(min(max(part, 0.0), 1.0) * 8)]
