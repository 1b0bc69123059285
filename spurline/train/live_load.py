"""Expert load as sparklines for a wide terminal: one per layer, one character per expert. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MIN_WIDTH = 100
"""Minimum number of columns of a wide terminal."""
MAX_LINES = 8
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
_IDLE = " "


def load_lines(loads: Mapping[str, Sequence[float]], width: int, ascii_only: bool = False) -> list[str]:
    """Lines of at most `width` columns that show the rows of each expert, by layer; none if the terminal is narrow.

    A half-height bar is the mean of the layer, a full one twice the mean or more; an expert without rows has no bar.
    The number at the end is the busiest expert over the mean. If there are too many experts, neighbors share a
    character, which shows the busiest of them. If there are too many layers, those with the busiest experts are shown.
    """
    layers = {name: list(rows) for name, rows in loads.items() if sum(rows) > 0}
    if width < MIN_WIDTH or not layers:
        return []
    names = {name: _short(name) for name in layers}
    name_width = max(map(len, names.values()))
    extra = name_width + len("  99.99")
    most_experts = max(map(len, layers.values()))
    columns = max(1, min(len(layers), (width + 3) // (min(most_experts, 64) + extra + 3)))
    room = min(most_experts, (width + 3) // columns - 3 - extra)
    shown = layers
    if len(layers) > columns * MAX_LINES:
        busiest = sorted(layers, key=lambda name: -_busiest(layers[name]))[: columns * MAX_LINES]
        shown = {name: rows for name, rows in layers.items() if name in busiest}
    bars = _ASCII_BARS if ascii_only else _BARS
    cells = [
        f"{names[name]:>{name_width}} {sparkline(rows, room, bars):{room}} {_busiest(rows):5.2f}"
        for name, rows in shown.items()
    ]
    num_lines = -(-len(cells) // columns)  # layers go down a column, then on to the next
    return ["   ".join(cells[line::num_lines]) for line in range(num_lines)]


def sparkline(rows: Sequence[float], width: int, bars: str = _BARS) -> str:
    """One character per expert, or per few neighbors, relative to the mean of all."""
    mean = sum(rows) / len(rows)
    per_letter = -(-len(rows) // width)
    busiest = [max(rows[start : start + per_letter]) for start in range(0, len(rows), per_letter)]
    return "".join(_letter(count / mean, bars) if count else _IDLE for count in busiest)


def _letter(ratio: float, bars: str) -> str:
    """Eight heights from above 0 to twice the mean."""
    return bars[min(len(bars) - 1, int(ratio / 2 * len(bars)))]


def _busiest(rows: Sequence[float]) -> float:
    return max(rows) * len(rows) / sum(rows)


def _short(name: str) -> str:
    """layers.3.moe becomes layer 3."""
    parts = name.split(".")
    return f"layer {parts[1]}" if len(parts) == 3 and parts[0] == "layers" else name
