"""How much a step may do that an accelerator waits for. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """How much a step may do; None: as much as it likes."""

    host_waits_per_layer: int | None = None
    """Times the host waits for the device in the forward pass of one MoE layer (default: 1; 0 with forced balance)."""
    host_waits_per_step: int | None = 0
    """The same outside of layers, in a step that is not logged."""
    host_waits_per_log: int | None = 1
    """The same when a step is logged."""
    gather_dtype_share: float | None = 0.02
    """Share of the gathered bytes in another dtype than training.dtype, besides what the model keeps in float32."""
    kept_weight_bytes: int | None = 0
    """Bytes of weight-shaped tensors (per-use casts of parameters) that are kept for the backward pass."""
    graph_breaks: int | None = 0
    """With compile: graph breaks."""
    recompiles: int | None = 0
    """With compile: graphs made anew for a third sequence length."""
