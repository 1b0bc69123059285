"""The sections for parallelism, communication, compilation and activation checkpointing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from spurline.config.checks import at_least
from spurline.typed_json import ADDED_LATER


@dataclass(frozen=True)
class Parallelism:
    """pipeline x replicate x shard x context x tensor = number of ranks; expert x expert_tensor must divide shard x
    context x tensor."""

    data_parallel_replicate_degree: int = 1
    """Number of model replicas (HSDP); 1 is plain FSDP."""
    data_parallel_shard_degree: int = -1
    """Ranks over which FSDP2 shards each replica's parameters (-1: all remaining ranks)."""
    tensor_parallel_degree: int = 1
    """Ranks that split every dense weight matrix, with sequence parallelism between blocks."""
    expert_parallel_degree: int = 1
    """Ranks over which the experts of each MoE layer are distributed."""
    expert_tensor_parallel_degree: int = 1
    """Ranks that split each expert's hidden width."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = field(default="default", metadata=ADDED_LATER)
    """When FSDP2 frees all-gathered weights: after the forward pass of each block but the last (default), of every
    block (always: least memory), or only after the backward pass (never: half the all-gathers). With pipeline
    parallelism, default means never, since each micro-batch would all-gather them again."""
    fsdp_reduce_each_micro_batch: bool = field(default=False, metadata=ADDED_LATER)
    """Reduce gradients over ranks after every micro-batch instead of once per step: no unsharded gradients are held
    between micro-batches, but traffic grows with the number of micro-batches."""

    context_parallel_degree: int = field(default=1, metadata=ADDED_LATER)
    """Ranks that split the positions of every sequence, for sequences too long for one rank."""
    context_parallel_kind: Literal["all_gather", "ulysses"] = field(default="all_gather", metadata=ADDED_LATER)
    """How attention reaches other ranks' positions: all_gather keys and values (latent attention: the narrow latent),
    or ulysses, all-to-alls that trade positions for heads; the degree must divide the number of heads."""

    pipeline_parallel_degree: int = field(default=1, metadata=ADDED_LATER)
    """Pipeline ranks, each of which holds some of the layers; micro-batches pass from one to the next."""
    pipeline_parallel_schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"
    ] = field(default="1F1B", metadata=ADDED_LATER)
    """Order in which a rank computes micro-batches. All but GPipe and 1F1B give a rank two stages, for smaller bubbles;
    the last three split backward into input and weight gradients, and fill bubbles with the latter."""

    def problems(self) -> list[str]:
        found = [
            f"{f.name} must be positive, got {getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if f.name.endswith("_degree") and f.name != "data_parallel_shard_degree" and getattr(self, f.name) < 1
        ]
        if self.data_parallel_shard_degree == 0 or self.data_parallel_shard_degree < -1:
            found.append(f"data_parallel_shard_degree must be positive or -1, got {self.data_parallel_shard_degree}")
        return found


@dataclass(frozen=True)
class Comm:
    timeout_seconds: int = 0
    """Fail when a collective has waited this long for a rank (0: PyTorch's default, 600 with nccl, 1800 with gloo).
    Leave time for compilation in the first step and for checkpoints, which all ranks write."""
    watchdog_seconds: int = field(default=0, metadata=ADDED_LATER)
    """End the run when a step takes this long or a rank stops responding, and name the rank that hangs (0: with
    several ranks, 20 times the median step and at least 300; -1: never). The first step, validation and checkpoints
    may take 6 times as long."""

    def problems(self) -> list[str]:
        return at_least(self, timeout_seconds=0, watchdog_seconds=-1)


@dataclass(frozen=True)
class Compile:
    enable: bool = False
    """Use torch.compile."""
    components: str = "model,loss"
    """Comma-separated components to compile: model (each block separately), loss."""
    backend: str = "inductor"
    """torch.compile backend; aot_eager captures the same graphs without code generation, for debugging."""

    @property
    def parts(self) -> set[str]:
        return {part.strip() for part in self.components.split(",") if part.strip()}

    def problems(self) -> list[str]:
        unknown = self.parts - {"model", "loss"}
        if unknown or not self.parts:
            return [f"components must be model, loss or model,loss, got {self.components!r}"]
        return []


@dataclass(frozen=True)
class ActivationCheckpoint:
    mode: Literal["none", "full", "selective", "selective_resend"] = "none"
    """What each block recomputes in backward to save memory: nothing, everything, or (selective) cheap ops.
    Selective keeps the outputs of attention, large matmuls, routing and all-to-alls; selective_resend dispatches rows
    to their experts again instead of keeping them (a quarter more traffic, far less memory with many experts)."""

    def problems(self) -> list[str]:
        return []
