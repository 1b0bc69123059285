"""Startup cost of one rank of many: build, shard and initialize a model; save and load checkpoints.

    python benchmarks/startup.py [--module deepseek_v3 --config deepseek_v3_671b --ranks 256 1024 4096 --ep 64]
    python benchmarks/startup.py --checkpoints

The first builds one rank's shard of a preset in PyTorch's fake process group, with real memory and real weights, in a
separate process for each number of ranks. Time is CPU time of one thread.

The second saves and loads `deepseek_v3_debugmodel` with its optimizer on 1, 2 and 4 gloo ranks and counts the bytes
that each rank writes to and reads from files.
"""

import argparse
import itertools
import multiprocessing
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import spurline.parallel.expert
from spurline.config import Compile, Parallelism
from spurline.models import family_configs
from spurline.models.common.init import initialize_buffers, initialize_parameters
from spurline.parallel.degrees import resolve_degrees
from spurline.parallel.mesh import build_meshes
from spurline.parallel.model import parallelize_model
from spurline.testing import RankPool


def initialize_share(module: str, config: str, ranks: int, ep: int) -> None:
    """Print the cost of initializing one rank's shard; the rank is in the middle of the world."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=ranks // 2 + 1, world_size=ranks)
    meshes = build_meshes(resolve_degrees(Parallelism(expert_parallel_degree=ep), ranks), "cpu")
    times = [time.process_time()]
    with torch.device("meta"):
        model = family_configs(module)[config]().model.build()
    times.append(time.process_time())
    # Fake ranks can't confirm that they have the same layers.
    same = mock.patch.object(spurline.parallel.expert, "_same_on_all_ranks", lambda moe, group, *_: [{}] * group.size())
    with same:
        parallelize_model(model, meshes, "none", Compile())
    times.append(time.process_time())
    before = peak_memory()
    model.to_empty(device="cpu")
    initialize_buffers(model)
    initialize_parameters(model, 0)
    times.append(time.process_time())
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    build, shard, initialize = (after - start for start, after in itertools.pairwise(times))
    print(
        f"| {ranks} | {held / 1e6:.0f}M | {build:.1f} | {shard:.1f} | {initialize:.1f} |"
        f" {held / initialize / 1e6:.0f}M | {4 * held / 1e6:.0f} | {(peak_memory() - before) / 1e6:.0f} |",
        flush=True,
    )


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def save_and_load(rank: int, folder: str) -> dict[str, float]:
    """Save and load a checkpoint; returns the bytes and seconds of this rank."""
    from spurline.parallel.world import joined_world
    from spurline.train.checkpoint.manager import CheckpointManager
    from spurline.train.trainer import make_trainer

    config = family_configs("deepseek_v3")["deepseek_v3_debugmodel"]()
    with (
        mock.patch.dict(os.environ, {"WORLD_SIZE": str(dist.get_world_size())}),
        joined_world(config.parallelism) as world,
    ):
        trainer = make_trainer(config, world)
        trainer.step(1)
        checkpoints = CheckpointManager(folder, 1, 0)
        found: dict[str, Any] = {}
        for name, act in (
            ("save", lambda: checkpoints.save(1, trainer.model, trainer.optimizer, {})),
            ("load", lambda: checkpoints.load_newest(trainer.model, trainer.optimizer)),
        ):
            dist.barrier()
            before, start = transferred(), time.perf_counter()
            act()
            dist.barrier()
            found[f"{name} s"] = time.perf_counter() - start
            found |= {f"{name} {key}": after - before[key] for key, after in transferred().items()}
    return found


def transferred() -> dict[str, int]:
    """Bytes that this process has read and written so far, by read() and write() on files (not on sockets)."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read": int(counts["rchar"]), "written": int(counts["wchar"])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--module", default="deepseek_v3")
    parser.add_argument("--config", default="deepseek_v3_671b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--ep", type=int, default=64)
    parser.add_argument("--checkpoints", action="store_true")
    args = parser.parse_args()
    if args.checkpoints:
        for ranks in (1, 2, 4):
            with tempfile.TemporaryDirectory() as folder, RankPool() as pool:
                for rank, found in enumerate(pool.run(save_and_load, ranks, folder, timeout=600)):
                    print(f"{ranks} ranks, rank {rank}: {found}")
        return
    print("| ranks | held | build s | shard s | initialize s | numbers/s | held MB | peak MB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for ranks in args.ranks:
        process = multiprocessing.get_context("spawn").Process(
            target=initialize_share, args=(args.module, args.config, ranks, args.ep)
        )
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()
