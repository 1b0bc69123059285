"""Rows that travel as float8: equal to one process whose experts see rows rounded once, in every gradient."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.comm import exchange
from spurline.config import Precision
from spurline.ops.low_precision import round_operand
from spurline.parallel.precision import convert_layers
from spurline.testing import RankPool
from spurline.testing.equivalence import relative_error

CONFIG = MoEConfig(dim=16, hidden_dim=12, num_experts=8, top_k=2, num_shared_experts=1, check_exchange=True)
CONFIG = replace(CONFIG, exchange_dtype="float8")
TOKENS = 10


def make_layer(config: MoEConfig, recipe: str) -> MoE:
    torch.manual_seed(0)
    moe = MoE(config, init_std=0.4)
    convert_layers(moe, Precision(recipe=recipe, layers=("experts",)), torch.device("cpu"), torch.float32)
    return moe


def make_input(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, direction = torch.randn(2, TOKENS, 16, generator=torch.Generator().manual_seed(rank))
    return x.requires_grad_(), direction


def run(rank: int, config: MoEConfig, how: str) -> tuple[dict[str, torch.Tensor], list[torch.dtype]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    layer: Any = parallelize_moe(
        make_layer(config, "float8" if how == "float8 products" else "none"), mesh, layer="moe"
    )
    moe = layer
    if how == "compiled":
        moe = torch.compile(layer, backend="aot_eager", fullgraph=True)
    elif how == "recomputed":
        moe = partial(checkpoint, layer, use_reentrant=False)
    sent, all_to_all = [], exchange._all_to_all
    exchange._all_to_all = lambda rows, *args: sent.append(rows.dtype) or all_to_all(rows, *args)
    x, direction = make_input(rank)
    y = moe(x)
    (y * direction).sum().backward()
    exchange._all_to_all = all_to_all
    grads = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad} | grads, sent


def expected(num_ranks: int, recipe: str) -> list[dict[str, torch.Tensor]]:
    """One process on the tokens of all ranks."""
    moe, inputs = make_layer(CONFIG, recipe), [make_input(rank) for rank in range(num_ranks)]
    x = torch.cat([x for x, _ in inputs])
    rounded = x + (round_operand(x.detach(), "float8", "e4m3", 1) - x.detach())
    plan = moe.dispatcher.plan(moe.router(x, 1))
    y = plan.combine(moe.experts(replace(plan.dispatch(rounded), onto_TD=moe.shared_experts(x))))
    (y * torch.cat([direction for _, direction in inputs])).sum().backward()
    grads = {name: p.grad for name, p in moe.named_parameters()}
    return [{"y": y.detach(), "x": x.grad} | grads for y, (x, _) in zip(y.split(TOKENS), inputs, strict=True)]


@pytest.mark.parametrize(
    ("num_ranks", "changes", "how"),
    [
        (2, {}, "eager"),
        (2, {"equal_split": "forced"}, "eager"),
        (2, {"check_exchange": False}, "compiled"),
        (2, {}, "recomputed"),
        (2, {}, "float8 products"),
        (4, {}, "eager"),
    ],
    ids=["uneven", "equal split", "compiled", "recomputed", "float8 products", "four ranks"],
)
def test_experts_see_rows_that_are_rounded_once(
    ranks: RankPool, num_ranks: int, changes: dict[str, object], how: str
) -> None:
    wanted = expected(num_ranks, "float8" if how == "float8 products" else "none")
    results = ranks.run(run, num_ranks, replace(CONFIG, **changes), how)
    for (found, sent), exact in zip(results, wanted, strict=True):
        errors = {name: relative_error(found[name], exact[name]) for name in exact}
        assert max(errors.values()) < 1e-5, errors
        # To the experts as bytes, and once more where they are computed again; back, and both gradients, as they are.
        again = [torch.uint8] if how == "recomputed" else []
        assert sent == [torch.uint8, torch.float32, torch.float32, *again, torch.float32]
