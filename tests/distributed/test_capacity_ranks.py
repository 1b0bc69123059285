"""Fixed capacity across ranks: against the reference with the same rows dropped, and against the uneven plan."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.comm.metrics import collect_metrics, reduce_metrics
from spurline.moe.dispatch.capacity import apply_capacity_metrics, capacity
from spurline.moe.reference import reference_choice, reference_moe, reference_scores
from spurline.testing import RankPool
from spurline.testing.equivalence import relative_error

CONFIG = MoEConfig(
    dim=8,
    hidden_dim=12,
    num_experts=8,
    top_k=2,
    num_shared_experts=1,
    dispatcher="capacity",
    capacity_factor=0.75,
    check_exchange=True,
)


def make_layer(config: MoEConfig) -> MoE:
    torch.manual_seed(0)
    moe = MoE(config, init_std=0.4)
    moe.router.expert_bias_E.uniform_(-0.1, 0.1)
    return moe


def make_input(length: int, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's tokens (1, L, D), and what its output is multiplied with to make a loss."""
    x, direction = torch.randn(2, 1, length, CONFIG.dim, generator=torch.Generator().manual_seed(rank))
    return x, direction


def run_layers(rank: int, cases: list[tuple[MoEConfig, tuple[int, ...], int]]) -> list[dict[str, Any]]:
    """Forward and backward of each case: (config, shape of the mesh, tokens of each rank)."""
    found = []
    for config, shape, length in cases:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ep", "etp")[: len(shape)])
        moe = parallelize_moe(make_layer(config), mesh, layer="layers.1.moe")
        x, direction = make_input(length, rank)
        x.requires_grad_()
        y = moe(x)
        (y * direction).sum().backward()
        gradients = {name: p.grad for name, p in moe.named_parameters()}
        record = reduce_metrics(collect_metrics(moe), dist.group.WORLD).read()["capacity"] if length else {}
        found.append(
            {
                "y": y.detach(),
                "x": x.grad,
                "gradients": {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()},
                "metrics": record,
            }
        )
    return found


