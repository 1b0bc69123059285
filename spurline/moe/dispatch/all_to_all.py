"""Dispatch across ranks: every expert lives on one rank of a group, and rows travel to it and back.

P ranks, E experts of which e live on each rank, T tokens on this rank, K experts per token, S = T*K rows that leave
this rank, R rows that reach it. Expert number i lives on rank i // e.

With expert tensor parallelism, the hidden width of an expert is split into parts that live on different ranks. A part
is treated as an expert here: it gets the rows of its expert, and the outputs of the parts add up to the expert's.

The exchange and the permutation of a plan are chosen here, from numbers that every rank of the group knows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from spurline.accelerator import HostCopy, acts_as_accelerator
from spurline.comm.collectives import all_gather_counts
from spurline.comm.conservation import as_label
from spurline.comm.exchange import Departure, InFlight, depart
from spurline.moe.config import MoEConfig
from spurline.moe.dispatch.aligned import AlignedPermutation, align_counts
from spurline.moe.dispatch.combine import combine_rows
from spurline.moe.dispatch.exchange import EqualSplitExchange, Exchange, PaddedInFlight, UnevenExchange
from spurline.moe.dispatch.permute import Permutation, SegmentPermutation, UniformPermutation
from spurline.moe.dispatch.traffic import Traffic, counts_of_parts, forced_counts, forced_order, traffic_numbers
from spurline.moe.routing import Routing
from spurline.moe.rows import RowCounts, Rows
from spurline.moe.telemetry import counted
from spurline.ops.rows import gather_rows
from spurline.ops.weighted_rows import gather_weighted_rows, split_weighted_rows

MOST_FORCED_ROUTES = 8
"""Batch shapes whose forced-balance routes are cached."""


@dataclass(frozen=True)
class Route:
    """How many rows go where, and how; cached across steps under forced balance."""

    counts: RowCounts
    exchange: Exchange
    permutation: Permutation


class PendingRoute:
    """A route that is chosen as soon as its numbers have reached the host."""

    def __init__(self, count_e: Tensor, choose: Callable[[], Route]) -> None:
        self.counts = RowCounts(count_e)
        self._choose = choose
        self._route: Route | None = None

    def get(self) -> Route:
        """Waits for the numbers, once."""
        if self._route is None:
            self._route = self._choose()
        return self._route


@dataclass(frozen=True)
class ExchangePlan:
    """Rows are gathered from their tokens, sent to the ranks of their experts, and sorted by expert there.

    Weights that apply after the experts are sent with their rows: experts apply them to their hidden state, so the
    experts' output need not be saved for the gradient of the weights.
    """

    token_S: Tensor
    weight_S: Tensor
    num_tokens: int
    weigh_before: bool
    group: ProcessGroup
    route: Route | PendingRoute
    packs: bool = False
    """Whether rows are sent to their experts as float8."""

    def dispatch(self, x_TD: Tensor) -> Rows:
        """Start the exchange; experts wait for the rows when they need them.

        On an accelerator it starts only when experts need the rows: the host does not know the split sizes before, and
        queues other work until it has to wait for them.
        """
        if self.weigh_before:
            rows = Rows(gather_rows(x_TD, self.token_S), self.route.counts, None, self.weight_S, True)
            rows_SX = rows.weigh(rows.x)
        else:
            rows_SX = gather_weighted_rows(x_TD, self.token_S, self.weight_S)
        is_pending, width = isinstance(self.route, PendingRoute), x_TD.shape[1]
        departure = depart(rows_SX, self.group, beside=is_pending, packed_width=width if self.packs else 0)
        if is_pending:
            return Rows(rows_SX, self.route.counts, start=partial(self._start, departure, width))
        return self._start(departure, width)

    def _start(self, departure: Departure, width: int) -> Rows:
        route = self._known_route()
        weight_dtype = None if self.weigh_before else self.weight_S.dtype
        arrival = PermutedArrival(route.exchange.start(departure), route.permutation, width, weight_dtype)
        return Rows(departure.rows_SD, route.counts, arrival=arrival)

    def combine(self, rows: Rows) -> Tensor:
        route = self._known_route()
        # Experts that could not apply the weights themselves leave it to us, before the rows are sent back.
        y_RD = rows.x if rows.weight_S is None else rows.weigh(rows.x)
        rows_SD = route.exchange.inverse(route.permutation.inverse(y_RD))
        return combine_rows(replace(rows, weight_S=None), rows_SD, self.token_S, self.num_tokens)

    def _known_route(self) -> Route:
        return self.route.get() if isinstance(self.route, PendingRoute) else self.route


@dataclass(frozen=True)
class PermutedArrival:
    """Rows in flight, to be sorted by expert when they arrive."""

    arrival: InFlight | PaddedInFlight
    permutation: Permutation
    width: int
    weight_dtype: torch.dtype | None
    """The dtype of the weights that rows carry, if they carry any."""

    def wait(self) -> Tensor | tuple[Tensor, Tensor]:
        arrived_RX = self.arrival.wait()
        if self.weight_dtype is None:
            return self.permutation.forward(arrived_RX)
        rows_RD, weight_R = split_weighted_rows(arrived_RX, self.width, self.weight_dtype)
        return self.permutation.forward(rows_RD), self.permutation.forward(weight_R.unsqueeze(1)).squeeze(1)


class AllToAllDispatcher:
    """Plans for one MoE layer whose experts are sharded over `group`."""

    def __init__(
        self,
        config: MoEConfig,
        group: ProcessGroup,
        layer: str = "moe",
        *,
        parts_per_expert: int = 1,
        same_num_tokens: bool = True,
    ) -> None:
        """The ranks of group hold experts in order; with parts, the ranks of one expert's parts are neighbors.

        same_num_tokens: whether every rank has the same number of tokens, unless `plan` gets num_tokens_P.
        """
        self.config = config
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.parts_per_expert = parts_per_expert
        self.same_num_tokens = same_num_tokens
        self.layer = layer
        self._label_of_check = {"rows": as_label(layer), "splits": as_label(_FORCED_BALANCE.format(layer))}
        self.overlap = True  # False if a graph break falls between the start of an exchange and its end
        self._forced_routes: dict[tuple[object, ...], tuple[Tensor, Route]] = {}

    def plan(self, routing: Routing, num_tokens_P: list[int] | None = None) -> ExchangePlan:
        """num_tokens_P: the number of tokens of each rank, if they may differ; forced balance relies on it."""
        if self.parts_per_expert > 1:
            routing = route_to_parts(routing, self.size // self.parts_per_expert, self.parts_per_expert)
        T, K = routing.expert_TK.shape
        is_forced = self.config.force_load_balance and (self.same_num_tokens or num_tokens_P is not None)
        slot_S, route = self._forced_route(routing, num_tokens_P) if is_forced else self._route(routing)
        return ExchangePlan(
            token_S=slot_S // K,
            weight_S=routing.weight_TK.flatten().index_select(0, slot_S),
            num_tokens=T,
            weigh_before=self.config.score_before_experts,
            group=self.group,
            route=route,
            packs=self.config.exchange_dtype == "float8",
        )

    def _route(self, routing: Routing) -> tuple[Tensor, Route | PendingRoute]:
        """All-gather the counts (a few kilobytes), so that every rank makes the same decisions.

        On an accelerator, their sums are still being copied to the host when this returns.
        """
        slot_S = torch.argsort(routing.expert_TK.flatten(), stable=True)
        num_sent, count_PE = slot_S.shape[0], all_gather_counts(routing.count_E, self.group)
        if torch.compiler.is_compiling() or not acts_as_accelerator(count_PE.device):
            traffic = Traffic.of_counts(count_PE, self.rank)
            return slot_S, self._choose(num_sent, count_PE, traffic, self._check())
        numbers, count_e = traffic_numbers(count_PE, self.rank)
        host_copy = HostCopy(numbers)

        def choose() -> Route:
            traffic = Traffic.of_numbers(host_copy, count_e, self.size)
            return self._choose(num_sent, count_PE, traffic, self._check())

        return slot_S, PendingRoute(count_e, choose)

    @counted("plan.forced_balance")
    def _forced_route(self, routing: Routing, num_tokens_P: list[int] | None) -> tuple[Tensor, Route]:
        """With forced balance all numbers follow from the token counts: no communication, no device-to-host read."""
        T = routing.expert_TK.shape[0]
        num_tokens = num_tokens_P or [T] * self.size
        if num_tokens[self.rank] != T:
            raise ValueError(f"{self.layer}: rank {self.rank} has {T} tokens, not {num_tokens[self.rank]} as expected")
        if torch.compiler.is_compiling():
            return self._make_forced_route(routing, num_tokens, num_tokens_P is None)
        key = (*num_tokens, routing.count_E.device)
        if key not in self._forced_routes:
            if len(self._forced_routes) >= MOST_FORCED_ROUTES:
                self._forced_routes.clear()
            with torch.inference_mode(False):  # training may use it next, which can't save inference tensors
                self._forced_routes[key] = self._make_forced_route(routing, num_tokens, num_tokens_P is None)
        return self._forced_routes[key]

    def _make_forced_route(self, routing: Routing, num_tokens_P: list[int], is_assumed: bool) -> tuple[Tensor, Route]:
        parts, K = self.parts_per_expert, routing.expert_TK.shape[1] // self.parts_per_expert
        num_rows_P = [num_tokens * K for num_tokens in num_tokens_P]
        distinct = num_rows_P[:1] if is_assumed else num_rows_P
        count_PE = forced_counts(distinct, self.config.num_experts, routing.count_E.device).expand(self.size, -1)
        if parts > 1:
            count_PE = counts_of_parts(count_PE, self.size // parts, parts)
            slot_S = torch.argsort(routing.expert_TK.flatten(), stable=True)
        else:
            slot_S = forced_order(routing.count_E, routing.expert_TK.numel())
        e = count_PE.shape[1] // self.size
        count_e = count_PE[:, self.rank * e : (self.rank + 1) * e].sum(0)
        traffic = Traffic.forced(num_rows_P, count_e, self.config.num_experts, self.rank, parts)
        return slot_S, self._choose(slot_S.shape[0], count_PE, traffic, self._check(is_assumed))

    def _check(self, is_assumed: bool = False) -> str:
        """What ranks compare in each exchange: splits, if they rest on an assumption and a mismatch would abort."""
        return "rows" if self.config.check_exchange else "splits" if is_assumed else ""

    def _choose(self, num_sent: int, count_PE: Tensor, traffic: Traffic, check: str) -> Route:
        """Choose from numbers that are the same on every rank, or the exchange would hang."""
        e = count_PE.shape[1] // self.size
        count_Pe = count_PE[:, self.rank * e : (self.rank + 1) * e]
        counts = RowCounts(traffic.count_e, traffic.known_count_e, traffic.expert_range, traffic.host_count_e)
        exchange = self._choose_exchange(traffic, count_PE, num_sent, check)
        permutation, multiple = self._choose_permutation(traffic, count_Pe), self.config.row_multiple
        if multiple == 1:
            return Route(counts, exchange, permutation)
        places, num_places = align_counts(counts, multiple)
        if not isinstance(permutation, UniformPermutation):  # which needs no padding
            permutation = AlignedPermutation.around(permutation, counts, places, num_places)
        return Route(places, exchange, permutation)

    def _choose_exchange(self, traffic: Traffic, count_PE: Tensor, num_sent: int, check: str) -> Exchange:
        label = self._label_of_check.get(check)
        if not self._splits_equally(traffic):
            how = label, check, self.overlap
            return UnevenExchange(traffic.splits_2P, num_sent, traffic.num_received, self.group, *how)
        split_PP = count_PE.unflatten(1, (self.size, -1)).sum(-1)
        return EqualSplitExchange.make(
            traffic.largest_split,
            split_PP[self.rank],
            split_PP[:, self.rank],
            num_sent,
            traffic.num_received,
            self.group,
            label,
            check,
            self.overlap,
        )

    def _splits_equally(self, traffic: Traffic) -> bool:
        mode = self.config.equal_split
        if mode != "adaptive":
            return mode == "forced"
        if traffic.num_rows is None:  # tracing: a graph can't branch on numbers that are not known yet
            _say_that_adaptive_is_off()
            return False
        num_padding = traffic.largest_split * self.size**2 - traffic.num_rows
        return num_padding <= self.config.equal_split_threshold * traffic.num_rows

    def _choose_permutation(self, traffic: Traffic, count_Pe: Tensor) -> Permutation:
        if traffic.segment_range is not None and traffic.segment_range[0] == traffic.segment_range[1] > 0:
            rows_of_expert = self.size * traffic.segment_range[0]
            if rows_of_expert % self.config.row_multiple == 0:  # nothing to pad
                return UniformPermutation(self.size, count_Pe.shape[1])
        return SegmentPermutation.make(count_Pe, traffic.num_received)


_FORCED_BALANCE = (
    "{}: force_load_balance assumes that every rank has the same number of tokens, but they differ (pass"
    " same_num_tokens=False to parallelize_moe)"
)
_said: set[str] = set()


@torch.compiler.assume_constant_result
def _say_that_adaptive_is_off() -> bool:
    """Warn once, while a graph is traced."""
    if "adaptive" not in _said:
        _said.add("adaptive")
        warnings.warn(
            "moe.equal_split 'adaptive' chooses by row counts, which a compiled block does not know when it is traced:"
            " compiled blocks exchange rows unpadded. Use 'forced' to pad them",
            stacklevel=2,
        )
    return True


def route_to_parts(routing: Routing, num_owners: int, parts: int) -> Routing:
    """The routing of rows to the parts of their experts: K * parts per token, E * parts experts."""
    e = routing.count_E.shape[0] // num_owners
    part_p = torch.arange(parts, device=routing.expert_TK.device)
    expert_TK1 = routing.expert_TK.unsqueeze(-1)
    expert_TKp = (expert_TK1 // e * parts + part_p) * e + expert_TK1 % e
    return Routing(
        expert_TK=expert_TKp.flatten(1),
        weight_TK=routing.weight_TK.repeat_interleave(parts, dim=1),
        count_E=counts_of_parts(routing.count_E[None], num_owners, parts)[0],
    )
