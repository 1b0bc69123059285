"""Pages without scripts: text, tables and SVG charts. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from spurline.version import __version__

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 360, 60, 44
_STYLE = """
body { max-width: 1060px; margin: 2rem auto; padding: 0 1rem; background: var(--paper); color: var(--ink); }
section { margin: 1.8rem 0; } table { border-collapse: collapse; }
td, th { padding: 0.2rem 0.9rem 0.2rem 0; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 13px; }
code { white-space: pre-wrap; } .soft { color: var(--soft); }
"""


def static_page(title: str, *parts: str) -> str:
    """A self-contained HTML file in the style of reports; `parts` are HTML."""
    style = files("spurline.report").joinpath("style.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
            f"<title>{escape(title)} · Spurline</title>\n<style>\n{style}{_STYLE}</style>\n</head>\n<body>",
            f"<header><h1>{escape(title)}</h1></header>",
            *parts,
            f'<p class="soft">Written by Spurline {__version__}.</p>\n</body>\n</html>\n',
        ]
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """An HTML table; cells that look like numbers are right-aligned."""

    def cell(tag: str, value: Any) -> str:
        is_number = str(value).lstrip("-").replace(".", "").replace("e", "").replace("-", "").rstrip("%").isdigit()
        return f"<{tag}{' class=number' if is_number else ''}>{escape(str(value))}</{tag}>"

    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "\n".join(f"<tr>{''.join(cell('td', value) for value in row)}</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def line_chart(
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """An SVG chart of lines, each a color and (x, y) points, with vertical marks; non-finite points are omitted."""
    lines = [(color, [(x, y) for x, y in points if math.isfinite(x + y)]) for color, points in lines]
    every = [point for _, points in lines for point in points]
    if not every:
        return ""
    place = math.log10 if log_x else float
    xs, ys = [place(x) for x, _ in every], [y for _, y in every]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    low, high = low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1)

    def at(x: float, y: float) -> tuple[float, float]:
        share = (place(x) - left) / (right - left or 1)
        return _LEFT + share * (_WIDTH - _LEFT - 20), 10 + (high - y) / (high - low) * (_HEIGHT - _BOTTOM - 10)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(y_label)} by {escape(x_label)}">']
    for number in range(5):
        y = low + (high - low) * number / 4
        _, top = at(every[0][0], y)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{top:.1f}" y2="{top:.1f}" stroke="var(--grid)"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 4:.1f}" text-anchor="end">{y:.3g}</text>')
    for x in _ticks(left, right, log_x):
        across, _ = at(x, low)
        parts.append(f'<text x="{across:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{x:.3g}</text>')
    for x, label in marks:
        across, _ = at(x, low)
        parts.append(
            f'<line x1="{across:.1f}" x2="{across:.1f}" y1="10" y2="{_HEIGHT - _BOTTOM}" stroke="var(--optimizer)"'
            f' stroke-dasharray="4 3"/><text x="{across + 6:.1f}" y="24">{escape(label)}</text>'
        )
    for color, points in lines:
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        if len(points) <= 40:
            for across, top in (at(x, y) for x, y in points):
                parts.append(f'<circle cx="{across:.1f}" cy="{top:.1f}" r="3" fill="{color}"/>')
    middle = (_LEFT + _WIDTH - 20) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(y_label)}</text>')
    return "\n".join([*parts, "</svg>"])


def _ticks(left: float, right: float, log_x: bool) -> list[float]:
    if log_x:
        return [10.0**power for power in range(math.ceil(left - 1e-9), math.floor(right + 1e-9) + 1)]
    return [left + (right - left) * number / 5 for number in range(6)]
