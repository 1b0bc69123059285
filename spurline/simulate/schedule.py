"""The order in which pipeline ranks compute micro-batches, and the time it takes, including bubbles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from spurline.parallel.stages import SCHEDULES, num_stages, stages_of_rank

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
_KINDS = {
    "FORWARD": FORWARD,
    "FULL_BACKWARD": BACKWARD,
    "BACKWARD_INPUT": BACKWARD_INPUT,
    "BACKWARD_WEIGHT": BACKWARD_WEIGHT,
}


class Action(NamedTuple):
    kind: str
    stage: int
    micro_batch: int


def schedule_order(schedule: str, pp: int, num_micro_batches: int) -> list[list[Action]]:
    """The actions of each pipeline rank in order, from torch's own schedule."""
    if schedule == "1F1B":  # torch has no list of actions for it
        return [_one_forward_one_backward(rank, pp, num_micro_batches) for rank in range(pp)]

    def stage(index: int) -> Any:
        return SimpleNamespace(
            stage_index=index, num_stages=num_stages(schedule, pp), group_size=pp, group_rank=0, submod=nn.Module()
        )

    own = [stage(index) for index in stages_of_rank(schedule, pp, 0)]
    kind: Any = get_schedule_class(SCHEDULES[schedule].torch_name)
    order = kind(own if SCHEDULES[schedule].stages_per_rank > 1 else own[0], num_micro_batches).pipeline_order
    return [[one for action in order[rank] if action is not None for one in _flat(action)] for rank in range(pp)]


def _one_forward_one_backward(rank: int, pp: int, num_micro_batches: int) -> list[Action]:
    """pp - rank warmup forwards, then one backward for each further forward, then the remaining backwards."""
    forwards = [Action(FORWARD, rank, number) for number in range(num_micro_batches)]
    backwards = [Action(BACKWARD, rank, number) for number in range(num_micro_batches)]
    ahead = min(num_micro_batches, pp - rank)
    alternating = [one for both in zip(backwards, forwards[ahead:], strict=False) for one in both]
    return [*forwards[:ahead], *alternating, *backwards[num_micro_batches - ahead :]]


def _flat(action: Any) -> list[Action]:
    if action.sub_actions:
        return [one for part in action.sub_actions for one in _flat(part)]
    if action.computation_type.name not in _KINDS:  # communication of weights and gradients
        return []
    return [Action(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)]


@dataclass(frozen=True)
class PipelineTimes:
    """Times of a pipeline, from the first action of any rank to the last."""

    seconds: float
    busy: list[float]
    """Busy seconds of each rank."""

    @property
    def bubbles(self) -> list[float]:
        """The fraction of the time that each rank is idle."""
        return [1 - busy / self.seconds if self.seconds else 0.0 for busy in self.busy]

    @property
    def bubble(self) -> float:
        """The mean idle fraction of all ranks."""
        return sum(self.bubbles) / len(self.bubbles)


def pipeline_times(
    order: list[list[Action]], seconds_of: Callable[[str, int], float], transfer_seconds: float = 0.0
) -> PipelineTimes:
    """Simulate the actions of all ranks; seconds_of(kind, stage) is the time of one action.

    A rank starts an action when the one before is done and its input has arrived: hidden states from the previous
    stage, or gradients from the next.
    """
    done: dict[Action, float] = {}
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    last = max(rank_of)
    free, place, busy = [0.0] * len(order), [0] * len(order), [0.0] * len(order)

    def ready(action: Action) -> float | None:
        """When the inputs of an action are available; None if not yet known."""
        kind, stage, micro_batch = action
        if kind == FORWARD:
            needed = [[Action(FORWARD, stage - 1, micro_batch)]] if stage else []
        elif kind == BACKWARD_WEIGHT:
            needed = [[Action(BACKWARD_INPUT, stage, micro_batch)]]
        else:
            needed = [[Action(FORWARD, stage, micro_batch)]]
            if stage < last:
                needed.append([Action(way, stage + 1, micro_batch) for way in (BACKWARD, BACKWARD_INPUT)])
        times = [0.0]
        for ways in needed:
            found = next((way for way in ways if way in done), None)
            if found is None:
                return None
            is_sent = rank_of[found.stage] != rank_of[stage]
            times.append(done[found] + (transfer_seconds if is_sent else 0.0))
        return max(times)

    while any(place[rank] < len(actions) for rank, actions in enumerate(order)):
        has_moved = False
        for rank, actions in enumerate(order):
            while place[rank] < len(actions) and (start := ready(actions[place[rank]])) is not None:
                action = actions[place[rank]]
                seconds = seconds_of(action.kind, action.stage)
                free[rank] = done[action] = max(start, free[rank]) + seconds
                busy[rank] += seconds
                place[rank] += 1
                has_moved = True
        assert has_moved, "the ranks of this schedule wait for each other"
    return PipelineTimes(max(free), busy)
