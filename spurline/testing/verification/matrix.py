"""The cells of `spurline verify`: a few that cover every setting, or all pairs of settings. Torch-free."""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from itertools import combinations
from random import Random
from typing import Any

from spurline.testing.verification.cells import MOE_OPTIONS, TINY_MODEL, Cell, cell_problems

# Every setting at least once, on as few ranks as exercise it; compiled cells, which are slow, on at most two.
QUICK = [
    Cell(),
    Cell(
        experts="grouped_mm",
        rows="aligned rows",
        score="score before",
        router="sigmoid",
        remat="selective",
        micro_batches=2,
    ),
    Cell(compile="aot_eager", balance="batch and z loss", seq_len=13),
    Cell(2, experts="loop", balance="no balance loss", remat="full", micro_batches=2, clip=True),
    Cell(
        2,
        replicate=2,
        dispatcher="capacity",
        num_experts="6 experts",
        experts="grouped_mm",
        balance="batch and z loss",
    ),
    Cell(2, tp=2, seq_len=13, balance="batch and z loss", clip=True),
    Cell(2, ep=2, exchange="adaptive equal split", router="groups and bias", separate_expert_units=True, remat="full"),
    Cell(2, ep=2, experts="loop", compile="aot_eager", exchange="equal split", score="score before", clip=True),
    Cell(2, tp=2, ep=2, rows="aligned rows", compile="aot_eager", remat="selective", router="sigmoid", seq_len=13),
    Cell(2, cp=2, seq_len=13, balance="batch and z loss", clip=True),
    Cell(4, cp=2, ep=2, context="ulysses", seq_len=13, remat="selective", micro_batches=2),
    Cell(2, pp=2, micro_batches=4, tied=True, clip=True),
    Cell(4, pp=2, ep=2, micro_batches=2, seq_len=13, router="groups and bias", balance="batch and z loss"),
    Cell(2, dtype="bfloat16", micro_batches=4, remat="selective", seq_len=13),
    Cell(2, ep=2, dtype="bfloat16", experts="grouped_mm", micro_batches=2, clip=True),
    Cell(compile="aot_eager", precision="mxfp8", experts="loop", micro_batches=2),
    Cell(2, ep=2, precision="float8", experts="loop", clip=True),
    Cell(2, tp=2, dtype="bfloat16", precision="mxfp8", experts="grouped_mm", remat="selective"),
    Cell(4, ep=4, precision="mxfp8", experts="loop", rows="aligned rows"),
    Cell(2, ep=2, sent="rows sent as float8", clip=True),
    Cell(experts="triton", score="score before"),
    Cell(2, ep=2, experts="triton", remat="selective"),
    Cell(4, ep=4, experts="triton", dtype="bfloat16"),
    Cell(4, tp=4, score="score before", router="groups and bias"),
    Cell(4, ep=4, exchange="forced balance", experts="bmm", score="score before", clip=True),
    Cell(
        4,
        ep=2,
        etp=2,
        exchange="equal split",
        rows="aligned rows",
        router="sigmoid",
        separate_expert_units=True,
        micro_batches=2,
    ),
    Cell(4, replicate=2, ep=2, num_experts="6 experts", router="groups and bias", micro_batches=2, seq_len=13),
    Cell(4, replicate=2, tp=2, ep=2, dispatcher="capacity", balance="no balance loss", remat="selective", clip=True),
    Cell(2, ep=2, dispatcher="capacity", experts="loop", rows="aligned rows"),
    Cell(2, ep=2, dispatcher="deep_ep stand-in", rows="aligned rows", score="score before", remat="selective"),
    Cell(4, tp=2, ep=2, etp=2, dispatcher="deep_ep stand-in", router="sigmoid", seq_len=13, micro_batches=2),
    Cell(4, ep=4, dispatcher="hybrid_ep stand-in", rows="aligned rows", remat="full", clip=True),
    Cell(4, tp=2, ep=4, experts="grouped_mm", exchange="adaptive equal split", balance="batch and z loss", seq_len=13),
    Cell(
        4,
        tp=2,
        ep=2,
        etp=2,
        remat="selective",
        router="groups and bias",
        separate_expert_units=True,
        seq_len=13,
        clip=True,
    ),
]

