"""Pipeline parallelism: each rank has one or more stages of a model, and micro-batches pass from stage to stage.

torch.distributed.pipelining provides the schedules. `PipelinedModel` holds the stages of a rank and runs them without a
schedule (`forward`), for validation and generation; `TrainingPipeline` runs a training step (`step`).

B sequences of L positions, of which this rank has l; D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor

from spurline.comm.sequence import SequenceShard
from spurline.lora.adapters import is_adapter
from spurline.parallel.blocks import blocks_of
from spurline.parallel.precision import converted_layers
from spurline.parallel.stages import SCHEDULES, cut_layers, num_stages, rank_of_stage, stages_of_rank

Phase = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Layout:
    """The stages of a pipeline, and which of them this rank has."""

    schedule: str
    group: dist.ProcessGroup
    """The ranks of one pipeline."""
    layers: list[tuple[int, int]]
    """First and end (exclusive) layer of each stage."""

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    @property
    def own(self) -> list[int]:
        """The indices of this rank's stages."""
        return stages_of_rank(self.schedule, self.group.size(), self.group.rank())

    def rank_of(self, stage: int) -> int:
        """Which rank of the group has a stage."""
        return rank_of_stage(self.schedule, self.group.size(), stage)

    @property
    def has_last(self) -> bool:
        return self.num_stages - 1 in self.own


def make_layout(config: Any, seq_len: int, schedule: str, group: dist.ProcessGroup) -> Layout:
    """The stages of a model with this `config` on the ranks of `group`."""
    stages = num_stages(schedule, group.size())
    layers = cut_layers(config.costs(seq_len), stages, config.parallel_facts().first_stage_layers)
    return Layout(schedule, group, layers)


