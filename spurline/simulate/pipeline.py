"""The pipeline of a simulated step: one rank's stages, in the order of its schedule, without the other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spurline.parallel.pipeline import Phase, PipelinedModel, Stage, hidden_shape
from spurline.parallel.stages import SCHEDULES, micro_batch_problem
from spurline.simulate.schedule import BACKWARD_WEIGHT, FORWARD, schedule_order
from spurline.simulate.timeline import Timeline

SPLIT = 0.5
"""Fraction of a backward pass spent on input gradients; the rest is for weight gradients."""


def few_micro_batches(schedule: str, pp: int, number: int) -> int:
    """The number of micro-batches at which every rank reaches its peak memory; at most `number`."""
    stages = pp * SCHEDULES[schedule].stages_per_rank
    fitting = (few for few in range(min(number, stages + 2), number) if not micro_batch_problem(schedule, pp, few))
    return next(fitting, number)


class OwnPipeline:
    """A TrainingPipeline whose neighbors send empty tensors; it records how long each stage takes."""

    def __init__(self, model: PipelinedModel, num_micro_batches: int, tokens_BL: Tensor, phase: Phase) -> None:
        self.model, self.tokens_BL = model, tokens_BL
        layout = model.layout
        self.order = schedule_order(layout.schedule, layout.group.size(), num_micro_batches)[layout.group.rank()]
        self.stages = {n: Stage(part, n, layout, tokens_BL, phase) for n, part in model.parts.items()}
        self.timeline: Timeline | None = None
        self.seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        """Times of the actions, by kind (F or B) and stage."""

    def step(self, micro_batches: Sequence[Any], loss_of: Callable[..., Tensor], announce: Any = None) -> list[Tensor]:
        kept: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}
        losses: list[Tensor] = []
        for action in self.order:
            stage = self.stages[action.stage]
            started = self._now()
            if action.kind == FORWARD:
                stage.call = lambda part, number, hidden_BlD: loss_of(part, micro_batches[number], hidden_BlD)
                hidden_BlD = None if stage.is_first else self._received(stage)
                args = () if hidden_BlD is None else (hidden_BlD,)
                out = stage.forward_maybe_with_nosync(*args, number_1=torch.tensor([action.micro_batch]))
                kept[action.stage, action.micro_batch] = out, hidden_BlD
                self.seconds[FORWARD, action.stage].append(self._now() - started)
            elif action.kind != BACKWARD_WEIGHT:
                out, hidden_BlD = kept.pop((action.stage, action.micro_batch))
                gradients = None if stage.is_last else (torch.empty_like(out),)
                values = {"stage_output": out, "output_grads": gradients, "input_values": [hidden_BlD]}
                values["stage_output"] = out if stage.is_last else (out,)
                stage.backward_maybe_with_nosync("full", values)
                if stage.is_last:
                    losses.append(out.detach())
                del out, hidden_BlD, gradients, values
                self.seconds["B", action.stage].append(self._now() - started)
        for stage in self.stages.values():
            stage.perform_reduce_grad(1)
        return losses

    def _received(self, stage: Stage) -> Tensor:
        shape = hidden_shape(stage.submod, self.tokens_BL)
        dtype = self.model.compute_dtype
        return torch.empty(shape, dtype=dtype, device=self.tokens_BL.device, requires_grad=True)

    def _now(self) -> float:
        return self.timeline.compute.tail if self.timeline is not None else 0.0

    def stage_seconds(self) -> dict[tuple[str, int], float]:
        """The mean time of each kind of action and stage."""
        return {key: sum(times) / len(times) for key, times in self.seconds.items()}
