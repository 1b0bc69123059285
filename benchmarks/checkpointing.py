"""Time that training waits for a checkpoint: synchronous or asynchronous.

    python benchmarks/checkpointing.py [--ranks 2]

A model with 200 MB of parameters and twice that of optimizer state. Both modes are interleaved in one run; training
continues until the background write has finished, so that only one write is in progress at a time. Results are
medians; the first asynchronous checkpoint also allocates its buffers and is reported separately.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from spurline.testing import RankPool
from spurline.train.checkpoint.manager import CheckpointManager

WIDTH, LAYERS, REPETITIONS = 2560, 8, 3


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    start = time.perf_counter()
    model(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def measure(rank: int, folder: str) -> dict[str, list[float]]:
    """Seconds of each checkpoint, and of training steps with and without a write in progress."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    at_once = CheckpointManager(Path(folder) / "at_once", 1, 1)
    background = CheckpointManager(Path(folder) / "background", 1, 1, in_background=True)
    figures: dict[str, list[float]] = {"at once": [], "background": [], "step": [], "step meanwhile": []}
    for step in range(1, REPETITIONS + 2):
        for _ in range(2):
            figures["step"].append(train_step(model, optimizer))
        for name, checkpoints in (("at once", at_once), ("background", background)):
            start = time.perf_counter()
            checkpoints.save(step, model, optimizer, {})
            figures[name].append(time.perf_counter() - start)
        for _ in range(2):
            figures["step meanwhile"].append(train_step(model, optimizer))
        background.wait()
    background.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    ranks = parser.parse_args().ranks
    with tempfile.TemporaryDirectory() as folder:
        if ranks == 1:
            torch.set_num_threads(1)
            figures = measure(0, folder)
        else:
            with RankPool() as pool:
                figures = pool.run(measure, ranks, folder, timeout=300)[0]
    first, *background = figures.pop("background")
    medians = {name: statistics.median(seconds) for name, seconds in figures.items()}
    waited = statistics.median(background)
    print(f"{4 * LAYERS * WIDTH**2 / 1e6:.0f} MB of parameters, {ranks} rank{'s' if ranks > 1 else ''}")
    print(f"synchronous    {medians['at once']:7.3f} s")
    print(f"asynchronous   {waited:7.3f} s (the first {first:.3f} s): {waited / medians['at once']:.1%} of synchronous")
    print(f"training step  {medians['step']:7.3f} s, {medians['step meanwhile']:.3f} s during a background write")


if __name__ == "__main__":
    main()
