"""Downsample long series for a page, keeping spikes. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

Values = list[float | None]


def thin(steps: Sequence[int], values: Sequence[float | None], most: int) -> tuple[list[int], Values]:
    """At most `most` points: the lowest and highest of each stretch of steps, so that no spike is lost.

    A stretch without any value keeps one gap.
    """
    if len(steps) <= most:
        return list(steps), [_short(value) for value in values]
    kept: list[int] = []
    for stretch in stretches(len(steps), most // 2):
        known = [(value, place) for place in stretch if (value := values[place]) is not None]
        kept += sorted({min(known)[1], max(known)[1]}) if known else [stretch[0]]
    return [steps[place] for place in kept], [_short(values[place]) for place in kept]


def mean_by_stretch(values: Sequence[float | None], most: int) -> Values:
    """At most `most` values, each the mean of the known values in a stretch."""
    means: Values = []
    for stretch in stretches(len(values), most):
        known = [value for place in stretch if (value := values[place]) is not None]
        means.append(_short(sum(known) / len(known)) if known else None)
    return means


def stretches(length: int, most: int) -> list[range]:
    """Split 0 .. length-1 into at most `most` ranges of about equal length."""
    count = min(length, most)
    return [range(length * i // count, length * (i + 1) // count) for i in range(count)]


def _short(value: float | None) -> float | None:
    """Round to five digits: more than a chart can show, in a third of the bytes."""
    return None if value is None else float(f"{value:.5g}")
