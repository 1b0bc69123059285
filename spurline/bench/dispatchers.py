"""Cost of dispatchers in rows and memory, by routing: padding, dropped rows, bytes saved for backward.

Nothing is timed: the figures are the same in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from spurline.bench.cases import CASES
from spurline.bench.figures import Figure
from spurline.bench.footprint import saved_bytes
from spurline.bench.layers import make_contest
from spurline.moe import MoE, MoEConfig

WAYS: dict[str, dict[str, object]] = {
    "local": {},
    "aligned 32": {"row_multiple": 32},
    "capacity 1.25": {"dispatcher": "capacity", "capacity_factor": 1.25},
    "capacity 2": {"dispatcher": "capacity", "capacity_factor": 2.0},
}


def dispatchers(threads: int, seconds: float, cases: list[str]) -> Iterator[Figure]:
    """Padding, dropped rows and memory of each dispatcher, on one device."""
    for name in cases:
        if CASES[name].routing == "uniform" or name == "decode":
            continue
        found = {way: _measure(name, options) for way, options in WAYS.items()}
        for what, unit in (("padding", "%"), ("dropped rows", "%"), ("saved for backward", "MB")):
            for way, figures in found.items():
                yield Figure("dispatchers", name, what, way, figures[what], unit, threads)


def _measure(name: str, options: dict[str, object]) -> dict[str, float]:
    candidate = make_contest(CASES[name], peers=False).candidates["spurline"]
    usual = candidate.layer
    assert isinstance(usual, MoE)
    config: MoEConfig = replace(usual.config, **options)  # type: ignore[arg-type]
    candidate.layer = layer = MoE(config)
    layer.load_state_dict(usual.state_dict())
    x_TD = candidate.x.detach().flatten(0, 1)
    routing = layer.router(x_TD)
    rows = layer.dispatcher.plan(routing).dispatch(x_TD)
    num_rows = routing.expert_TK.numel()
    num_dropped = layer.dispatcher.dropped_rows.item() if config.dispatcher == "capacity" else 0
    num_places = sum(rows.counts.count_e.tolist())
    return {
        "padding": 100 * (num_places - (num_rows - num_dropped)) / num_rows,
        "dropped rows": 100 * num_dropped / num_rows,
        "saved for backward": saved_bytes(candidate) / 1e6,
    }