# What --full adds to QUICK and all pairs: more ranks, and inductor.
MORE = [
    Cell(8, tp=2, ep=4, seq_len=13, clip=True),
    Cell(8, tp=2, ep=2, etp=2, exchange="equal split", remat="selective"),
    Cell(8, replicate=2, tp=2, ep=4, router="groups and bias", balance="batch and z loss"),
    Cell(8, tp=2, ep=4, compile="aot_eager"),
    Cell(2, cp=2, compile="aot_eager", router="groups and bias", seq_len=13),
    Cell(2, cp=2, context="ulysses", compile="aot_eager", remat="full"),
    Cell(4, cp=4, seq_len=13, balance="batch and z loss", clip=True),
    Cell(4, cp=4, context="ulysses", seq_len=13),
    Cell(4, cp=2, tp=2, seq_len=13, balance="batch and z loss", clip=True),
    Cell(4, cp=2, tp=2, context="ulysses", seq_len=13, balance="batch and z loss", remat="selective"),
    Cell(4, cp=2, tp=2, ep=4, exchange="forced balance", separate_expert_units=True),
    Cell(8, cp=2, tp=2, ep=4, context="ulysses", seq_len=13),
    Cell(8, replicate=2, cp=4, ep=2, etp=2, seq_len=13, clip=True),
    Cell(2, pp=2, schedule="GPipe", balance="batch and z loss"),
    *(
        Cell(pp, pp=pp, schedule=schedule, micro_batches=2 * pp, num_layers=2 * pp, tied=True, clip=True)
        for pp in (2, 4)
        for schedule in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV")
    ),
    Cell(4, pp=4, schedule="GPipe", micro_batches=2, num_layers=4, seq_len=13),
    Cell(2, pp=2, compile="aot_eager", micro_batches=2, seq_len=13),
    Cell(4, pp=2, tp=2, ep=2, micro_batches=2, seq_len=13, remat="selective"),
    Cell(4, pp=2, cp=2, ep=2, context="ulysses", micro_batches=2, dtype="bfloat16", separate_expert_units=True),
    Cell(8, pp=2, tp=2, ep=2, etp=2, micro_batches=2, remat="full", exchange="equal split"),
    Cell(8, pp=2, replicate=2, ep=2, micro_batches=2, seq_len=13, balance="batch and z loss", clip=True),
    Cell(
        8,
        pp=2,
        cp=2,
        ep=2,
        schedule="Interleaved1F1B",
        micro_batches=2,
        num_layers=4,
        seq_len=13,
        balance="batch and z loss",
        clip=True,
    ),
    Cell(compile="inductor", router="sigmoid"),
    Cell(2, tp=2, compile="inductor", remat="full", seq_len=13),
    Cell(2, ep=2, compile="inductor", balance="batch and z loss"),
    Cell(4, tp=2, ep=2, etp=2, compile="inductor", remat="selective", clip=True),
]

