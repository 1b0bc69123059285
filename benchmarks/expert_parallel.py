"""Bytes that an expert-parallel MoE layer keeps for backward, and the host time of planning its exchange.

    python benchmarks/expert_parallel.py

Bytes: one layer on 2 gloo ranks, bfloat16, 512 tokens of width 512 per rank, 16 experts of hidden width 128, K 4:
storages that a forward allocated and that are alive after it, for a block with each kind of recomputation.
Plan: 256 ranks, 256 experts, as rank 0 of a fake process group. Everything that the host does for a plan once its
numbers are in host memory (reading them, splits, counts, ranges, choice of exchange), without the work on the device.
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.parallel.remat import apply_remat
from spurline.testing import run_ranks
from spurline.testing.kept import LiveStorages

LAYER = {"dim": 512, "hidden_dim": 128, "num_experts": 16, "top_k": 4}


class Block(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.moe = MoE(config, dtype=torch.bfloat16)

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD + self.moe(x_TD)


def kept_bytes(rank: int, kernel: str, mode: str) -> int:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([Block(MoEConfig(**LAYER, experts_backend=kernel))])
    parallelize_moe(model.layers[0].moe, init_device_mesh("cpu", (2,)))
    apply_remat(model, mode)
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(rank)).bfloat16().requires_grad_()
    with LiveStorages(model) as live:
        y = model.layers[0](x)
        kept = sum(live.settled_sizes()) - y.untyped_storage().nbytes()
    y.sum().backward()
    return kept


def plan_seconds(forced: bool) -> float:
    """The shortest time of many plans, in seconds."""
    from spurline.accelerator import HostCopy
    from spurline.moe.dispatch.all_to_all import AllToAllDispatcher
    from spurline.moe.dispatch.traffic import Traffic, traffic_numbers
    from spurline.moe.routing import Routing

    P = E = 256
    config = MoEConfig(dim=8, hidden_dim=8, num_experts=E, top_k=8, force_load_balance=forced)
    dispatcher = AllToAllDispatcher(config, dist.group.WORLD)
    count_PE = torch.randint(1, 300, (P, E))
    numbers, count_e = traffic_numbers(count_PE, 0)
    expert_TK = torch.arange(4096 * 8).view(-1, 8) % E
    routing = Routing(expert_TK, torch.ones(4096, 8), torch.full((E,), 128), None)
    best = float("inf")
    for _ in range(300):
        start = time.perf_counter()
        if forced:
            dispatcher._forced_route(routing, None)
        else:
            traffic = Traffic.of_numbers(HostCopy(numbers), count_e, P)
            dispatcher._choose_exchange(traffic, count_PE, 4096 * 8, dispatcher._check())
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    for kernel in ("grouped_mm", "stream"):
        for mode in ("none", "selective", "selective_resend", "full"):
            kept = run_ranks(kept_bytes, 2, kernel, mode)
            print(f"kept for backward, {kernel}, {mode}: {max(kept) / 1e6:.2f} MB")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=256)
    for forced in (False, True):
        print(f"host arithmetic of a plan{' (forced balance)' * forced}: {plan_seconds(forced) * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
