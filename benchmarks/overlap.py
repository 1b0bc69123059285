"""Overlap of a slowed-down exchange with slow shared experts, on 2 gloo ranks.

    python benchmarks/overlap.py

Rank 1 joins one exchange of each pass late, so that it takes `exchange` seconds on rank 0; rank 0's shared experts
sleep for `shared` seconds, so no spare core is needed. With overlap, rank 0 takes the larger of the two.
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.comm import exchange
from spurline.testing import run_ranks

CONFIG = MoEConfig(dim=64, hidden_dim=64, num_experts=8, top_k=2, num_shared_experts=1)


@torch.library.custom_op("spurline_bench::nap", mutates_args=())
def nap(x: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return x.clone()


@nap.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.seconds = inputs[1]


nap.register_autograd(lambda ctx, grad: (nap(grad, ctx.seconds), None), setup_context=_save)


class Sleepy(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return nap(x, self.seconds)


def measure(rank: int, compiled: bool, late: float, shared: float) -> tuple[float, float]:
    """Seconds of a forward and of a backward pass, the second of two."""
    torch.manual_seed(0)
    moe = MoE(CONFIG)
    moe.shared_experts = Sleepy(shared if rank == 0 else 0.0)
    parallelize_moe(moe, init_device_mesh("cpu", (2,)))
    run = torch.compile(moe, fullgraph=True) if compiled else moe
    x = torch.randn(64, 64, requires_grad=True)
    start, calls = exchange._all_to_all, []

    def start_late(*args: object) -> Tensor:
        calls.append(1)
        if rank == 1 and len(calls) % 4 in (1, 0):  # the first of the forward pass, the last of the backward pass
            time.sleep(late)
        return start(*args)

    exchange._all_to_all = start_late
    seconds = (0.0, 0.0)
    for _ in range(2):
        dist.barrier()
        begin = time.perf_counter()
        y = run(x)
        middle = time.perf_counter()
        dist.barrier()
        again = time.perf_counter()
        y.sum().backward()
        seconds = middle - begin, time.perf_counter() - again
    exchange._all_to_all = start
    return seconds


def main() -> None:
    print("mode      exchange  shared   forward  backward   (seconds, rank 0)")
    for compiled in (False, True):
        for late, shared in ((0.4, 0.0), (0.0, 0.4), (0.4, 0.4), (0.4, 0.2)):
            forward, backward = run_ranks(measure, 2, compiled, late, shared, timeout=300)[0]
            mode = "compiled" if compiled else "eager"
            print(f"{mode:<8}  {late:>8.1f}  {shared:>6.1f}  {forward:>8.2f}  {backward:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
