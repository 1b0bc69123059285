"""Charts of the report: curves, step time by phase, and expert load over time. Torch-free."""

from __future__ import annotations

import base64
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spurline.report.read import Record, Run
from spurline.report.thin import mean_by_stretch, stretches, thin

POINTS = 800
"""Maximum number of points per curve."""
STACK_POINTS = 200
HEAT_CELLS = 300_000
"""Maximum number of cells of all heat maps together, one byte each."""
HEAT_COLUMNS = 160


class Curve(NamedTuple):
    label: str
    value: Callable[[Record], Any]
    dots: bool = False
    """Measured only at some steps: each measurement is drawn as a dot."""
    dashed: bool = False


class Chart(NamedTuple):
    key: str
    title: str
    unit: str
    curves: list[Curve]
    noisy: bool = False
    """Whether to offer smoothing."""
    from_zero: bool = True


def _field(name: str, scale: float = 1.0) -> Callable[[Record], float | None]:
    def value(record: Record) -> float | None:
        number = record.get(name)
        return number * scale if isinstance(number, int | float) and math.isfinite(number) else None

    return value


def _busiest(record: Record) -> float | None:
    loads = [float(rows.max() * len(rows) / rows.sum()) for rows in _expert_load(record).values() if rows.any()]
    return max(loads, default=None)


def _dead(record: Record) -> int | None:
    layers = _expert_load(record).values()
    return sum(len(rows) - int(np.count_nonzero(rows)) for rows in layers) if layers else None


def _lowest_entropy(record: Record) -> float | None:
    layers = [layer for layer in (record.get("routing") or {}).values() if isinstance(layer, dict)]
    known = [layer["entropy"] for layer in layers if isinstance(layer.get("entropy"), int | float)]
    return min(known, default=None)


def _expert_load(record: Record) -> Mapping[str, npt.NDArray[Any]]:
    loads: Mapping[str, npt.NDArray[Any]] = record.get("expert_load") or {}
    return loads


def _curve(name: str, scale: float = 1.0) -> list[Curve]:
    return [Curve("", _field(name, scale))]


CHARTS = [
    Chart(
        "loss",
        "Loss",
        "nats per token",
        [Curve("training", _field("loss")), Curve("validation", _field("validation_loss"), dots=True)],
        noisy=True,
        from_zero=False,
    ),
    Chart(
        "bits_per_byte",
        "Bits per byte",
        "of held-out text, comparable across tokenizers",
        [Curve("", _field("bits_per_byte"), dots=True)],
        from_zero=False,
    ),
    Chart("lr", "Learning rate", "", _curve("lr")),
    Chart("grad_norm", "Gradient norm", "before clipping", _curve("grad_norm"), noisy=True),
    Chart("throughput", "Throughput", "tokens per second", _curve("tokens_per_second"), noisy=True),
    Chart("mfu", "Use of the device", "% of its peak", _curve("mfu", 100), noisy=True),
    Chart("memory", "Peak memory", "GB", _curve("peak_memory_bytes", 1e-9)),
    Chart("load", "Busiest expert", "times the mean, in the layer where it is most", [Curve("", _busiest)], noisy=True),
    Chart("dead", "Experts without a token", "in a step, all layers", [Curve("", _dead)]),
    Chart("entropy", "Routing entropy", "lowest layer, 1 is even", [Curve("", _lowest_entropy)], noisy=True),
    Chart("balance_loss", "Balance loss", "weighted, all layers", _curve("balance_loss"), noisy=True),
    Chart("padded_rows", "Rows of padding", "on the first rank, in a step", _curve("padded_rows"), noisy=True),
]


def draw_curves(runs: list[Run]) -> list[dict[str, Any]]:
    """The charts that have a value in any run, each with a series for each run and curve."""
    charts = []
    for chart in [*CHARTS, *_charts_of_other_metrics(runs)]:
        series = [
            {
                "run": index,
                "label": curve.label,
                "dots": curve.dots,
                "dashed": curve.dashed or curve.dots,
                "x": steps,
                "y": values,
            }
            for index, run in enumerate(runs)
            for curve in chart.curves
            for steps, values in [_points(run, curve)]
            if any(value is not None for value in values)
        ]
        if series:
            charts.append({**chart._asdict(), "curves": None, "series": series})
    return charts


# Metrics that the charts above and the tables of the page show, or omit on purpose.
_SHOWN = {
    *("step", "loss", "validation_loss", "bits_per_byte", "balance_loss", "grad_norm", "lr", "expert_load", "warnings"),
    *("tokens_per_second", "tokens_seen", "peak_memory_bytes", "flops_per_second", "mfu", "padded_rows"),
    *("step_time", "data_wait", "step_time_parts"),
}
_SHOWN_OF_LAYERS = {"routing": {"load", "entropy", "dead_experts", "bias_min", "bias_max"}}