class PipelinedModel(nn.Module):
    """This rank's stages as one module, in which every parameter has the name that it has in the full model.

    Calling it runs all stages, on all ranks of the pipeline together. Parameters of which the first and the last stage
    both have a copy (tied embeddings) are kept equal: both get the sum of their gradients. If one rank has both stages,
    its optimizer updates one of the copies, and the other is copied from it.
    """

    takes_kv_cache = True

    def __init__(self, whole: nn.Module, layout: Layout, parallelize: Callable[[nn.Module], None]) -> None:
        """`whole` is the full model on the meta device; `parallelize` is called for each of this rank's stages."""
        super().__init__()
        self.layout = layout
        self.config: Any = whole.config
        self.copies: list[str] = whole.parameters_on_two_stages()  # type: ignore[operator]
        parameters = list(whole.parameters())
        self.num_parameters = sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)
        """The number of trainable and of all parameters of the full model."""
        self.has_adapters = any(is_adapter(name) for name, _ in whole.named_parameters())
        """Whether any stage of the full model has adapters."""
        self.converted_layers = converted_layers(whole)
        """The layers of the full model that multiply in 8 bits."""
        ends = layout.num_stages - 1
        parts = [
            whole.stage(*layout.layers[number], is_first=number == 0, is_last=number == ends)  # type: ignore[operator]
            for number in layout.own
        ]
        for part in parts:
            parallelize(part)
        # In a plain dict, not as submodules, which would change the names of their parameters.
        self.parts: dict[int, Any] = dict(zip(layout.own, parts, strict=True))
        self.layers = nn.ModuleDict()
        for part in parts:
            self.layers.update(part.layers.items())
            for name, child in part.named_children():
                is_empty = isinstance(child, nn.ModuleDict | nn.ModuleList) and len(child) == 0
                if not (is_empty or name in self._modules):
                    self.add_module(name, child)

    # The interface of a model.

    @property
    def tp(self) -> Any:
        return next(iter(self.parts.values())).tp

    @property
    def compute_dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(iter(self.parts.values())).compute_dtype
        return dtype

    @compute_dtype.setter
    def compute_dtype(self, dtype: torch.dtype) -> None:
        for part in self.parts.values():
            part.compute_dtype = dtype

    def train(self, mode: bool = True) -> PipelinedModel:
        for part in self.parts.values():
            part.train(mode)
        return super().train(mode)

    def blocks(self) -> list[nn.Module]:
        return [block for part in self.parts.values() for block in blocks_of(part)]

    # Outside of training: one batch at a time, without a schedule.

    def forward(self, tokens_BL: Tensor, cache: Any = None, labels_BL: Tensor | None = None, **options: Any) -> Tensor:
        """What the full model returns: logits, on every rank; with labels the loss, zero without the last stage."""
        layout, result = self.layout, None
        for number, part in self.parts.items():
            # Every part advances its own cache; the caller's cache is that of this rank's first stage.
            own_cache = cache if cache is None or number == layout.own[0] else cache.twin(number)
            hidden_BlD = self._from_stage(number - 1, part, tokens_BL, cache, result) if number else None
            result = part(tokens_BL, own_cache, labels_BL=labels_BL, hidden_BlD=hidden_BlD, **options)
            if number < layout.num_stages - 1 and layout.rank_of(number + 1) != layout.group.rank():
                dist.send(result.contiguous(), group=layout.group, group_dst=layout.rank_of(number + 1))
        assert result is not None
        if labels_BL is not None:
            return result if layout.has_last else torch.zeros((), device=tokens_BL.device)
        return self._from_last_stage(result, tokens_BL, cache)

    def _from_stage(self, number: int, part: Any, tokens_BL: Tensor, cache: Any, own: Tensor | None) -> Tensor:
        source = self.layout.rank_of(number)
        if source == self.layout.group.rank():
            assert own is not None
            return own
        shape = hidden_shape(part, tokens_BL, cache)
        hidden_BlD = torch.empty(shape, dtype=part.compute_dtype, device=tokens_BL.device)
        dist.recv(hidden_BlD, group=self.layout.group, group_src=source)
        return hidden_BlD

    def _from_last_stage(self, own: Tensor, tokens_BL: Tensor, cache: Any) -> Tensor:
        """Broadcast the logits from the rank of the last stage to all ranks of the pipeline."""
        B, L = tokens_BL.shape
        tp_size = 1 if self.tp.group is None else self.tp.group.size()
        shape = B, L if cache is None else 1, self.config.vocab_size // tp_size
        logits = own if self.layout.has_last else own.new_empty(shape)
        last = self.layout.rank_of(self.layout.num_stages - 1)
        dist.broadcast(logits, group=self.layout.group, group_src=last)
        return logits

    # Copies of a parameter on the first and the last stage.

    @torch.no_grad()
    def sum_gradients_of_copies(self) -> None:
        """Give both copies the sum of their gradients; frozen ones have none."""
        first, last = self._part(0), self._part(self.layout.num_stages - 1)
        for name in self.copies:
            if not any(part is not None and part.get_parameter(name).requires_grad for part in (first, last)):
                continue
            if first is not None and last is not None:
                _local(first.get_parameter(name).grad).add_(_local(last.get_parameter(name).grad))
                last.get_parameter(name).grad = None
            elif first is not None or last is not None:
                part = first if first is not None else last
                gradient = _local(part.get_parameter(name).grad)
                other = self.exchanged_with_other_end(gradient)
                # In the same order on both ranks, so that they stay equal bit for bit.
                torch.add(*((gradient, other) if first is not None else (other, gradient)), out=gradient)

    @torch.no_grad()
    def update_followers(self) -> None:
        """If this rank has both copies, copy the updated first one to the second."""
        for name, follower in self.followers():
            _local(follower).copy_(_local(self.get_parameter(name)))

    def followers(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The last stage's copies of parameters, by name, if this rank has the first stage too."""
        first, last = self._part(0), self._part(self.layout.num_stages - 1)
        if first is not None and last is not None:
            yield from ((name, last.get_parameter(name)) for name in self.copies)

    def second_copies(self) -> set[nn.Parameter]:
        """Parameters of this rank whose other copy, on the rank of the first stage, is the one that is counted."""
        first, last = self._part(0), self._part(self.layout.num_stages - 1)
        return set() if last is None or first is not None else {last.get_parameter(name) for name in self.copies}

    def _part(self, number: int) -> Any:
        return self.parts.get(number)

    def exchanged_with_other_end(self, mine: Tensor) -> Tensor:
        group, layout = self.layout.group, self.layout
        ends = layout.rank_of(0), layout.rank_of(layout.num_stages - 1)
        peer = ends[1] if group.rank() == ends[0] else ends[0]
        theirs, mine = torch.empty_like(mine), mine.contiguous()
        ops = [
            dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return theirs


def hidden_shape(part: Any, tokens_BL: Tensor, cache: Any = None) -> tuple[int, int, int]:
    """(B, l, D): the shape of the hidden states that this rank sends to the next stage."""
    positions = part.num_own_positions(tokens_BL, cache)
    size = 1 if part.tp.group is None else part.tp.group.size()
    return tokens_BL.shape[0], SequenceShard(positions, size, part.tp.rank).num_real, part.config.dim


class TrainingPipeline:
    """Runs training steps of `num_micro_batches` through the stages of a model, by its schedule."""

    def __init__(self, model: PipelinedModel, num_micro_batches: int, tokens_BL: Tensor, phase: Phase | None) -> None:
        """tokens_BL has the shape of every micro-batch, and is on the device."""
        layout = model.layout
        self.layout, self.num_micro_batches = layout, num_micro_batches
        stages = [
            Stage(part, number, layout, tokens_BL, phase or (lambda name: nullcontext()))
            for number, part in model.parts.items()
        ]
        self._stages = stages
        kind = get_schedule_class(SCHEDULES[layout.schedule].torch_name)
        several = SCHEDULES[layout.schedule].stages_per_rank > 1
        self._schedule: Any = kind(
            stages if several else stages[0],
            num_micro_batches,
            loss_fn=lambda loss, _: loss,
            scale_grads=False,
        )

    def step(
        self,
        micro_batches: Sequence[Any],
        loss_of: Callable[..., Tensor],
        announce: Callable[[int], None] | None = None,
    ) -> list[Tensor]:
        """Forward and backward of all micro-batches; returns their losses, or [] without the last stage.

        loss_of(part, batch, hidden_BlD) calls a stage: the last one returns the loss of a micro-batch. Before each pass
        of a stage, `announce` gets the index of its micro-batch.
        """
        assert len(micro_batches) == self.num_micro_batches, f"{len(micro_batches)} micro-batches"
        for stage in self._stages:
            stage.call = lambda part, number, hidden_BlD: loss_of(part, micro_batches[number], hidden_BlD)
            stage.announce = announce or (lambda number: None)
        number_M = torch.arange(self.num_micro_batches)
        first = (number_M,) if 0 in self.layout.own else ()
        losses: list[Tensor] = []
        self._schedule.step(*first, number_1=number_M, target=number_M, losses=losses, return_outputs=False)
        for stage in self._stages:
            stage.call = None
        return [loss.detach() for loss in losses]


class Stage(PipelineStage):
    """A stage that looks up micro-batches by index: every rank has them, so only hidden states are sent."""

    def __init__(self, part: Any, number: int, layout: Layout, tokens_BL: Tensor, phase: Phase) -> None:
        hidden = torch.empty(hidden_shape(part, tokens_BL), dtype=part.compute_dtype, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        super().__init__(
            part,
            number,
            layout.num_stages,
            tokens_BL.device,
            input_args=torch.zeros(1, dtype=torch.int64) if number == 0 else hidden,
            output_args=loss if number == layout.num_stages - 1 else hidden,
            group=layout.group,
        )
        self.call: Callable[[Any, int, Tensor | None], Tensor] | None = None
        self.announce: Callable[[int], None] = lambda number: None
        self._phase = phase

    def forward_maybe_with_nosync(self, *args: Tensor, number_1: Tensor) -> Tensor:
        assert self.call is not None
        number = int(number_1)
        self.announce(number)
        with self._phase("forward"):
            return self.call(self.submod, number, None if self.is_first else args[0])

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.announce(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self._phase("backward"):
            return super().backward_maybe_with_nosync(*args, **kwargs)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
