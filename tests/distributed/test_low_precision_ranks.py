"""8-bit matmuls of experts on 2 and 4 ranks: those of one process with the tokens of all ranks, in every gradient."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.config import Precision
from spurline.moe.dispatch import deep_ep, hybrid_ep
from spurline.parallel.precision import convert_layers
from spurline.testing import RankPool
from spurline.testing.equivalence import relative_error
from spurline.testing.stand_ins import installed

CONFIG = MoEConfig(dim=32, hidden_dim=48, num_experts=8, top_k=2, num_shared_experts=1, experts_backend="loop")
TOKENS = 70
"""Of a rank: with these, experts have more rows than a block of MXFP8 has."""
WAYS: dict[str, dict[str, Any]] = {
    "uneven": {"check_exchange": True},
    "equal split": {"equal_split": "forced"},
    "aligned": {"row_multiple": 32},
    "grouped_mm": {"experts_backend": "grouped_mm"},
    "capacity": {"dispatcher": "capacity", "capacity_factor": 4.0},
    "deep_ep": {"dispatcher": "deep_ep", "row_multiple": 32},
    "hybrid_ep": {"dispatcher": "hybrid_ep", "row_multiple": 32},
}


def make_layer(config: MoEConfig, recipe: str) -> MoE:
    torch.manual_seed(0)
    moe = MoE(config, init_std=0.4)
    precision = Precision(recipe=recipe, grad_dtype="e5m2", layers=("experts",))
    convert_layers(moe, precision, torch.device("cpu"), torch.float32)
    return moe


def make_input(rank: int) -> tuple[Tensor, Tensor]:
    x, direction = torch.randn(2, TOKENS, CONFIG.dim, generator=torch.Generator().manual_seed(rank))
    return x.requires_grad_(), direction


def run_layers(rank: int, recipe: str, ways: list[str]) -> dict[str, dict[str, Tensor]]:
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)), {}
    with installed():
        for way in ways:
            moe = parallelize_moe(make_layer(replace(CONFIG, **WAYS[way]), recipe), mesh)
            x, direction = make_input(rank)
            y = moe(x)
            (y * direction).sum().backward()
            grads = {name: p.grad for name, p in moe.named_parameters()}
            whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}
            found[way] = {"y": y.detach(), "x": x.grad} | whole
        deep_ep._buffers.clear()
        hybrid_ep._buffers.clear()
    return found


def expected(num_ranks: int, recipe: str) -> list[dict[str, Tensor]]:
    moe, inputs = make_layer(CONFIG, recipe), [make_input(rank) for rank in range(num_ranks)]
    y = moe(torch.cat([x for x, _ in inputs]))
    (y * torch.cat([direction for _, direction in inputs])).sum().backward()
    grads = {name: p.grad for name, p in moe.named_parameters()}
    return [{"y": y.detach(), "x": x.grad} | grads for y, (x, _) in zip(y.split(TOKENS), inputs, strict=True)]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("recipe", ["float8", "mxfp8"])
def test_ranks_equal_one_process(ranks: RankPool, recipe: str, num_ranks: int) -> None:
    # With a capacity, blocks of 32 rows have empty places between the rows of ranks, and so other scales.
    ways = [way for way in WAYS if way != "capacity" or recipe == "float8"]
    exact, plain = expected(num_ranks, recipe), expected(num_ranks, "none")
    assert relative_error(exact[0]["experts.w1_EFD"], plain[0]["experts.w1_EFD"]) > 0.01  # it does round
    for rank, found in enumerate(ranks.run(run_layers, num_ranks, recipe, ways, timeout=120)):
        for way, results in found.items():
            errors = {name: relative_error(results[name], exact[rank][name]) for name in exact[rank]}
            assert max(errors.values()) < 1e-5, (rank, way, errors)