def _charts_of_other_metrics(runs: list[Run]) -> list[Chart]:
    """A chart for each metric not listed here: its value or, if several layers have it, their mean and range."""
    layers_of: dict[str, set[str]] = {}
    for record in (record for run in runs for record in run.records):
        for name, by_layer in _metrics_by_layer(record).items():
            layers_of.setdefault(name, set()).update(by_layer)
    charts = []
    for name, layers in sorted(layers_of.items()):
        several = len(layers) > 1
        unit = "mean of all layers, lowest and highest" if several else next(iter(layers))
        curves = _range_of_layers(name) if several else [Curve("", _over_layers(name, max))]
        charts.append(Chart(name, name, unit, curves, noisy=True, from_zero=False))
    return charts


def _range_of_layers(name: str) -> list[Curve]:
    return [
        Curve("mean", _over_layers(name, statistics.fmean)),
        Curve("lowest layer", _over_layers(name, min), dashed=True),
        Curve("highest layer", _over_layers(name, max), dashed=True),
    ]


def _over_layers(name: str, combine: Callable[[list[float]], float]) -> Callable[[Record], float | None]:
    def value(record: Record) -> float | None:
        numbers = list(_metrics_by_layer(record).get(name, {}).values())
        return combine(numbers) if numbers else None

    return value


def _metrics_by_layer(record: Record) -> dict[str, dict[str, float]]:
    """The metrics not shown otherwise: metric -> layer -> number; the layer name is empty for the full model."""
    found: dict[str, dict[str, float]] = {}

    def add(name: str, layer: str, value: Any) -> None:
        if isinstance(value, int | float) and math.isfinite(value):
            found.setdefault(name, {})[layer] = value

    for name in record.keys() - _SHOWN:
        add(name, "", record[name])
        for layer, of_layer in record[name].items() if isinstance(record[name], dict) else ():
            add(name, layer, of_layer)
            for key in of_layer.keys() - _SHOWN_OF_LAYERS.get(name, set()) if isinstance(of_layer, dict) else ():
                add(f"{name}/{key}", layer, of_layer[key])
    return found


def _points(run: Run, curve: Curve) -> tuple[list[int], list[float | None]]:
    points = [(record["step"], curve.value(record)) for record in run.records]
    if curve.dots:
        points = [(step, value) for step, value in points if value is not None]
    return thin([step for step, _ in points], [value for _, value in points], POINTS)


PART_NAMES = {
    "data": "data",
    "forward": "forward",
    "forward.exchange": "forward: exchange",
    "forward.experts": "forward: experts",
    "backward": "backward",
    "backward.exchange": "backward: exchange",
    "backward.experts": "backward: experts",
    "optimizer": "optimizer",
    "other": "other",
}


def draw_time(run: Run) -> dict[str, Any] | None:
    """Mean milliseconds of each phase of a step, by stretch of steps; None if the run did not record them."""
    timed = [record for record in run.records if record.get("step_time_parts")]
    if not timed:
        return None
    found = {name for record in timed for name in record["step_time_parts"]}
    order = [*PART_NAMES, *sorted(found - PART_NAMES.keys())]
    parts = []
    for name in order:
        if name in found:
            seconds = [_seconds(record["step_time_parts"].get(name)) for record in timed]
            parts.append({"name": name, "label": PART_NAMES.get(name, name)})
            parts[-1]["y"] = mean_by_stretch([1000 * second for second in seconds], STACK_POINTS)
    steps = [timed[stretch[0]]["step"] for stretch in stretches(len(timed), STACK_POINTS)]
    return {"x": steps, "parts": parts}


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def draw_heat(runs: list[Run]) -> list[dict[str, Any]]:
    """For each MoE layer of each run: the load of each expert relative to the mean, in columns of time.

    A cell is one byte, 32 times the square root of the ratio; 0 means no rows.
    """
    layers = [(run, index, layer) for index, run in enumerate(runs) for layer in _layers(run)]
    num_experts = sum(len(rows) for run, _, layer in layers for rows in [_first_load(run, layer)])
    columns = max(8, min(HEAT_COLUMNS, HEAT_CELLS // max(num_experts, 1)))
    return [{"run": index, "layer": layer, **_heat_map(run, layer, columns)} for run, index, layer in layers]


def _layers(run: Run) -> list[str]:
    return list(dict.fromkeys(layer for record in run.records for layer in _expert_load(record)))


def _first_load(run: Run, layer: str) -> npt.NDArray[Any]:
    return next(load[layer] for record in run.records if layer in (load := _expert_load(record)))


def _heat_map(run: Run, layer: str, columns: int) -> dict[str, Any]:
    loads = [(record["step"], load[layer]) for record in run.records if layer in (load := _expert_load(record))]
    num_experts = len(loads[0][1])
    loads = [(step, rows) for step, rows in loads if len(rows) == num_experts]
    cells = bytearray()
    steps = []
    for stretch in stretches(len(loads), columns):
        rows_E = [0.0] * num_experts
        for place in stretch:
            rows_E = (loads[place][1] + np.asarray(rows_E)).tolist()
        steps.append(loads[stretch[0]][0])
        mean = sum(rows_E) / num_experts
        cells += bytes(min(255, max(1, round(32 * math.sqrt(rows / mean)))) if rows else 0 for rows in rows_E)
    return {"experts": num_experts, "x": steps, "last": loads[-1][0], "cells": base64.b64encode(cells).decode()}
