"""The page of `spurline routing`: per layer, expert load, preferred tokens and contexts, and co-activation."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import numpy as np

from spurline.report.routing_statistics import Context, LayerStatistics, Visits
from spurline.report.static_page import static_page, table

BEFORE, AFTER = 24, 8
"""Tokens shown before and after a token."""
MOST_PAIRS = 128
"""Maximum number of experts for which pairs are drawn."""
_STYLE = """<style>
.load { display: inline-block; height: 0.8em; background: var(--accent); vertical-align: baseline; }
mark { background: var(--warn-shade); color: var(--warn); } .pairs { width: min(100%, 360px); }
.chip { border: 1px solid var(--line); border-radius: 4px; padding: 0 0.3em; margin-right: 0.3em; white-space: pre; }
.experts td { border-top: 1px solid var(--line); } details { margin: 0.6rem 0; }
</style>"""


def routing_page(
    title: str, about: str, visits: Visits, layers: dict[str, LayerStatistics], decode: Callable[[list[int]], str]
) -> str:
    """Render the page; `decode` turns token ids into text."""
    overview = [
        (
            layer,
            len(found.experts),
            visits.ids[layer].shape[1],
            f"{found.busiest:.2f}",
            found.dead,
            f"{_strongest_pair(found):.1f}",
        )
        for layer, found in layers.items()
    ]
    heads = ("layer", "experts", "a token", "busiest (x mean)", "never visited", "strongest pair (x chance)")
    return static_page(
        title,
        _STYLE,
        f'<p class="soft">{escape(about)}</p>',
        "<section><h2>Layers</h2>",
        table(heads, overview),
        "</section>",
        *(_layer_section(visits, layer, found, decode) for layer, found in layers.items()),
    )


def _strongest_pair(found: LayerStatistics) -> float:
    return float(found.together_EE.max(initial=0.0))


def _layer_section(visits: Visits, layer: str, found: LayerStatistics, decode: Callable[[list[int]], str]) -> str:
    most = max(expert.share for expert in found.experts) or 1.0
    rows = []
    order = sorted(range(len(found.experts)), key=lambda number: -found.experts[number].share)
    for number in order:
        expert = found.experts[number]
        chips = " ".join(
            f'<span class="chip" title="{count} visits">{escape(_shown(decode([token]), "␣"))}</span>{share:.0%}'
            for token, count, share in expert.tokens
        )
        contexts = "<br>".join(_context(visits, context, decode) for context in expert.contexts)
        rows.append(
            f'<tr><td class="number">{number}</td><td class="number">{expert.share:.1%}<br>'
            f'<span class="load" style="width: {60 * expert.share / most:.0f}px"></span></td>'
            f'<td class="number">{expert.mean_weight:.2f}</td><td>{chips}</td><td><code>{contexts}</code></td></tr>'
        )
    return "\n".join(
        [
            f"<section><h2>{escape(layer)}</h2>",
            '<table class="experts"><tr><th>expert</th><th>visits</th><th>weight</th>'
            "<th>tokens that prefer it, and how often they come</th>"
            "<th>where it weighs most</th></tr>",
            *rows,
            "</table>",
            _pairs(found),
            "</section>",
        ]
    )


def _context(visits: Visits, context: Context, decode: Callable[[list[int]], str]) -> str:
    tokens = visits.tokens_NL[context.sequence].tolist()
    at = context.position
    parts = tokens[max(0, at - BEFORE) : at], [tokens[at]], tokens[at + 1 : at + 1 + AFTER]
    before, token, after = (escape(_shown(decode(part))) if part else "" for part in parts)
    return f"{before}<mark>{token}</mark>{after}"


def _shown(text: str, space: str = " ") -> str:
    """The text on one line, with invisible characters made visible."""
    text = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", space)
    return "".join(letter if letter.isprintable() else "·" for letter in text) or "·"


def _pairs(found: LayerStatistics) -> str:
    """A heat map of expert pairs: blue below chance, red above."""
    together_EE = found.together_EE
    count = len(together_EE)
    if count > MOST_PAIRS or count < 2:
        return ""
    cells = [
        f'<rect x="{column}" y="{row}" width="1" height="1" fill="var(--{"hot" if value > 1 else "cold"})"'
        f' fill-opacity="{min(1.0, abs(np.log2(max(value, 0.125))) / 3):.2f}"><title>{row} with {column}:'
        f" {value:.2f} x chance</title></rect>"
        for row, values in enumerate(together_EE)
        for column, value in enumerate(values)
        if row != column
    ]
    return (
        "<details open><summary>Experts that fire on the same token, against chance (red: more often, blue: less;"
        f" experts 0 to {count - 1} from the top and from the left)</summary>"
        f'<svg class="pairs" viewBox="0 0 {count} {count}" role="img" aria-label="pairs of experts">'
        + "".join(cells)
        + "</svg></details>"
    )
