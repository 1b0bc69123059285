"""What an MoE layer across ranks keeps for its backward pass: one copy of the rows that reached it, or none."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.parallel.remat import apply_remat
from spurline.testing import RankPool
from spurline.testing.kept import LiveStorages

CONFIG = MoEConfig(dim=24, hidden_dim=8, num_experts=4, top_k=3, num_shared_experts=1, experts_backend="grouped_mm")
TOKENS = 34


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(CONFIG, init_std=0.4)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD + self.moe(x_TD)


def kept_by_a_block(rank: int, mode: str) -> tuple[list[int], int]:
    """Bytes of each tensor that a block keeps, and the number of rows that reached its experts on this rank."""
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([Block()])
    parallelize_moe(model.layers[0].moe, init_device_mesh("cpu", (dist.get_world_size(),)))
    apply_remat(model, mode)
    x = torch.randn(TOKENS, CONFIG.dim, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    with LiveStorages(model) as live:
        y = model.layers[0](x)
        sizes = live.settled_sizes()
    y.sum().backward()
    assert x.grad is not None
    rows = model.layers[0].moe.router.row_count_E.clone()
    dist.all_reduce(rows)
    return sizes, int(rows.view(2, -1).sum(1)[rank])


@pytest.mark.parametrize("mode", ["none", "selective", "selective_resend"])
def test_rows_are_kept_once_or_not_at_all(ranks: RankPool, mode: str) -> None:
    for sizes, received in ranks.run(kept_by_a_block, 2, mode):
        wide = received * CONFIG.dim * 4  # bytes of the rows that reached this rank; one carries 4 columns more
        joined = received * (CONFIG.dim + 4) * 4
        hidden = received * CONFIG.hidden_dim * 4
        sent = TOKENS * CONFIG.top_k * CONFIG.dim * 4
        assert sum(size in (wide, joined) for size in sizes) == (0 if mode == "selective_resend" else 1), sizes
        assert sent == wide or sent not in sizes  # what came back from the experts is not kept for the weights
        assert sizes.count(hidden) == (3 if mode == "none" else 2), sizes  # two products, and what goes into the third
