"""What a line of metrics says beyond the loss: compute, routing, padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spurline.config import RunConfig
from spurline.device import peak_flops
from spurline.moe.balance import routers
from spurline.moe.telemetry import counters, routing_statistics
from spurline.train.metrics.training_health import TrainingHealth

_PADDING = "exchange.equal_split.padding_rows"


def compute_rate(tokens_per_second: float, flops_per_token: float, peak_flops: float | None) -> dict[str, float]:
    """The model's floating-point operations a second, and their share of `peak_flops` (of all ranks) where known."""
    rate = tokens_per_second * flops_per_token
    return {"flops_per_second": rate} | ({"mfu": rate / peak_flops} if peak_flops else {})


def routing_metrics(model: nn.Module, expert_load: Mapping[str, Sequence[int]]) -> dict[str, dict[str, float]]:
    """How even each MoE layer's rows are spread, and between which bounds its selection bias lies."""
    health: dict[str, dict[str, float]] = {}
    for name, router in routers(model).items():
        health[name] = routing_statistics(expert_load[name])
        if router.config.bias_update_rate:
            bias_E = router.expert_bias_E.tolist()
            health[name] |= {"bias_min": min(bias_E), "bias_max": max(bias_E)}
    return health


class PaddedRows:
    """Rows that this rank sent for padding, as far as the fast-path counters know: they are off by default."""

    def __init__(self) -> None:
        self._before = counters().get(_PADDING, 0)

    def read(self) -> dict[str, Any]:
        """Those since the last reading; nothing where none were counted."""
        now = counters().get(_PADDING)
        if now is None:
            return {}
        rows, self._before = now - self._before, now
        return {"padded_rows": rows}


class StepMetrics:
    """Completes the lines of metrics of a run, and has an eye on them."""

    def __init__(self, model: nn.Module, config: RunConfig[Any], device: torch.device, num_ranks: int) -> None:
        self._model = model
        self._flops_per_token = config.model.flops_per_token(config.training.seq_len)
        peak = peak_flops(device, getattr(torch, config.training.dtype))
        self._peak = peak and peak * num_ranks
        self._padded_rows = PaddedRows()
        moe = getattr(config.model, "moe", None)
        self._health = TrainingHealth(config.training.max_grad_norm, moe.top_k if moe else 1)

    def add_to(self, record: dict[str, Any]) -> list[str]:
        """Put routing, compute and warnings into a step's record, and return the warnings."""
        record |= {
            "routing": routing_metrics(self._model, record["expert_load"]),
            **compute_rate(record["tokens_per_second"], self._flops_per_token, self._peak),
            **self._padded_rows.read(),
        }
        if warnings := self._health.check(record):
            record["warnings"] = warnings
        return warnings