# MoE options that pairs are made of. Only QUICK has the others: Triton, whose interpreter is slow, and float8 rows.
_PAIRED = {
    field: [value for value in values if value != "triton"] for field, values in MOE_OPTIONS.items() if field != "sent"
}
_SPREADS: list[dict[str, int]] = [
    {"ranks": 1},
    {"ranks": 2},
    {"ranks": 2, "replicate": 2},
    {"ranks": 2, "tp": 2},
    {"ranks": 2, "ep": 2},
    {"ranks": 2, "tp": 2, "ep": 2},
    {"ranks": 4},
    {"ranks": 4, "tp": 4},
    {"ranks": 4, "ep": 2},
    {"ranks": 4, "ep": 4},
    {"ranks": 4, "ep": 2, "etp": 2},
    {"ranks": 4, "replicate": 2, "ep": 2},
    {"ranks": 4, "replicate": 2, "tp": 2, "ep": 2},
    {"ranks": 4, "tp": 2},
    {"ranks": 4, "tp": 2, "ep": 2},
    {"ranks": 4, "tp": 2, "ep": 4},
    {"ranks": 4, "tp": 2, "ep": 2, "etp": 2},
    {"ranks": 2, "cp": 2},
    {"ranks": 2, "cp": 2, "ep": 2},
    {"ranks": 4, "cp": 2, "ep": 2},
    {"ranks": 4, "cp": 2, "tp": 2, "ep": 2},
]
# Each value is a dict of the Cell fields that it sets.
AXES: dict[str, list[dict[str, Any]]] = {
    "spread": _SPREADS,
    **{field: [{field: value} for value in values] for field, values in _PAIRED.items()},
    "context": [{"context": kind} for kind in ("all_gather", "ulysses")],
    "remat": [{"remat": mode} for mode in ("none", "full", "selective")],
    "compile": [{"compile": backend} for backend in ("off", "aot_eager")],
    "separate_expert_units": [{"separate_expert_units": False}, {"separate_expert_units": True}],
    "micro_batches": [{"micro_batches": 1}, {"micro_batches": 2}],
    "dtype": [{"dtype": "float32"}, {"dtype": "bfloat16"}],
    "precision": [{"precision": recipe} for recipe in ("none", "float8", "mxfp8")],
    "seq_len": [{"seq_len": 12}, {"seq_len": 13}],
    "clip": [{"clip": False}, {"clip": True}],
}


def full_cells() -> list[Cell]:
    """QUICK, cells that cover every compatible pair of values of different axes, and MORE."""
    return list(dict.fromkeys([*QUICK, *all_pairs(), *MORE]))


@cache
def all_pairs() -> tuple[Cell, ...]:
    """A small set of cells that covers every compatible pair of values; greedy and deterministic."""
    random = Random(0)
    values = [(axis, index) for axis in AXES for index in range(len(AXES[axis]))]
    missing = {pair: None for pair in combinations(values, 2) if pair[0][0] != pair[1][0]}
    cells = []
    while missing:
        pair = next(iter(missing))
        drawn = [{axis: random.randrange(len(AXES[axis])) for axis in AXES} | dict(pair) for _ in range(300)]
        drawn.sort(key=lambda choice: _worth(choice, missing), reverse=True)
        best = next((choice for choice in drawn if is_sensible(_cell(choice))), None)
        if best is None:  # the pair is incompatible
            del missing[pair]
            continue
        cells.append(_cell(best))
        for pair in combinations(best.items(), 2):
            missing.pop(pair, None)
    return tuple(cells)


def _worth(choice: dict[str, int], missing: Container[Any]) -> float:
    """Number of new pairs a cell covers, relative to its cost: a compiled cell takes as long as ten others."""
    return sum(pair in missing for pair in combinations(choice.items(), 2)) / (10 if choice["compile"] else 1)


def is_sensible(cell: Cell) -> bool:
    """Whether the cell is valid, and each of its settings has an effect."""
    idle = (
        ("equal split" in cell.exchange and cell.ep == 1)
        or ("stand-in" in cell.dispatcher and cell.ep == 1)
        or (cell.separate_expert_units and cell.ranks == 1)
        or (cell.context != Cell.context and cell.cp == 1)
        or (cell.exchange == "forced balance" and cell.seq_len != Cell().seq_len)  # forced balance sets the length
    )
    return not idle and not cell_problems(cell, TINY_MODEL)


def _cell(choice: dict[str, int]) -> Cell:
    fields: dict[str, Any] = {}
    for axis, index in choice.items():
        fields |= AXES[axis][index]
    return Cell(**fields)
