"""Non-finite steps: what is known about one, where it is recorded, and whether the run continues.

The device decides whether a step is finite, and the host learns of it later (metrics/tally.py), when gradients are long
gone. So each rank keeps, on its device, a few numbers that show where the first bad step went wrong: the loss of each
micro-batch, the largest gradient that it sent back to the embedding, and the gradient norm of each parameter, which
clipping computes anyway. They are read, and exchanged between ranks, only if there was such a step.

M micro-batches, P parameters with a gradient.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from spurline.files import append
from spurline.train.metrics.tally import FailedStep, diverged

if TYPE_CHECKING:
    from spurline.train.trainer import Trainer

BAD_STEPS_FILE = "bad_steps.jsonl"
_SHOWN = 3
_RECORDED = 20


class BadSteps:
    """Keeps this rank's evidence of bad steps; combined over ranks, it is recorded and reported."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.folder: Path | None = None
        """The run folder, if steps are to be recorded."""
        self.say: Callable[[str], None] = lambda line: None
        self.count = 0
        """Bad steps that the host has read so far."""
        self._losses: list[Tensor] = []
        self._input_grads: list[Tensor] = []
        self._names: list[str] = []
        self._kept = torch.empty(0, device=trainer.device)
        """Of the first bad step since the last read: losses (M,), input gradients (M or 0,), gradient norms (P,)."""
        self._finite_P = torch.empty(0, device=trainer.device)
        """The gradient norms of the last step before it."""
        self._sizes: list[int] = []
        self._is_kept = torch.zeros((), dtype=torch.bool, device=trainer.device)
        self._hook: RemovableHandle | None = None
        if isinstance(embedding := getattr(trainer.model, "embedding", None), nn.Module):
            self._hook = embedding.register_forward_hook(self._watch_input)

    def stop_watching(self) -> None:
        """Leave the model to another trainer."""
        if self._hook is not None:
            self._hook.remove()

    def note_micro_batch(self, loss: Tensor) -> None:
        """Keep this rank's share of the loss of a micro-batch."""
        self._losses.append(loss.detach())

    def _watch_input(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self._look_at_input_grad)

    def _look_at_input_grad(self, grad: Tensor) -> None:
        # A rank without positions has an empty gradient, which has no largest magnitude.
        # aminmax takes a twentieth of the time of a maximum norm on a CPU, and keeps NaNs like it.
        largest = torch.stack(torch.aminmax(grad.detach())).abs().max() if grad.numel() else grad.new_zeros(())
        self._input_grads.append(largest)

    @torch.no_grad()
    def note(self, failed: Tensor, norms_P: Tensor) -> None:
        """After all micro-batches of a step: keep its evidence if `failed`, 0 or 1 on the device, is 1."""
        if len(self._names) != norms_P.numel():  # while gradients exist; nearly always the same in every step
            parameters = self._trainer.model.named_parameters()
            self._names = [name for name, parameter in parameters if parameter.grad is not None]
        known = [_stacked(self._losses, norms_P), _stacked(self._input_grads, norms_P), norms_P]
        self._losses, self._input_grads = [], []
        sizes = [part.numel() for part in known]
        if sizes != self._sizes:
            self._sizes = sizes
            self._kept, self._finite_P = norms_P.new_zeros(sum(sizes)), torch.zeros_like(norms_P)
        is_first = (failed > 0) & ~self._is_kept
        self._kept = torch.where(is_first, torch.cat(known), self._kept)
        self._is_kept = self._is_kept | is_first
        self._finite_P = torch.where(self._is_kept, self._finite_P, norms_P)

    def report(self, failed: list[FailedStep], num_failed: int, most_in_a_row: int) -> None:
        """Record bad steps, and warn or raise a ValueError, as the options say; all ranks together.

        `failed` holds the first of `num_failed` bad steps since the last host read.
        """
        training = self._trainer.config.training
        self.count += num_failed
        found = self._gather_evidence()
        stops = training.on_bad_step == "stop" or most_in_a_row > training.max_bad_steps
        self._record(failed, found, "stop" if stops else "skip")
        first = failed[0]
        what = f"the loss is {first.loss} and the gradient norm {first.grad_norm}: {found.describe()}"
        if self.folder is not None:
            what += f". `spurline replay {self.folder} --step {first.step}` looks for the place"
        if not stops:
            more = f", and {num_failed - 1} more since the last line" if num_failed > 1 else ""
            self.say(f"warning: step {first.step} is skipped{more}: {what}")
        elif training.on_bad_step == "skip":
            raise diverged(
                self._trainer.config,
                first.step,
                f"{what}. {most_in_a_row} steps in a row were not finite, and --training.max_bad_steps is"
                f" {training.max_bad_steps}",
            )
        else:
            raise diverged(self._trainer.config, first.step, what)

    def _gather_evidence(self) -> Evidence:
        world, names = self._trainer.world, self._names
        losses, input_grads, norms = (part.tolist() for part in self._kept.split(self._sizes))
        self._is_kept = torch.zeros_like(self._is_kept)
        where = [
            Place(0, world.data_rank, micro_batch, loss, input_grad)
            for micro_batch, (loss, input_grad) in enumerate(
                zip(losses, input_grads if len(input_grads) == len(losses) else [0.0] * len(losses), strict=True)
            )
            if not (math.isfinite(loss) and math.isfinite(input_grad))
        ]
        own = Evidence(
            where,
            [name for name, norm in zip(names, norms, strict=True) if not math.isfinite(norm)],
            {names[0]: len(names)} if names else {},
            _by_layer(zip(names, norms, strict=True)),
            _by_layer(zip(names, self._finite_P.tolist(), strict=True)),
        )
        if world.host_group is None:
            return own
        by_rank: list[Any] = [None] * world.host_group.size()
        dist.all_gather_object(by_rank, own, group=world.host_group)
        return _together(by_rank, names)

    def _record(self, failed: list[FailedStep], found: Evidence, action: str) -> None:
        if self.folder is None or not self._trainer.world.is_first:
            return
        for number, step in enumerate(failed):
            numbers = {"loss": _number(step.loss), "grad_norm": _number(step.grad_norm), "action": action}
            more = found.as_json() if number == 0 else {}
            record_step(self.folder, self._trainer, step.step, numbers | more, self.say)


