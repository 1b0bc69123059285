"""Fixed capacity on one device: the arithmetic, and a layer against the reference with the same rows dropped."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spurline import MoE, MoEConfig
from spurline.comm.metrics import collect_metrics, reduce_metrics
from spurline.moe import telemetry
from spurline.moe.dispatch.capacity import (
    CapacityDispatcher,
    apply_capacity_metrics,
    capacity,
    capacity_factors,
    grown,
    restore_capacity_factors,
)
from spurline.moe.dispatch.plan import ExpertRanks
from spurline.moe.reference import reference_choice, reference_moe, reference_scores
from spurline.moe.router import count_rows
from spurline.moe.routing import Routing
from spurline.testing.equivalence import errors_between, layer_results, reference_results, relative_error

CONFIG = MoEConfig(dim=8, hidden_dim=12, num_experts=6, top_k=2, num_shared_experts=1, dispatcher="capacity")
TIGHT = dataclasses.replace(CONFIG, capacity_factor=0.75)
POLICIES = ["drop_last", "drop_lowest_weight"]


def make_layer(config: MoEConfig) -> MoE:
    torch.manual_seed(0)
    moe = MoE(config, init_std=0.4)
    moe.router.expert_bias_E.uniform_(-0.2, 0.2)
    return moe


@given(st.integers(0, 500), st.integers(1, 4), st.integers(4, 9), st.sampled_from([0.5, 1, 1.25, 2, 9]))
def test_places_of_an_expert(tokens: int, top_k: int, experts: int, factor: float) -> None:
    places = capacity(tokens, top_k, experts, factor)
    assert places == min(math.ceil(tokens * top_k / experts * factor), tokens)
    for multiple in (1, 8, 32):
        aligned = capacity(tokens, top_k, experts, factor, multiple)
        assert aligned % multiple == 0
        assert 0 <= aligned - places < multiple


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "factor", "multiple", "expected"),
    [
        (0, 2, 4, 1.25, 8, 0),  # no rows: no places
        (64, 1, 64, 1.0, 1, 1),
        (64, 2, 8, 1.0, 16, 16),  # exactly at the multiple
        (64, 2, 8, 1.0, 1, 16),
        (10, 2, 4, 100.0, 1, 10),  # a token visits an expert once: more than T places are never filled
    ],
)
def test_the_edges_of_capacity(
    tokens: int, top_k: int, experts: int, factor: float, multiple: int, expected: int
) -> None:
    assert capacity(tokens, top_k, experts, factor, multiple) == expected


def kept_rows(expert_TK: list[list[int]], weight_TK: list[list[float]], places: int, policy: str) -> list[list[int]]:
    """Plain re-derivation: for each expert the slots that have a place, in the order of places."""
    K = len(expert_TK[0]) if expert_TK else 1
    slots = [(expert, t * K + k) for t, row in enumerate(expert_TK) for k, expert in enumerate(row)]
    weights = [weight for row in weight_TK for weight in row]
    kept = []
    for expert in range(6):
        queue = [slot for other, slot in slots if other == expert]
        if policy == "drop_lowest_weight":
            queue.sort(key=lambda slot: (-weights[slot], slot))
        kept.append(queue[:places])
    return kept


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[list[int]], list[list[float]]]:
    T, K = draw(st.integers(0, 9)), draw(st.integers(1, 3))
    one = st.lists(st.integers(0, 5), min_size=K, max_size=K, unique=True)
    weights = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=K, max_size=K)
    return draw(st.lists(one, min_size=T, max_size=T)), draw(st.lists(weights, min_size=T, max_size=T))


@given(routings(), st.sampled_from([0.3, 1.0, 1.25, 6.0]), st.sampled_from(POLICIES), st.sampled_from([1, 4]))
def test_the_places_of_any_routing(
    routing: tuple[list[list[int]], list[list[float]]], factor: float, policy: str, multiple: int
) -> None:
    check_places(*routing, factor, policy, multiple)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_edges_of_a_routing(policy: str) -> None:
    check_places([], [], 1.25, policy, 1)  # all counts are zero
    check_places([[3]] * 9, [[0.1 * t] for t in range(9)], 1.25, policy, 1)  # one expert has everything
    check_places([[e] for e in range(6)], [[1.0]] * 6, 1.0, policy, 1)  # every expert exactly at its capacity


def check_places(
    expert_TK: list[list[int]], weight_TK: list[list[float]], factor: float, policy: str, multiple: int
) -> None:
    K = len(expert_TK[0]) if expert_TK else 2
    experts, weights = torch.tensor(expert_TK, dtype=torch.int64).view(-1, K), torch.tensor(weight_TK).view(-1, K)
    config = dataclasses.replace(CONFIG, top_k=K, capacity_factor=factor, overflow=policy, row_multiple=multiple)
    dispatcher = CapacityDispatcher(config)
    plan = dispatcher.plan(Routing(experts, weights, count_rows(experts, 6)))
    places = capacity(len(expert_TK), K, 6, factor, multiple)
    kept = kept_rows(expert_TK, weight_TK, places, policy)
    S = len(expert_TK) * K
    slots = [slot for queue in kept for slot in (queue + [S] * places)[:places]]
    assert plan.plan.token_S.tolist() == [slot // K for slot in slots]
    flat = [*(weight for row in weight_TK for weight in row), 0.0]
    assert plan.plan.weight_S.tolist() == pytest.approx([flat[slot] for slot in slots])
    assert plan.plan.counts.host_e == plan.plan.counts.count_e.tolist() == [places] * 6
    assert dispatcher.dropped_rows.item() == S - sum(map(len, kept))


def reference_with_drops(moe: MoE, x: Tensor, places: int) -> tuple[dict[str, Tensor], set[tuple[int, int]]]:
    """Output and gradients of the reference without the rows that have no place, and which those are."""
    x = x.detach().requires_grad_()
    tensors = dict(moe.named_parameters()) | dict(moe.named_buffers())
    score_TE = reference_scores(x, tensors, moe.config)[1].detach()
    bias_E = tensors["router.expert_bias_E"]
    expert_TK = [reference_choice(score_TE[t], t, bias_E, moe.config) for t in range(len(x))]
    weight_TK = [[score_TE[t, e].item() for e in row] for t, row in enumerate(expert_TK)]
    K = moe.config.top_k
    kept = {slot for queue in kept_rows(expert_TK, weight_TK, places, moe.config.overflow) for slot in queue}
    dropped = {(t, e) for t, row in enumerate(expert_TK) for k, e in enumerate(row) if t * K + k not in kept}
    y = reference_moe(x, tensors, moe.config, dropped)
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel()))
    inputs = [x, *moe.parameters()]
    gradients = torch.autograd.grad((y * direction).sum(), inputs, allow_unused=True)
    names = ["x", *(name for name, _ in moe.named_parameters())]
    zeros = [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, gradients, strict=True)]
    return {"y": y.detach()} | dict(zip(names, zeros, strict=True)), dropped


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", ["stream", "loop", "bmm"])
@pytest.mark.parametrize("before", [False, True])
def test_a_layer_that_drops_equals_the_reference_that_drops(policy: str, backend: str, before: bool) -> None:
    config = dataclasses.replace(TIGHT, overflow=policy, experts_backend=backend, score_before_experts=before)
    moe, x = make_layer(config), torch.randn(13, 8)
    expected, dropped = reference_with_drops(moe, x, capacity(13, 2, 6, 0.75))
    assert len(dropped) > 3
    results = layer_results(moe, x)
    errors = errors_between(results, expected)
    assert max(errors.values()) < 1e-5, errors
    assert moe.dispatcher.dropped_rows.item() == len(dropped)


def test_the_two_policies_drop_other_rows() -> None:
    layers = [make_layer(dataclasses.replace(TIGHT, overflow=policy)) for policy in POLICIES]
    x = torch.randn(13, 8)
    by_position, by_weight = (reference_with_drops(moe, x, capacity(13, 2, 6, 0.75))[1] for moe in layers)
    assert len(by_position) == len(by_weight)
    assert by_position != by_weight


def test_a_token_whose_rows_are_all_dropped_gets_nothing_and_no_gradient() -> None:
    moe = make_layer(dataclasses.replace(TIGHT, num_shared_experts=0, top_k=1, capacity_factor=0.1))
    moe.router.expert_bias_E.zero_()[2] = 9.0  # all tokens want expert 2, which has one place
    x = torch.randn(12, 8, requires_grad=True)
    y = moe(x)
    assert y[0].norm() > 0
    assert (y[1:] == 0).all()
    y.square().sum().backward()
    assert (x.grad[1:] == 0).all()
    assert moe.dispatcher.dropped_rows.item() == 11


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_without_overflow_the_layer_equals_the_reference_and_the_default_dispatcher(policy: str, tokens: int) -> None:
    moe = make_layer(dataclasses.replace(CONFIG, overflow=policy, capacity_factor=3.0))
    usual, x = make_layer(dataclasses.replace(CONFIG, dispatcher="local")), torch.randn(tokens, 8)
    results = layer_results(moe, x)
    assert max(errors_between(results, reference_results(moe, x)).values()) < 1e-5
    assert max(errors_between(results, layer_results(usual, x)).values()) < 1e-6
    assert moe.dispatcher.dropped_rows.item() == 0


def read_metrics(moe: MoE) -> dict[str, Any]:
    record = reduce_metrics(collect_metrics(moe)).read()
    apply_capacity_metrics(moe, record)
    return record["capacity"]


def test_dropped_rows_are_counted_once_and_only_in_training() -> None:
    moe, x = make_layer(TIGHT), torch.randn(13, 8)
    with torch.no_grad():
        moe.eval()(x)
    moe.train()
    assert read_metrics(moe)["dropped_rows"] == 0
    checkpoint(moe, x.requires_grad_(), use_reentrant=False).sum().backward()
    once = read_metrics(moe)
    assert once["dropped_rows"] > 0
    assert once["factor"] == 0.75
    moe(x).sum().backward()
    moe(x).sum().backward()
    assert read_metrics(moe)["dropped_rows"] == 2 * once["dropped_rows"]
    assert read_metrics(moe)["dropped_rows"] == 0  # a reading starts anew


def test_a_dispatcher_across_ranks_counts_in_the_mode_of_the_layer() -> None:
    for training in (True, False):
        dispatcher = make_layer(TIGHT).train(training).dispatcher.across(ExpertRanks(group=None))
        assert dispatcher.training == training


def test_needed_factor_is_that_of_the_busiest_expert_of_the_step() -> None:
    moe, x = make_layer(TIGHT), torch.randn(13, 8)
    moe(x)
    most = moe.router.row_count_E.max().item()
    assert read_metrics(moe)["needed_factor"] == pytest.approx(most * 6 / 26, abs=1e-3)
    moe.dispatcher.reset_metrics()
    assert read_metrics(moe)["needed_factor"] == 0


def test_needed_factor_of_a_rank_with_few_tokens_is_relative_to_the_most() -> None:
    """Else a rank with a single token, whose experts have no other row, would let `grow` go to its limit at once."""
    moe = make_layer(TIGHT)
    routing = moe.router(torch.randn(1, 8))
    moe.dispatcher.plan(routing, num_tokens_P=[13, 1])
    assert read_metrics(moe)["needed_factor"] == pytest.approx(6 / 26, abs=1e-3)


def test_growth_happens_when_metrics_are_read_and_not_before() -> None:
    moe, x = make_layer(dataclasses.replace(TIGHT, overflow="grow")), torch.randn(13, 8)
    for _ in range(2):
        moe(x)
        assert moe.dispatcher.factor == 0.75
    assert read_metrics(moe)["dropped_rows"] > 0
    assert moe.dispatcher.factor > 0.75
    moe(x)
    assert read_metrics(moe)["dropped_rows"] == 0
    assert max(errors_between(layer_results(moe, x), reference_results(moe, x)).values()) < 1e-5

    resumed = make_layer(moe.config)
    restore_capacity_factors(resumed, capacity_factors(moe))
    assert resumed.dispatcher.factor == moe.dispatcher.factor
    for stored, expected in ((1.5, 1.5), (0.5, 0.75), (1e9, 3.0), ("much", 0.75), (float("nan"), 0.75)):
        restore_capacity_factors(resumed, {"": stored})  # also of an earlier step; E / K is always enough
        assert resumed.dispatcher.factor == expected
    for nonsense in (None, [], {"other": 3.0}):
        resumed.dispatcher.factor = 2.0
        restore_capacity_factors(resumed, nonsense)
        assert resumed.dispatcher.factor == 0.75
    assert capacity_factors(make_layer(TIGHT)) == {}


@given(st.floats(0.01, 40))
def test_growth_is_enough_and_bounded(needed: float) -> None:
    factor = grown(needed, CONFIG)
    assert factor >= min(needed, 3.0)
    assert factor <= max(1.1 * needed + 0.125, 3.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_twenty_steps_of_changing_routing_are_one_graph_with_static_shapes(policy: str) -> None:
    moe = make_layer(dataclasses.replace(TIGHT, overflow=policy, experts_backend="loop", experts="clamped_swiglu"))
    sizes: set[object] = set()

    def look(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        for node in graph.graph.nodes:
            if isinstance(value := node.meta.get("example_value"), Tensor):
                sizes.update(type(size) for size in value.shape)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = torch.compile(moe, fullgraph=True, backend=look)
    loads = set()
    for seed in range(20):
        x = torch.randn(13, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        y = run(x)
        y.sum().backward()
        loads.add(tuple(moe.router.row_count_E.tolist()))
        moe.router.row_count_E.zero_()
        with torch.no_grad():
            assert relative_error(y, moe(x)) < 1e-6
    assert len(loads) == 20
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert sizes == {int}


def test_padding_is_counted() -> None:
    moe = make_layer(CONFIG)
    telemetry.reset()
    telemetry.enable()
    try:
        moe(torch.randn(13, 8))
    finally:
        telemetry.enable(False)
    counted = telemetry.counters()
    assert counted["plan.capacity"] == 1
    assert counted["plan.capacity.padding_rows"] == 6 * capacity(13, 2, 6, 1.25) - 26


def test_weights_keep_their_exact_counters_in_low_precision() -> None:
    moe = MoE(TIGHT, init_std=0.4, dtype=torch.bfloat16)
    moe(torch.randn(13, 8, dtype=torch.bfloat16)).sum().backward()
    assert moe.dispatcher.dropped_rows.dtype == moe.dispatcher.needed_thousandths.dtype == torch.int64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity_factor": 0.0}, "capacity_factor must be positive and finite, got 0.0"),
        ({"capacity_factor": math.inf}, "capacity_factor must be positive and finite, got inf"),
        ({"capacity_factor": math.nan}, "capacity_factor must be positive and finite, got nan"),
        ({"overflow": "explode"}, "overflow must be one of drop_last, drop_lowest_weight, grow, got 'explode'"),
    ],
)
def test_impossible_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoE(dataclasses.replace(CONFIG, **changes))
