"""Graphs, time and memory of compiling a preset, as its layers and ranks grow.

    python benchmarks/compile_scaling.py --module deepseek_v3 --config deepseek_v3_671b --ep 64 --layers 6 61 \
        --ranks 64 1024 [--tp 2] [--remat full] [--forced_balance] [--check_exchange] [--backend aot_eager]

One forward and backward pass of the real preset as rank 0 of PyTorch's fake process group, on fake tensors, which use
no memory: only tracing is measured. Each case runs in its own process. Time is CPU time of one thread, memory the
growth of the process's peak. The compiler takes most of it; the rest is FSDP2 and autograd.
"""

import argparse
import multiprocessing
import resource
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import spurline.parallel.expert
from spurline.config import Compile, Parallelism
from spurline.models import family_configs
from spurline.models.common.init import initialize_buffers
from spurline.parallel.degrees import resolve_degrees
from spurline.parallel.mesh import build_meshes
from spurline.parallel.model import parallelize_model
from spurline.train.setup import sharding_of


def measure(args: argparse.Namespace, ranks: int, layers: int) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    run = family_configs(args.module)[args.config]()
    config: Any = replace(run.model, num_layers=layers or run.model.num_layers)
    if args.forced_balance:
        config = config.with_forced_balance()
    if args.check_exchange:
        config = replace(config, moe=replace(config.moe, check_exchange=True))
    parallelism = Parallelism(tensor_parallel_degree=args.tp, expert_parallel_degree=args.ep)
    with torch.device("meta"):
        model = config.build()
    # Fake ranks can't confirm that they have the same layers.
    same = mock.patch.object(spurline.parallel.expert, "_same_on_all_ranks", lambda moe, group, *_: [{}] * group.size())
    with same:
        meshes = build_meshes(resolve_degrees(parallelism, ranks), "cpu")
        compiled = Compile(enable=not args.eager, backend=args.backend)
        parallelize_model(model, meshes, args.remat, compiled, sharding=sharding_of(run))
    # With a shape environment, sizes that are unknown here (rows from other ranks) are symbolic.
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
        model.to_empty(device="cpu")
        initialize_buffers(model)
        model.compute_dtype = torch.bfloat16
        memory, start = peak_memory(), time.process_time()
        model(torch.zeros(1, args.seq_len, dtype=torch.int64)).sum().backward()
        seconds, memory = time.process_time() - start, peak_memory() - memory
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(
        f"| {args.config} | {config.num_layers} | {ranks} | {graphs} | {seconds:.1f} | {memory / 1e6:.0f} |", flush=True
    )


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--module", default="deepseek_v3")
    parser.add_argument("--config", default="deepseek_v3_671b")
    parser.add_argument("--layers", type=int, nargs="+", default=[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64])
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--seq_len", type=int, default=4096)
    parser.add_argument("--remat", default="none")
    parser.add_argument("--backend", default="aot_eager")
    for flag in ("--forced_balance", "--check_exchange", "--eager"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    print("| preset | layers | ranks | graphs | s | MB |\n| --- | --- | --- | --- | --- | --- |", flush=True)
    for ranks in args.ranks:
        for layers in args.layers:
            process = multiprocessing.get_context("spawn").Process(target=measure, args=(args, ranks, layers))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()
