"""Fixed capacity: every expert has the same number of places, whatever the routing, without device-to-host reads.

T tokens, K experts per token, S = T*K rows of this rank, E experts, C places of each for one rank's rows, A = E*C
places in all, P ranks of the group, e experts on each. An empty place holds the sentinel (`sentinel.py`). Rows beyond
the capacity are dropped: they contribute zero, get zero gradient, and are counted.

All sizes follow from T and the capacity factor, so shapes are static until that grows, and every pair of ranks
exchanges e*C rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from spurline.comm.conservation import as_label
from spurline.comm.exchange import Departure, InFlight, exchange_rows
from spurline.comm.metrics import Metric, join_records
from spurline.moe.config import MoEConfig
from spurline.moe.dispatch.aligned import round_up
from spurline.moe.dispatch.all_to_all import ExchangePlan, Route, route_to_parts
from spurline.moe.dispatch.local import LocalPlan
from spurline.moe.dispatch.permute import UniformPermutation, starts_of
from spurline.moe.dispatch.plan import ExpertRanks
from spurline.moe.dispatch.sentinel import SentinelPlan, with_zero
from spurline.moe.routing import Routing
from spurline.moe.rows import RowCounts
from spurline.moe.telemetry import counted
from spurline.ops.functional import accumulate_once, raise_to

SPARE = 1.1
"""Growth multiplies the needed factor by this, so that it does not happen at every logged step."""


@dataclass(frozen=True)
class FixedExchange:
    """Every pair of ranks exchanges the same number of places, full or empty, so there are no split sizes."""

    num_places: int
    group: ProcessGroup
    label: Tensor | None = None
    check: str = ""
    overlap: bool = True

    @counted("exchange.fixed")
    def start(self, departure: Departure) -> InFlight:
        return departure.start(None, self.num_places, self.label, self.check, self.overlap)

    def inverse(self, rows_AD: Tensor) -> Tensor:
        return exchange_rows(rows_AD, None, self.group, self.num_places, self.label, self.check, returning=True)


class CapacityDispatcher(nn.Module):
    """Plans with a fixed capacity, on one device or across ranks. A module, so that it can report metrics."""

    metrics_of_parent = True  # reported as the MoE layer's
    dropped_rows: Tensor
    needed_thousandths: Tensor
    witness: Tensor

    def __init__(self, config: MoEConfig, ranks: ExpertRanks | None = None) -> None:
        super().__init__()
        self.config, self.ranks = config, ranks
        self.factor = config.capacity_factor
        self.overlap = True  # False if a graph break falls between the start of an exchange and its end
        self._label_of_check: dict[str, Tensor] = {}
        if ranks is not None:
            texts = {"rows": ranks.layer, "splits": _SAME_NUMBER.format(ranks.layer)}
            self._label_of_check = {check: as_label(text) for check, text in texts.items()}
        for name in (
            "dropped_rows",  # since metrics were last read
            "needed_thousandths",  # the factor, times 1000, at which no row of this step would have been dropped
            "witness",  # never written: identifies this module to `accumulate_once`
        ):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64), persistent=False)

    def init_buffers(self) -> None:
        for buffer in self.buffers(recurse=False):
            buffer.zero_()

    def across(self, ranks: ExpertRanks) -> CapacityDispatcher:
        return CapacityDispatcher(self.config, ranks).to(self.dropped_rows.device).train(self.training)

    def plan(self, routing: Routing, num_tokens_P: list[int] | None = None) -> SentinelPlan:
        """num_tokens_P: the number of tokens of each rank, if they may differ: the largest sets the capacity."""
        (T, K), E, ranks = routing.expert_TK.shape, routing.count_E.shape[0], self.ranks
        most_tokens = self._most_tokens(T, num_tokens_P)
        C = capacity(most_tokens, K, E, self.factor, self.config.row_multiple)
        if self.training:
            self._note(routing.count_E, C, most_tokens * K)
        if ranks is not None and ranks.parts_per_expert > 1:
            parts = ranks.parts_per_expert
            routing, K, E = route_to_parts(routing, ranks.group.size() // parts, parts), K * parts, E * parts
        slot_A = self._slots(routing, C)
        places: dict[str, Any] = {
            "token_S": slot_A // K,
            "weight_S": with_zero(routing.weight_TK.flatten()).index_select(0, slot_A),
            "num_tokens": T + 1,
            "weigh_before": self.config.score_before_experts,
        }
        inner: LocalPlan | ExchangePlan
        if ranks is None:
            inner = LocalPlan(**places, counts=fixed_counts(routing, E, C))
        else:
            P, check = ranks.group.size(), self._check(num_tokens_P is None)
            exchange = FixedExchange(E * C, ranks.group, self._label_of_check.get(check), check, self.overlap)
            route = Route(fixed_counts(routing, E // P, P * C), exchange, UniformPermutation(P, E // P))
            inner = ExchangePlan(**places, group=ranks.group, route=route)
        return SentinelPlan(inner, "plan.capacity", max(0, E * C - T * K))

    def _slots(self, routing: Routing, C: int) -> Tensor:
        """(A,): the row in each place, as a slot of (T, K); S in empty places."""
        expert_S = routing.expert_TK.flatten()
        if self.config.overflow == "drop_lowest_weight":
            by_weight_S = torch.argsort(routing.weight_TK.detach().flatten(), descending=True, stable=True)
            order_S = torch.argsort(expert_S.index_select(0, by_weight_S), stable=True)
            slot_S = by_weight_S.index_select(0, order_S)
        else:
            slot_S = torch.argsort(expert_S, stable=True)
        S, count_E1 = slot_S.shape[0], routing.count_E.unsqueeze(1)
        place_1C = torch.arange(C, device=slot_S.device).unsqueeze(0)
        row_EC = torch.where(place_1C < count_E1, starts_of(routing.count_E).unsqueeze(1) + place_1C, S)
        return torch.cat([slot_S, slot_S.new_full((1,), S)]).index_select(0, row_EC.flatten())

    def _most_tokens(self, num_tokens: int, num_tokens_P: list[int] | None) -> int:
        if num_tokens_P is not None:
            return max(num_tokens_P)
        if self.ranks is not None and not self.ranks.same_num_tokens:
            raise ValueError(
                f"{self.ranks.layer}: dispatcher 'capacity' has to know how many tokens each rank has, as all make the"
                " same number of places: pass num_tokens_P to plan, or choose dispatcher 'local'"
            )
        return num_tokens

    def _check(self, is_assumed: bool) -> str:
        return "rows" if self.config.check_exchange else "splits" if is_assumed else ""

    def _note(self, count_E: Tensor, C: int, num_rows: int) -> None:
        """num_rows: of the rank with the most tokens, which the factor is relative to on every rank."""
        dropped = (count_E - C).clamp_min(0).sum()
        accumulate_once(self.dropped_rows, dropped, self.witness, torch.is_grad_enabled())
        num_rows = max(1, num_rows)
        raise_to(self.needed_thousandths, (count_E.max() * (1000 * count_E.shape[0]) + num_rows - 1) // num_rows)

    def metrics(self) -> dict[str, Metric]:
        needed = self.needed_thousandths / 1000
        return {
            "capacity/dropped_rows": Metric(self.dropped_rows, "sum"),
            "capacity/needed_factor": Metric(needed, "max"),
            "capacity/factor": Metric(torch.full_like(needed, self.factor), "same"),
        }

    def reset_metrics(self) -> None:
        self.needed_thousandths.zero_()

    def apply_metrics(self, own: Mapping[str, float], may_grow: bool = True) -> None:
        """Reset the counters, and grow if configured: `own` is reduced over ranks, so that all grow alike."""
        self.dropped_rows.zero_()
        if may_grow and self.config.overflow == "grow" and own["needed_factor"] > self.factor:
            self.factor = grown(own["needed_factor"], self.config)


def capacity(num_tokens: int, top_k: int, num_experts: int, factor: float, multiple: int = 1) -> int:
    """Places per expert for the rows of one rank: `factor` times an even share, at most one for each token."""
    thousandths = math.ceil(round(factor * 1000, 6))  # integer arithmetic, so that a traced size stays an integer
    places = -(-num_tokens * top_k * thousandths // (1000 * num_experts))
    return round_up(min(places, num_tokens), multiple)


def grown(needed: float, config: MoEConfig) -> float:
    """The next capacity factor: the needed one plus a tenth, in steps of an eighth; E / K is always enough."""
    return min(math.ceil(8 * SPARE * needed) / 8, config.num_experts / config.top_k)


def fixed_counts(routing: Routing, num_experts: int, places: int) -> RowCounts:
    """Row counts with the same number of places for each expert, known on device and host without a copy."""
    count_e = routing.count_E.new_full((num_experts,), places)
    host_count_e = torch.full((num_experts,), places)
    if torch.compiler.is_compiling():
        return RowCounts(count_e, host_count_e=host_count_e)
    return RowCounts(count_e, [places] * num_experts, (places, places), host_count_e)


def capacity_dispatchers(model: nn.Module) -> dict[str, CapacityDispatcher]:
    """All capacity dispatchers of the model, by the name of their MoE layer."""
    found = ((path, module) for path, module in model.named_modules() if isinstance(module, CapacityDispatcher))
    return {path.rpartition(".")[0]: module for path, module in found}


def apply_capacity_metrics(model: nn.Module, record: Mapping[str, Any], may_grow: bool = True) -> None:
    """Pass dispatchers their metrics as read on the host: `record["capacity"]`, in the format of `comm/metrics.py`.

    Only here does `overflow grow` take effect, as the host has the numbers of all ranks anyway.
    """
    by_layer = record.get("capacity", {})
    for layer, dispatcher in capacity_dispatchers(model).items():
        dispatcher.apply_metrics(by_layer[layer] if layer else by_layer, may_grow)


def capacity_factors(model: nn.Module, pipeline: ProcessGroup | None = None) -> dict[str, float]:
    """The capacity factors of layers that may grow, for a checkpoint.

    `pipeline`: the ranks that hold the stages of the model. All of them call this together and get the factors of all.
    """
    found = capacity_dispatchers(model).items()
    own = {layer: dispatcher.factor for layer, dispatcher in found if dispatcher.config.overflow == "grow"}
    return own if pipeline is None else join_records(own, {}, pipeline)


def restore_capacity_factors(model: nn.Module, factors: object) -> None:
    """Restore the factors from a checkpoint, also of an earlier step; other layers get those of their config."""
    for layer, dispatcher in capacity_dispatchers(model).items():
        config = dispatcher.config
        factor = factors.get(layer) if isinstance(factors, dict) else None
        stored = factor if config.overflow == "grow" and isinstance(factor, int | float) else 0.0
        dispatcher.factor = max(config.capacity_factor, min(stored, config.num_experts / config.top_k))


_SAME_NUMBER = (
    "{}: dispatcher 'capacity' assumes that every rank has the same number of tokens, but they differ (pass"
    " same_num_tokens=False to parallelize_moe, and the tokens of each rank to plan)"
)
