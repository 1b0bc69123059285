"""Log a step: complete its metrics, write them, show them, and warn about what looks wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from spurline.device import peak_flops, peak_memory_bytes
from spurline.moe.telemetry import counters
from spurline.train.metrics.step_metrics import StepMetrics
from spurline.train.metrics.throughput import Throughput
from spurline.train.metrics.training_health import TrainingHealth, layers_with
from spurline.train.metrics.writers import AllWriters
from spurline.train.progress import Progress
from spurline.train.validation import Validation

if TYPE_CHECKING:
    from spurline.train.trainer import Trainer

_PADDING = "exchange.equal_split.padding_rows"


class MetricsLogger:
    """Logs steps. The training loop pauses `throughput` for anything but training."""

    def __init__(self, trainer: Trainer, writers: AllWriters, progress: Progress) -> None:
        config = trainer.config
        self._device, self._timer = trainer.device, trainer.timer
        self._writers, self._progress = writers, progress
        self._flops_per_token = config.model.flops_per_token(config.training.seq_len)
        peak = peak_flops(trainer.device, getattr(torch, config.training.dtype))
        self._peak_flops = peak and peak * trainer.world.degrees.world
        self._padded_rows = PaddedRows()
        moe = getattr(config.model, "moe", None)
        grows = moe is not None and moe.overflow == "grow"
        self._health = TrainingHealth(config.training.max_grad_norm, moe.top_k if moe else 1, grows)
        self._bad_steps = trainer.bad_steps
        self._tally, self._logged_tokens = trainer.tally, trainer.tally.tokens_seen
        self.throughput = Throughput()

    def log(self, metrics: StepMetrics, held_out: Validation | None) -> float:
        """Read the metrics of a step, all ranks together, then check, write and show them; returns the loss."""
        record = self._record(metrics, held_out)
        if warnings := self._health.check(record):
            record["warnings"] = warnings
        for warning in warnings:
            self._progress.log(f"warning: {warning}")
        self._writers.write(record)
        self._progress.update(
            record["step"],
            loss=record["loss"],
            tokens_per_second=record["tokens_per_second"],
            memory_bytes=record["peak_memory_bytes"],
            expert_load=max((own["load"] for _, own in layers_with(("load",), record["routing"])), default=None),
            validation_loss=record.get("validation_loss"),
            bits_per_byte=record.get("bits_per_byte"),
            grad_norm=record["grad_norm"],
            lr=record["lr"],
            rows_of_experts=record.get("expert_load"),
        )
        loss: float = record["loss"]
        return loss

    def _record(self, metrics: StepMetrics, held_out: Validation | None) -> dict[str, Any]:
        offered = metrics.read()
        tokens_seen = self._tally.tokens_seen
        self.throughput.add(tokens_seen - self._logged_tokens)
        self._logged_tokens = tokens_seen
        tokens_per_second = self.throughput.read()
        own = {
            "tokens_per_second": tokens_per_second,
            "tokens_seen": tokens_seen,
            "peak_memory_bytes": peak_memory_bytes(self._device),
            **self._timer.read(),
            **({} if held_out is None else {"validation_loss": held_out.loss}),
            **({} if held_out is None or held_out.bits_per_byte is None else {"bits_per_byte": held_out.bits_per_byte}),
            **compute_rate(tokens_per_second, self._flops_per_token, self._peak_flops),
            **self._padded_rows.read(),
            **({"bad_steps": self._bad_steps.count} if self._bad_steps.count else {}),
        }
        if taken := sorted(offered.keys() & own.keys()):
            raise ValueError(f"a module offers the metric {taken[0]!r}, which the trainer writes: choose another name")
        return offered | own


def compute_rate(tokens_per_second: float, flops_per_token: float, peak_flops: float | None) -> dict[str, float]:
    """The model's FLOPs per second, and their share of `peak_flops` (of all ranks) if known."""
    rate = tokens_per_second * flops_per_token
    return {"flops_per_second": rate} | ({"mfu": rate / peak_flops} if peak_flops else {})


class PaddedRows:
    """Rows that this rank sent as padding, if the fast-path counters are on (they are off by default)."""

    def __init__(self) -> None:
        self._before = counters().get(_PADDING, 0)

    def read(self) -> dict[str, Any]:
        """The rows since the last call; empty if none were counted."""
        now = counters().get(_PADDING)
        if now is None:
            return {}
        rows, self._before = now - self._before, now
        return {"padded_rows": rows}
