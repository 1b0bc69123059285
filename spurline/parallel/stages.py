"""Pipeline schedules, the stages of each rank, and the split of a model into stages. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any

SLACK = 1.05
"""The slowest stage may be slower than the optimum by this factor, if that makes the largest stage smaller."""


@dataclass(frozen=True)
class Schedule:
    """The properties of a pipeline schedule."""

    torch_name: str
    """Its name in torch.distributed.pipelining."""
    stages_per_rank: int = 1
    is_v_shaped: bool = False
    """The second stages are assigned in reverse rank order: the first rank has the first and the last stage."""
    splits_backward: bool = False
    """Gradients of inputs and of weights are computed in two passes."""


SCHEDULES = {
    "GPipe": Schedule("GPipe"),
    "1F1B": Schedule("1F1B"),
    "Interleaved1F1B": Schedule("Interleaved1F1B", 2),
    "InterleavedZeroBubble": Schedule("InterleavedZeroBubble", 2, splits_backward=True),
    "ZBV": Schedule("ZBVZeroBubble", 2, is_v_shaped=True, splits_backward=True),
    "DualPipeV": Schedule("DualPipeV", 2, is_v_shaped=True, splits_backward=True),
}


def num_stages(schedule: str, pp: int) -> int:
    return pp * SCHEDULES[schedule].stages_per_rank


def rank_of_stage(schedule: str, pp: int, stage: int) -> int:
    """The rank, of the pp ranks of a pipeline, that has a stage."""
    turn, place = divmod(stage, pp)
    return pp - 1 - place if SCHEDULES[schedule].is_v_shaped and turn % 2 else place


def stages_of_rank(schedule: str, pp: int, rank: int) -> list[int]:
    return [stage for stage in range(num_stages(schedule, pp)) if rank_of_stage(schedule, pp, stage) == rank]


def micro_batch_problem(schedule: str, pp: int, number: int) -> str:
    """What a schedule needs, if it can't run this number of micro-batches per step; "" if it can."""
    if schedule == "GPipe":
        return ""
    least, of_what = (2 * pp, "stages") if schedule == "DualPipeV" else (pp, "ranks")
    if number < least:
        return f"at least {least} micro-batches, as many as {of_what} of the pipeline"
    rounds = number // pp
    if schedule.startswith("Interleaved") and number % rounds:
        return f"a multiple of {rounds} micro-batches, the rounds of {pp} that it makes of them"
    return ""


def cut_layers(costs: Any, num_stages: int, first_at_least: int = 1) -> list[tuple[int, int]]:
    """First and end (exclusive) layer of each stage, split so that stages are balanced in FLOPs, then in parameters.

    `costs` are those of the model's parts (ModelCosts). The embedding is on the first stage, which has at least
    `first_at_least` layers, and the head on the last. Of the splits whose slowest stage is within SLACK of the best in
    FLOPs, the one with the fewest parameters on its largest stage is taken.
    """
    flops = [layer.flops_per_token for layer in costs.layers]
    params = [layer.params for layer in costs.layers]
    flops[0] += costs.embed.flops_per_token
    flops[-1] += costs.head.flops_per_token
    params[0] += costs.embed.params
    params[-1] += costs.head.params
    fastest = _least_largest(flops, num_stages, first_at_least)
    limit = SLACK * _largest(flops, fastest)
    return _least_largest(params, num_stages, first_at_least, flops, limit)


def _largest(weights: Sequence[int], cut: list[tuple[int, int]]) -> int:
    return max(sum(weights[first:end]) for first, end in cut)


def _least_largest(
    weights: Sequence[int],
    num_parts: int,
    first_at_least: int,
    limited: Sequence[int] | None = None,
    limit: float = inf,
) -> list[tuple[int, int]]:
    """Split a list into contiguous, nonempty parts with the least largest sum; no `limited` sum is above limit."""
    number, first_at_least = len(weights), max(first_at_least, 1)
    assert first_at_least + num_parts - 1 <= number, f"{number} layers can't be {num_parts} stages"
    up_to = [0, *accumulate(weights)]
    limited_up_to = [0, *accumulate(limited or weights)]

    def cost(begin: int, end: int) -> float:
        return up_to[end] - up_to[begin] if limited_up_to[end] - limited_up_to[begin] <= limit else inf

    # The least largest sum of the parts so far if the last one ends at `end`, and where that part begins.
    best = [(cost(0, end) if end >= first_at_least else inf, 0) for end in range(number + 1)]
    begins = [best]
    for _ in range(num_parts - 1):
        best = [
            min(((max(best[begin][0], cost(begin, end)), begin) for begin in range(1, end)), default=(inf, 0))
            for end in range(number + 1)
        ]
        begins.append(best)
    cut: list[tuple[int, int]] = []
    end = number
    for places in reversed(begins):
        cut.append((places[end][1], end))
        end = places[end][1]
    return cut[::-1]
