"""Limits on what stalls an accelerator in a step. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """Limits of a step (None: no limit)."""

    host_waits_per_layer: int | None = None
    """Times the host waits for the device in the forward pass of one MoE layer (default: 1; 0 with forced balance)."""
    host_waits_per_step: int | None = 0
    """The same anywhere else in a step that is not logged: other layers, embedding, head, loss, backward, optimizer."""
    host_waits_per_log: int | None = 1
    """The same when a step is logged."""
    gather_dtype_share: float | None = 0.02
    """Share of gathered bytes in a dtype other than training.dtype, apart from what the model keeps in float32."""
    kept_weight_bytes: int | None = 0
    """Bytes of weight-shaped tensors (per-use casts of parameters) saved for the backward pass."""
    graph_breaks: int | None = 0
    """Graph breaks, with compile."""
    recompiles: int | None = 0
    """New graphs compiled for a third sequence length, with compile."""

    def problems(self) -> list[str]:
        return [
            f"--budget.{name} must be at least 0, got {limit}"
            for name, limit in vars(self).items()
            if limit is not None and not limit >= 0  # NaN, which nothing exceeds, is not
        ]
