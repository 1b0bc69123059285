"""Blocks of one kind share one graph, however many there are, and the graph computes what one process does."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from spurline.config import Compile, Parallelism
from spurline.models.common.init import initialize
from spurline.parallel.degrees import resolve_degrees
from spurline.parallel.mesh import build_meshes
from spurline.parallel.model import parallelize_model
from spurline.testing import RankPool
from spurline.testing.equivalence import relative_error
from spurline.testing.tiny import tiny_model
from spurline.train.loss import make_loss_sum

TP_AND_EP = Parallelism(tensor_parallel_degree=2, expert_parallel_degree=2)
EP = Parallelism(expert_parallel_degree=2)


def tokens(rank: int) -> torch.Tensor:
    return torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(rank))


def gradients(model: Any, tokens_BL: torch.Tensor) -> dict[str, torch.Tensor]:
    model(tokens_BL, labels_BL=tokens_BL.roll(-1, 1), loss_sum=make_loss_sum(model.tp)).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def graphs_and_error(
    rank: int, parallelism: Parallelism, remat: str, moe: dict[str, Any], backend: str
) -> tuple[int, float]:
    """How many graphs six layers take, and how far the gradients are from those of one process without compile."""
    config = tiny_model(moe, num_layers=6, num_dense_layers=2)
    reference = config.build()
    initialize(reference, 0)
    # The ranks of a tp group have the same sequences, others their own, whose gradients add up.
    batches = [tokens(0)] if parallelism.tensor_parallel_degree == 2 else [tokens(0), tokens(1)]
    for batch in batches:
        expected = gradients(reference, batch)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.device("meta"):
        model = config.build()
    meshes = build_meshes(resolve_degrees(parallelism, 2), "cpu")
    parallelize_model(model, meshes, remat, Compile(enable=True, backend=backend))
    model.to_empty(device="cpu")
    initialize(model, 0)
    actual = gradients(model, tokens(rank if len(batches) == 2 else 0))
    error = max(relative_error(grad, expected[name]) for name, grad in actual.items())
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], error


@pytest.mark.parametrize(
    ("parallelism", "remat", "moe", "backend"),
    [
        (TP_AND_EP, "full", {"check_exchange": True}, "aot_eager"),
        (EP, "none", {"force_load_balance": True}, "eager"),
    ],
    ids=["tp, ep, full recomputation, checked exchange", "forced balance"],
)
def test_six_layers_of_two_kinds_are_two_graphs(ranks: RankPool, parallelism, remat, moe, backend) -> None:
    for graphs, error in ranks.run(graphs_and_error, 2, parallelism, remat, moe, backend, timeout=300):
        assert graphs == 2
        assert error < 1e-5
