"""Expert-parallel forward and backward on local gloo ranks, for each kind of exchange."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from spurline.bench.figures import Figure
from spurline.bench.measure import Timing
from spurline.moe import MoE, MoEConfig
from spurline.parallel.expert import parallelize_moe
from spurline.testing import run_ranks

CONFIG = MoEConfig(dim=512, hidden_dim=256, num_experts=16, top_k=2)
TOKENS = 1024
WAYS = {
    "uneven": CONFIG,
    "equal split": dataclasses.replace(CONFIG, equal_split="forced"),
    "forced balance": dataclasses.replace(CONFIG, force_load_balance=True),
    "capacity 1.25": dataclasses.replace(CONFIG, dispatcher="capacity"),
}


def ranks(threads: int, seconds: float, cases: list[str]) -> Iterator[Figure]:
    """Milliseconds of forward and backward, with `TOKENS` tokens and one thread per rank."""
    if threads > 1:
        return  # ranks always use one thread
    for world in (2, 4):
        times = run_ranks(_measure, world, seconds, timeout=60 + 4 * seconds)[0]
        for name, values in times.items():
            timing = Timing(values)
            case = f"{world} ranks"
            yield Figure("ranks", case, "forward+backward", name, timing.median * 1e3, "ms", 1, timing.spread)


def _measure(rank: int, seconds: float) -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    layers = {name: parallelize_moe(MoE(config), mesh) for name, config in WAYS.items()}
    x = torch.randn(TOKENS, CONFIG.dim, generator=torch.Generator().manual_seed(rank))
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    started, more = time.perf_counter(), torch.ones(())
    while more:
        for name, layer in layers.items():
            dist.barrier()
            begin = time.perf_counter()
            layer(x).square().mean().backward()
            layer.zero_grad()
            times[name].append(time.perf_counter() - begin)
        # All ranks stop in the same round.
        more = torch.tensor(float(time.perf_counter() - started < seconds or len(times["uneven"]) < 6))
        dist.broadcast(more, 0)
    return {name: values[1:] for name, values in times.items()}