def expected_results(config: MoEConfig, world: int, length: int) -> dict[str, Any]:
    """What plain loops make of all ranks' tokens; each rank drops among its own."""
    moe = make_layer(config)
    tensors = dict(moe.named_parameters()) | dict(moe.named_buffers())
    places = capacity(length, config.top_k, config.num_experts, config.capacity_factor)
    xs, ys, loss, num_dropped = [], [], torch.zeros(()), 0
    for rank in range(world):
        x, direction = make_input(length, rank)
        x.requires_grad_()
        score_TE = reference_scores(x[0], tensors, config)[1].detach()
        queues: dict[int, list[tuple[float, int]]] = {}
        for t in range(length):
            for e in reference_choice(score_TE[t], t, tensors["router.expert_bias_E"], config):
                queues.setdefault(e, []).append((-score_TE[t, e].item(), t))
        dropped = set()
        for e, queue in queues.items():
            in_order = sorted(queue) if config.overflow == "drop_lowest_weight" else queue
            dropped |= {(t, e) for _, t in in_order[places:]}
        num_dropped += len(dropped)
        y = reference_moe(x[0], tensors, config, dropped)[None]
        loss = loss + (y * direction).sum()
        xs.append(x)
        ys.append(y.detach())
    loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in moe.named_parameters()}
    return {"x": [x.grad for x in xs], "y": ys, "gradients": gradients, "dropped": num_dropped}


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_drop_equal_the_reference_that_drops(ranks: RankPool, world: int) -> None:
    variants: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({}, (world,)),
        ({"overflow": "drop_lowest_weight", "score_before_experts": True}, (world,)),
        ({"experts_backend": "bmm", "num_shared_experts": 0, "check_exchange": False}, (world,)),
        ({"overflow": "drop_lowest_weight", "experts_backend": "loop"}, (world // 2, 2)),  # experts cut in two
        ({"capacity_factor": 8.0, "row_multiple": 16}, (world,)),  # room for all
    ]
    cases = [(dataclasses.replace(CONFIG, **changes), shape, 11) for changes, shape in variants]
    by_rank = ranks.run(run_layers, world, cases, timeout=120)
    for number, (config, _, length) in enumerate(cases):
        expected = expected_results(config, world, length)
        assert (expected["dropped"] > 0) == (config.capacity_factor < 1)
        for rank, results in enumerate(by_rank):
            result = results[number]
            errors = {
                "y": relative_error(result["y"], expected["y"][rank]),
                "x": relative_error(result["x"], expected["x"][rank]),
                **{n: relative_error(g, expected["gradients"][n]) for n, g in result["gradients"].items()},
            }
            assert max(errors.values()) < 1e-5, (rank, config, errors)
            assert result["metrics"]["dropped_rows"] == expected["dropped"], config


def run_uneven_sequence(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ranks that share a sequence of 5 positions: some have fewer tokens than others, or none."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    config = dataclasses.replace(CONFIG, capacity_factor=8.0)
    x, direction = make_input(5, 0)
    results = []
    for dispatcher in ("capacity", "local"):
        moe = parallelize_moe(make_layer(dataclasses.replace(config, dispatcher=dispatcher)), mesh, sequence=mesh)
        y = moe(x)
        (y * direction).sum().backward()
        results.append((y.detach(), moe.experts.w1_EFD.grad.to_local(), moe.router.gate_ED.grad))
    return tuple(relative_error(*pair) for pair in zip(*results, strict=True))  # type: ignore[return-value]


def test_ranks_with_other_numbers_of_tokens_make_the_places_of_the_most(ranks: RankPool) -> None:
    for errors in ranks.run(run_uneven_sequence, 4):
        assert max(errors) < 1e-6


def run_growth(rank: int) -> list[tuple[float, float]]:
    """The factor and the rows that are dropped, at one reading after the other."""
    mesh = init_device_mesh("cpu", (2,))
    moe = parallelize_moe(make_layer(dataclasses.replace(CONFIG, overflow="grow")), mesh)
    found = []
    for _ in range(2):
        moe(make_input(11, rank)[0]).sum().backward()
        record = reduce_metrics(collect_metrics(moe), dist.group.WORLD).read()
        apply_capacity_metrics(moe, record)
        found.append((record["capacity"]["factor"], record["capacity"]["dropped_rows"]))
    return found


def test_all_ranks_grow_by_what_the_fullest_needed(ranks: RankPool) -> None:
    first, second = ranks.run(run_growth, 2)
    assert first == second
    (before, dropped), (after, dropped_after) = first
    assert dropped > 0 == dropped_after
    assert after > before == 0.75


def run_unlike(rank: int, same_num_tokens: bool) -> str:
    mesh = init_device_mesh("cpu", (2,))
    config = dataclasses.replace(CONFIG, check_exchange=False)
    moe = parallelize_moe(make_layer(config), mesh, layer="layers.1.moe", same_num_tokens=same_num_tokens)
    try:
        moe(torch.randn(40 + 40 * rank, CONFIG.dim))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_ranks_that_disagree_on_the_number_of_tokens_are_told_so(ranks: RankPool) -> None:
    for message in ranks.run(run_unlike, 2, True):
        assert "layers.1.moe: dispatcher 'capacity' assumes that every rank has the same number of tokens" in message
    for message in ranks.run(run_unlike, 2, False):
        assert "layers.1.moe: dispatcher 'capacity' has to know how many tokens each rank has" in message


def run_twenty_steps(rank: int) -> tuple[int, int, float]:
    """How many graphs were compiled, how many routings there were, and the worst difference from eager."""
    mesh = init_device_mesh("cpu", (2,))
    moe = parallelize_moe(make_layer(dataclasses.replace(CONFIG, check_exchange=False)), mesh)
    torch._dynamo.utils.counters.clear()
    run, loads, errors = torch.compile(moe, fullgraph=True, backend="aot_eager"), set(), []
    for step in range(20):
        x = make_input(11, 2 * step + rank)[0].requires_grad_()
        y = run(x)
        y.sum().backward()
        loads.add(tuple(moe.router.row_count_E.tolist()))
        moe.router.row_count_E.zero_()
        errors.append(relative_error(y.detach(), moe(x).detach()))
        moe.router.row_count_E.zero_()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], len(loads), max(errors)


def test_twenty_steps_of_changing_routing_are_one_graph_on_ranks(ranks: RankPool) -> None:
    for num_graphs, num_loads, error in ranks.run(run_twenty_steps, 2, timeout=120):
        assert num_graphs == 1
        assert num_loads == 20
        assert error < 1e-6
