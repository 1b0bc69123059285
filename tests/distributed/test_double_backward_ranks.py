"""Gradients of gradients through an expert-parallel layer: equal to those of one process, for weights and inputs."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.testing import RankPool
from spurline.testing.equivalence import relative_error

CONFIG = {"dim": 8, "hidden_dim": 8, "num_experts": 4, "top_k": 2, "num_shared_experts": 1}


def make_layer(changes: dict[str, object]) -> MoE:
    torch.manual_seed(0)
    return MoE(MoEConfig(**CONFIG, **changes), init_std=0.5, dtype=torch.float64)


def penalized(moe: MoE, rank: int) -> Tensor:
    """Backpropagate |dL/dx|^2 for the tokens of a rank, which are returned with their gradient."""
    x = torch.randn(5 + rank, 8, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(moe(x).square().sum(), x, create_graph=True)
    dx.square().sum().backward()
    return x


def run_on_rank(rank: int, changes: dict[str, object]) -> tuple[Tensor, dict[str, Tensor]]:
    moe = parallelize_moe(make_layer(changes), init_device_mesh("cpu", (2,)))
    x = penalized(moe, rank)
    gradients = {name: parameter.grad for name, parameter in moe.named_parameters()}
    return x.grad, {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"experts_backend": "stream"},
        {"experts_backend": "loop", "score_before_experts": True},
        {"equal_split": "forced"},
    ],
    ids=str,
)
def test_second_derivatives_across_ranks_are_those_of_one_process(ranks: RankPool, changes: dict[str, object]) -> None:
    moe = make_layer(changes)
    expected = [penalized(moe, rank).grad for rank in range(2)]
    for rank, (dx, gradients) in enumerate(ranks.run(run_on_rank, 2, changes)):
        assert relative_error(dx, expected[rank]) < 1e-9
        for name, parameter in moe.named_parameters():
            assert relative_error(gradients[name], parameter.grad) < 1e-9, name
