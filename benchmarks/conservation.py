"""Cost of the conservation check: an expert-parallel training step on 2 gloo ranks, with and without it.

    python benchmarks/conservation.py

The two candidates are interleaved in one run; the result is the ratio of their medians.
"""

import dataclasses
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.testing import run_ranks

SIZES = {
    "small  (D 256, F 256, 8 experts, K 3, 1024 tokens per rank)": (MoEConfig(256, 256, 8, 3), 1024),
    "medium (D 1024, F 512, 16 experts, K 4, 512 tokens per rank)": (MoEConfig(1024, 512, 16, 4), 512),
}
REPETITIONS = 15


def measure(rank: int, config: MoEConfig, num_tokens: int) -> list[float]:
    """Median seconds of forward and backward, [without the check, with it]."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    layers = [parallelize_moe(MoE(dataclasses.replace(config, check_exchange=check)), mesh) for check in (False, True)]
    x = torch.randn(num_tokens, config.dim)
    seconds: list[list[float]] = [[], []]
    for repetition in range(REPETITIONS + 2):
        for number, moe in enumerate(layers):
            dist.barrier()
            start = time.perf_counter()
            moe(x).square().mean().backward()
            if repetition >= 2:
                seconds[number].append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


if __name__ == "__main__":
    for name, (config, num_tokens) in SIZES.items():
        without, checked = run_ranks(measure, 2, config, num_tokens, timeout=300)[0]
        print(f"{name}: {without * 1e3:.1f} ms, checked {checked * 1e3:.1f} ms, ratio {checked / without:.2f}")