def record_step(folder: Path, trainer: Trainer, step: int, found: dict[str, Any], say: Callable[[str], None]) -> None:
    """Append a line to bad_steps.jsonl: what was found, and where the step's batch is in the data."""
    first = trainer.first_sequence(step)
    line = {
        "step": step,
        "first_sequence": first,
        "global_batch_size": trainer.global_batch_size,
        "local_batch_size": trainer.config.training.local_batch_size,
        "data_ranks": trainer.world.data_size,
        "sample_ids": trainer.data.train.sample_ids(first, trainer.global_batch_size),
    }
    try:
        with open(folder / BAD_STEPS_FILE, "ab", buffering=0) as file:
            append(file, (json.dumps(line | found) + "\n").encode())
    except OSError as error:
        say(f"warning: step {step} was not recorded in {BAD_STEPS_FILE}: {error.strerror or error}")


@dataclass(frozen=True)
class Place:
    """A micro-batch of a rank whose loss, or whose gradient at the model's input, is not finite."""

    rank: int
    data_rank: int
    micro_batch: int
    """Counted from 0."""
    loss: float
    input_grad: float

    def describe(self) -> str:
        what = f"its loss is {self.loss}" if not math.isfinite(self.loss) else "its loss is finite, its gradient is not"
        return f"micro-batch {self.micro_batch + 1} of rank {self.rank} ({what})"


@dataclass(frozen=True)
class Evidence:
    """What is known about a bad step."""

    where: list[Place]
    parameters: list[str]
    """Parameters whose gradient is not finite, in model order."""
    num_by_stage: dict[str, int]
    """Number of parameters of each pipeline stage, by its first one; without pipeline parallelism there is one."""
    norm_by_layer: dict[str, float]
    """The largest finite gradient norm of any parameter shard, by layer."""
    last_finite_by_layer: dict[str, float]
    """The same for the last finite step before it."""

    @property
    def num_parameters(self) -> int:
        return sum(self.num_by_stage.values())

    def describe(self) -> str:
        parts = [", ".join(place.describe() for place in self.where[:_SHOWN])] if self.where else []
        if self.parameters:
            first = ", ".join(self.parameters[::-1][:_SHOWN])
            parts.append(
                f"{len(self.parameters)} of {self.num_parameters} gradients are not finite, in the order of the"
                f" backward pass first {first}"
            )
        for norms, when in ((self.norm_by_layer, "now"), (self.last_finite_by_layer, "before")):
            if largest := sorted(norms.items(), key=lambda item: -item[1])[:_SHOWN]:
                shown = ", ".join(f"{layer} {norm:.3g}" for layer, norm in largest)
                parts.append(f"largest finite gradient norms {when}: {shown}")
        return "; ".join(parts) or "nothing more is known"

    def as_json(self) -> dict[str, Any]:
        places = [
            vars(place) | {"loss": _number(place.loss), "input_grad": _number(place.input_grad)} for place in self.where
        ]
        return {
            "where": places[:_RECORDED],
            "parameters": self.parameters[::-1][:_RECORDED],
            "num_not_finite": len(self.parameters),
            "num_parameters": self.num_parameters,
            "grad_norm_by_layer": self.norm_by_layer,
            "last_finite_grad_norm_by_layer": self.last_finite_by_layer,
        }


def _together(by_rank: list[Evidence], names: list[str]) -> Evidence:
    """Merge the evidence of all ranks; `names` lists this rank's parameters in model order."""
    where = [replace(place, rank=rank) for rank, found in enumerate(by_rank) for place in found.where]
    not_finite = {name for found in by_rank for name in found.parameters}
    return Evidence(
        where,
        [name for name in names if name in not_finite] + sorted(not_finite - set(names)),  # of other pipeline stages
        {first: number for found in by_rank for first, number in found.num_by_stage.items()},
        _by_layer(item for found in by_rank for item in found.norm_by_layer.items()),
        _by_layer(item for found in by_rank for item in found.last_finite_by_layer.items()),
    )


def _by_layer(norms: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The largest finite norm of each layer: `layers.3`, or the first part of the name."""
    largest: dict[str, float] = {}
    for name, norm in norms:
        parts = name.split(".")
        layer = ".".join(parts[: 2 if len(parts) > 1 and parts[1].isdigit() else 1])
        if math.isfinite(norm):
            largest[layer] = max(norm, largest.get(layer, 0.0))
    return largest


def _stacked(numbers: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(numbers).to(like.dtype) if numbers else like.new_empty(0)


def _number(value: float) -> float | str:
    """The value, as text if it is not finite: JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else str(value)
