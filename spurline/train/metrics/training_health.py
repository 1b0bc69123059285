"""Warnings that a user can act on, from the records of metrics as they are written. Free of torch.

Each warning is given once for as long as its cause lasts, and again if the cause returns.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from spurline.train.metrics.loss_spikes import UsualLoss

DEAD_STEPS = 100
"""An expert is dead if it got no row in any record of this many steps."""
PATIENCE = 20
"""Records over which a condition of routing or data must hold: short episodes are normal, mostly at the start."""
LOW_ENTROPY = 0.5
NEAR_LARGEST_LOAD = 0.9
DATA_BOUND = 0.2
CLIPPED_LINES = 100


class TrainingHealth:
    """Checks each record of metrics: `check(record)` returns the new warnings, one sentence each."""

    def __init__(self, max_grad_norm: float = 0.0, top_k: int = 1, capacity_grows: bool = False) -> None:
        """top_k: experts per token, which bounds the load of one expert; capacity_grows: with `overflow grow`."""
        self._max_grad_norm = max_grad_norm
        self._top_k = top_k
        self._capacity_grows = capacity_grows
        self._reported: set[str] = set()
        self._idle_since: dict[tuple[str, int], int] = {}
        self._uneven: dict[str, int] = {}
        self._waits: deque[tuple[float, float]] = deque(maxlen=PATIENCE)
        self._usual_loss = UsualLoss()
        self._clipped = 0

    def check(self, record: Mapping[str, Any]) -> list[str]:
        return [
            *self._dead_experts(record),
            *self._collapsing_routers(record),
            *self._dropped_rows(record),
            *self._data_bound(record),
            *self._loss_spike(record),
            *self._always_clipped(record),
        ]

    def _once(self, cause: str, holds: bool, message: str) -> list[str]:
        """The message if `cause` holds and was not reported since it began."""
        if not holds:
            self._reported.discard(cause)
            return []
        if cause in self._reported:
            return []
        self._reported.add(cause)
        return [message]

    def _dead_experts(self, record: Mapping[str, Any]) -> list[str]:
        step, warnings = record["step"], []
        for layer, rows in (record.get("expert_load") or {}).items():
            dead = []
            for expert, count in enumerate(rows):
                if count:
                    self._idle_since.pop((layer, expert), None)
                idle_since = step if count else self._idle_since.setdefault((layer, expert), step)
                if self._once(f"dead {layer} {expert}", step - idle_since >= DEAD_STEPS, "dead"):
                    dead.append(str(expert))
            if dead:
                who = f"expert {dead[0]}" if len(dead) == 1 else f"experts {', '.join(dead)}"
                warnings.append(
                    f"{layer}: {who} received no token for {DEAD_STEPS} steps. Raise --model.moe.bias_update_rate or"
                    " --model.moe.aux_loss_weight"
                )
        return warnings

    def _collapsing_routers(self, record: Mapping[str, Any]) -> list[str]:
        warnings = []
        loads = record.get("expert_load") or {}
        for layer, routing in layers_with(("load", "entropy"), record.get("routing")):
            if layer not in loads:
                continue
            num_experts = len(loads[layer])
            largest = num_experts / self._top_k
            near_largest = largest > 1 and routing["load"] >= NEAR_LARGEST_LOAD * largest
            uneven = num_experts > 1 and (routing["entropy"] < LOW_ENTROPY or near_largest)
            self._uneven[layer] = self._uneven.get(layer, 0) + 1 if uneven else 0
            warnings += self._once(
                f"collapse {layer}",
                self._uneven[layer] >= PATIENCE,
                f"{layer}: the router is collapsing: its busiest expert has {routing['load']:.1f} times the mean,"
                f" the entropy is {routing['entropy']:.2f} of 1. Raise --model.moe.aux_loss_weight, or lower"
                " --optimizer.lr",
            )
        return warnings

    def _dropped_rows(self, record: Mapping[str, Any]) -> list[str]:
        warnings = []
        names = "dropped_rows", "factor", "needed_factor"
        advice = "Raise --model.moe.capacity_factor, or choose --model.moe.overflow grow"
        if self._capacity_grows:
            advice = "It grows at each logged step that needs more: until then, raise --model.moe.capacity_factor"
        for layer, capacity in layers_with(names, record.get("capacity")):
            dropped, factor, needed = (capacity[name] for name in names)
            warnings += self._once(
                f"dropped {layer}",
                dropped > 0,
                f"{layer}: {dropped:,} rows found no place at their expert and were dropped: the capacity factor is"
                f" {factor:g}, this step needed {needed:.2f}. {advice}",
            )
        return warnings

    def _data_bound(self, record: Mapping[str, Any]) -> list[str]:
        if not record.get("step_time"):
            return []
        self._waits.append((record["data_wait"], record["step_time"]))
        waited, worked = map(sum, zip(*self._waits, strict=True))
        share = waited / worked
        return self._once(
            "data",
            len(self._waits) == PATIENCE and share > DATA_BOUND,
            f"steps wait for data {share:.0%} of their time. Prepare the data once (spurline data prepare), or move it"
            " to a faster disk",
        )

    def _loss_spike(self, record: Mapping[str, Any]) -> list[str]:
        loss = record.get("loss")
        if loss is None or not math.isfinite(loss):
            return []
        is_spike = self._usual_loss.is_spike(loss)
        usual = self._usual_loss.usual
        return self._once(
            "spike",
            is_spike,
            f"step {record['step']}: the loss jumped to {loss:.3g} from about {usual:.3g}. If it stays there, lower"
            " --optimizer.lr or --training.max_grad_norm, or look at the data of this step",
        )

    def _always_clipped(self, record: Mapping[str, Any]) -> list[str]:
        norm, limit = record.get("grad_norm"), self._max_grad_norm
        if norm is None or not limit:
            return []
        self._clipped = self._clipped + 1 if norm > limit else 0
        return self._once(
            "clipped",
            self._clipped >= CLIPPED_LINES,
            f"the gradient was clipped {CLIPPED_LINES} times in a row (norm {norm:.3g}, --training.max_grad_norm"
            f" {limit:g}): every update has the length of the limit. Raise the limit, or lower --optimizer.lr",
        )


def layers_with(names: tuple[str, ...], group: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The layers of a group of metrics that have all of these: modules of users may report others in the same group."""
    for layer, metrics in (group or {}).items():
        if isinstance(metrics, Mapping) and metrics.keys() >= set(names):
            yield layer, metrics
