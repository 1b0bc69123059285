"""The page of a plan: memory over the step by holder, and tables. One HTML file without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Any

from spurline.simulate.plan import Plan
from spurline.version import __version__

WIDTH, HEIGHT, LEFT, BOTTOM = 960, 360, 70, 40
COLORS = ("#4c6a92", "#7a9cc6", "#b0c4de", "#999999", "#d98c5f", "#6aa84f", "#b6d7a8", "#e6c35c")
STYLE = """\
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1060px; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; } td, th { padding: 0.15rem 0.8rem 0.15rem 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; } th { text-align: left; }
svg { width: 100%; height: auto; } .soft { color: #666; } .key { display: inline-block; margin-right: 1.2rem; }
.key i { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.35em; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #ddd; } 
  .soft, svg text { color: #aaa; fill: #aaa; } }
"""


def make_page(plan: Plan, title: str) -> str:
    verdict = "fits" if plan.fits else "does not fit"
    layout = ", ".join(f"{key} {value}" for key, value in plan.layout.items())
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
            f"<title>{escape(title)} · Spurline plan</title>\n<style>\n{STYLE}</style>\n</head>\n<body>",
            f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(layout)}; routing {escape(plan.routing)}</p>',
            f"<p>{gib(plan.peak_bytes)} at the peak, in {escape(plan.peak_phase)} of {escape(plan.peak_module or '-')};"
            f" {gib(plan.capacity_bytes)} may be used: it {verdict}. At best {plan.step_seconds:.3f} s a step,"
            f" MFU at most {plan.mfu:.1%}.</p>",
            "<h2>Memory over the step</h2>",
            memory_chart(plan),
            "<h2>At the peak</h2>",
            table(("bytes", "held as"), [(gib(size), holder) for holder, size in plan.holders.items() if size]),
            table(
                ("bytes", "held as", "tensors", "dtype", "op", "line"),
                [(gib(r["bytes"]), r["holder"], r["tensors"], r["dtype"], r["op"], r["line"]) for r in plan.largest],
            ),
            "<h2>Collectives</h2>",
            table(
                ("bytes", "in the node", "between nodes", "calls", "collective", "axis", "dtype", "phase"),
                [
                    (*map(gib, (t.num_bytes, t.intra_bytes, t.inter_bytes)), t.calls, t.kind, t.axis, t.dtype, t.phase)
                    for t in plan.traffic
                ],
            ),
            "<h2>Waiting</h2>",
            table(("seconds", "for"), [(f"{seconds:.4f}", label) for label, seconds in plan.exposed_seconds.items()]),
            f'<p class="soft">Written by Spurline {__version__}.</p>\n</body>\n</html>\n',
        ]
    )


def memory_chart(plan: Plan) -> str:
    """Stacked areas over the ops of the step, from persistent to transient memory."""
    moments: list[int] = plan.curve["moments"]
    held: dict[str, list[int]] = {name: sizes for name, sizes in plan.curve["bytes"].items() if any(sizes)}
    top = max([plan.peak_bytes, *([plan.capacity_bytes] if plan.fits else [])]) * 1.05
    first, last = moments[0], max(moments[-1], moments[0] + 1)

    def x(moment: float) -> float:
        return LEFT + (moment - first) / (last - first) * (WIDTH - LEFT)

    def y(size: float) -> float:
        return (HEIGHT - BOTTOM) * (1 - size / top)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="memory over the step">']
    below = [0] * len(moments)
    for color, sizes in zip(COLORS, held.values(), strict=False):
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        outline = [(x(m), y(s)) for m, s in zip(moments, above, strict=True)]
        outline += [(x(m), y(s)) for m, s in zip(reversed(moments), reversed(below), strict=True)]
        parts.append(f'<polygon fill="{color}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in outline)}"/>')
        below = above
    for size in (plan.peak_bytes, plan.capacity_bytes):
        if size <= top:
            parts.append(_line(y(size), gib(size)))
    phases = [*plan.curve["phases"], ("", last)]
    for (name, begin), (_, end) in pairwise(phases):
        parts.append(f'<line x1="{x(begin):.1f}" x2="{x(begin):.1f}" y1="0" y2="{HEIGHT - BOTTOM}" stroke="#8886"/>')
        if x(end) - x(begin) > 50:
            parts.append(f'<text x="{x((begin + end) / 2):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{name}</text>')
    keys = (
        f'<span class="key"><i style="background: {color}"></i>{escape(name)}</span>'
        for color, name in zip(COLORS, held, strict=False)
    )
    return "\n".join([*parts, "</svg>", f"<p>{''.join(keys)}</p>"])


def _line(height: float, label: str) -> str:
    return (
        f'<line x1="{LEFT}" x2="{WIDTH}" y1="{height:.1f}" y2="{height:.1f}" stroke="#888" stroke-dasharray="4"/>'
        f'<text x="{LEFT - 4}" y="{height + 5:.1f}" text-anchor="end" font-size="13">{label}</text>'
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def cell(tag: str, value: Any) -> str:
        is_number = str(value)[:1].isdigit()
        return f"<{tag}{' class=number' if is_number else ''}>{escape(str(value))}</{tag}>"

    lines = ["".join(cell("th", name) for name in head), *("".join(cell("td", v) for v in row) for row in rows)]
    return "\n".join(["<table>", *(f"<tr>{line}</tr>" for line in lines), "</table>"])


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
