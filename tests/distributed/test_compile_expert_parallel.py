"""A block with an expert-parallel layer is one graph, for any number of tokens and any splits."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.testing import RankPool

CONFIG = MoEConfig(
    dim=8, hidden_dim=16, num_experts=8, top_k=2, num_shared_experts=1, aux_loss="sequence", check_exchange=True
)


class Block(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.dim)
        self.moe = MoE(config, init_std=0.4)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        return x_BLD + self.moe(self.norm(x_BLD))


def make_block(config: MoEConfig, replicated: bool) -> Block:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    block = Block(config)
    parallelize_moe(block.moe, mesh, sequence=mesh if replicated else None)
    return block


def step(block: Block, run, x: torch.Tensor) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    block.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in block.parameters()]
    return [y.detach(), x.grad, *(g.clone() for g in gradients)]


def run_compiled(rank: int, config: MoEConfig, replicated: bool, backend: str) -> tuple[list[float], list[int]]:
    """The worst difference from eager, and the graphs compiled so far, for one number of tokens after the other."""
    block = make_block(config, replicated)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    errors, graphs = [], []
    torch._dynamo.utils.counters.clear()
    for number, length in enumerate((5, 6, 9, 13, 20)):
        # The ranks bring different numbers of tokens, unless they share one sequence.
        if not replicated and not config.force_load_balance:
            length += 2 * rank
        seed = number if replicated else 10 * number + rank
        x = torch.randn(2, length, config.dim, generator=torch.Generator().manual_seed(seed))
        pairs = zip(step(block, compiled, x), step(block, block, x), strict=True)
        errors.append(max(((a - b).norm() / b.norm()).item() for a, b in pairs))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return errors, graphs


@pytest.mark.parametrize(
    ("changes", "replicated"),
    [
        ({}, False),
        pytest.param({}, True, marks=pytest.mark.slow),
        pytest.param({"equal_split": "forced"}, False, marks=pytest.mark.slow),
        pytest.param(
            {"equal_split": "adaptive", "score_before_experts": True, "experts_backend": "grouped_mm"},
            False,
            marks=pytest.mark.slow,
        ),
        pytest.param({"row_multiple": 4, "equal_split": "forced"}, False, marks=pytest.mark.slow),
        pytest.param({"dispatcher": "capacity", "capacity_factor": 2.0}, True, marks=pytest.mark.slow),
        ({"force_load_balance": True}, False),
        pytest.param({"force_load_balance": True}, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_equals_eager_and_stops_recompiling(
    ranks: RankPool, changes: dict[str, object], replicated: bool
) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    for errors, graphs in ranks.run(run_compiled, 2, config, replicated, "aot_eager", timeout=120):
        assert max(errors) < 1e-6
        assert graphs[2:] == [graphs[2]] * 3
        assert graphs[-1] <= 3


@pytest.mark.slow
def test_generated_code_equals_eager(ranks: RankPool) -> None:
    for errors, _ in ranks.run(run_compiled, 2, CONFIG, False, "inductor", timeout=280):
        assert max(errors) < 1e-5


def traced_sizes(rank: int, row_multiple: int) -> tuple[set[str], list[str]]:
    """Sizes of everything between dispatch and combine, as the traced graph has them."""
    config = dataclasses.replace(CONFIG, check_exchange=False, row_multiple=row_multiple)
    block = make_block(config, replicated=False)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with torch.no_grad():
        torch.compile(block, fullgraph=True, backend=keep)(torch.randn(2, 5 + rank, CONFIG.dim))
    (graph,) = graphs
    sizes, tensors = set(), []
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and free_unbacked_symbols(value):
            sizes.add(str(value.shape[0]))
            tensors.append(f"{node.name} {tuple(value.shape)}")
    return sizes, tensors


@pytest.mark.parametrize(("row_multiple", "num_sizes"), [(1, 1), (4, 2)], ids=["as they are", "aligned"])
def test_the_traced_size_is_one_symbol(ranks: RankPool, row_multiple: int, num_sizes: int) -> None:
    """That of the rows that arrive, and that of the places that they are spread over."""
    for sizes, tensors in ranks.run(traced_sizes, 2, row_multiple):
        assert len(sizes) == num_sizes, tensors
        for size in sizes:
            assert size.startswith("u"), tensors
            assert size[1:].isdigit(), tensors
        assert len(tensors) > 5, tensors
