"""Losses and step times of two source trees: whether a change kept every bit, and what it costs.

    git worktree add ../before 0fe7d88
    python benchmarks/before_after.py losses --before ../before [--order first]
    python benchmarks/before_after.py speed --before ../before [--steps 200] [--threads 1]

Both trees run their own `spurline train` on the debug model with the same text and the same initial weights, which
follow from the parameter names alone: trees may draw their initial weights differently.

losses: 12 steps on one process, with FSDP2+EP on 2 ranks and with FSDP2+EP+TP on 4; losses and gradient norms are
compared bit for bit. `--order first` gives the tree under test a dispatcher that adds in the order of the first
edition (0fe7d88): rows are gathered after the shared experts have run, and routing weights are applied to the rows that
came back. What still differs then has another reason than these two.

speed: one process of each tree. They take turns step by step, so that a slow moment of the machine
hits both. CPU time includes the thread that makes batches; wall time is that of the step's own thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

LAYOUTS = {
    "one process": (1, []),
    "FSDP2+EP, 2 ranks": (2, ["--parallelism.expert_parallel_degree", "2"]),
    "FSDP2+EP+TP, 4 ranks": (
        4,
        ["--parallelism.expert_parallel_degree", "2", "--parallelism.tensor_parallel_degree", "2"],
    ),
}
THIS_TREE = Path(__file__).resolve().parent.parent
INITIALIZE = [("spurline.train.run", "initialize_parameters"), ("spurline.train.trainer", "initialize")]
"""The function that fills a model's parameters, in the trees that have existed."""
WARM_UP = 10


# ---- in the process of one tree


def fill_by_name(model: Any) -> None:
    import torch
    from torch.distributed.tensor import DTensor, Replicate

    for name, parameter in model.named_parameters():
        plain_name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        generator = torch.Generator().manual_seed(zlib.crc32(plain_name.encode()))
        shape = tuple(parameter.shape)
        full = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                everywhere = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
                parameter.copy_(everywhere.redistribute(mesh, parameter.placements))
            else:
                parameter.copy_(full)


def fill_after_initializing() -> None:
    for module_name, function_name in INITIALIZE:
        try:
            module = import_module(module_name)
            initialize = getattr(module, function_name)
        except (ImportError, AttributeError):
            continue

        def initialize_and_fill(model: Any, *args: Any, _do: Callable[..., None] = initialize, **options: Any) -> None:
            _do(model, *args, **options)
            fill_by_name(model)

        setattr(module, function_name, initialize_and_fill)
        return
    sys.exit("before_after: this tree initializes its models elsewhere: add the place to INITIALIZE")


def add_in_first_order() -> None:
    """Experts across ranks get the first edition's order, written as a plan of its own."""
    from torch import Tensor

    from spurline.comm.exchange import depart
    from spurline.moe.dispatch.all_to_all import AllToAllDispatcher, ExchangePlan, PermutedArrival
    from spurline.moe.dispatch.combine import combine_rows
    from spurline.moe.dispatch.plan import ExpertRanks
    from spurline.moe.rows import Rows
    from spurline.ops.rows import gather_rows

    local = import_module("spurline.moe.dispatch.local")

    class FirstPlan(ExchangePlan):
        def dispatch(self, x_TD: Tensor) -> Rows:
            return Rows(x_TD, self.route.counts, start=partial(self._gather, x_TD))

        def _gather(self, x_TD: Tensor) -> Rows:
            route, departure = self._known_route(), depart(gather_rows(x_TD, self.token_S), self.group, beside=False)
            in_flight = route.exchange.start(departure)
            arrival = PermutedArrival(in_flight, route.permutation, x_TD.shape[1], weight_dtype=None)
            return Rows(departure.rows_SD, route.counts, arrival=arrival)

        def combine(self, rows: Rows) -> Tensor:
            route = self._known_route()
            rows_SD = route.exchange.inverse(route.permutation.inverse(rows.x))
            return combine_rows(replace(rows, weight_S=self.weight_S), rows_SD, self.token_S, self.num_tokens)

    class FirstDispatcher(AllToAllDispatcher):
        def plan(self, *args: Any) -> ExchangePlan:
            return FirstPlan(**vars(super().plan(*args)))

    def across(dispatcher: Any, ranks: ExpertRanks) -> FirstDispatcher:
        parts, same = ranks.parts_per_expert, ranks.same_num_tokens
        how = {"parts_per_expert": parts, "same_num_tokens": same}
        return FirstDispatcher(dispatcher.config, ranks.group, ranks.layer, **how)

    local.LocalDispatcher.across = across


def take_turns(turns: Any, times: Any) -> None:
    """After each step, write its wall and CPU seconds to `times` and wait for a byte from `turns`."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    last = {"wall": time.perf_counter(), "cpu": time.process_time()}

    def hook(*args: Any) -> None:
        wall, cpu = time.perf_counter() - last["wall"], time.process_time() - last["cpu"]
        last["cpu"] = time.process_time()
        times.write(f"{wall} {cpu}\n".encode())
        turns.read(1)
        last["wall"] = time.perf_counter()

    register_optimizer_step_post_hook(hook)


def run_tree(arguments: list[str]) -> None:
    fill_after_initializing()
    if os.environ.get("BEFORE_AFTER_ORDER") == "first":
        add_in_first_order()
    if "BEFORE_AFTER_TURNS" in os.environ:
        turns, times = map(int, os.environ["BEFORE_AFTER_TURNS"].split())
        take_turns(os.fdopen(turns, "rb", buffering=0), os.fdopen(times, "wb", buffering=0))
    sys.exit(import_module("spurline.cli").main(arguments))


# ---- in the process that compares


def make_text(folder: Path) -> Path:
    """Text that both trees read alike: their default data sets differ."""
    folder.mkdir()
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]:
        shutil.copyfile(source, folder / f"{source.stem}.txt")
    return folder


def command_of(tree: Path, num_ranks: int, steps: int, text: Path, out: Path, threads: int = 1) -> list[str]:
    launcher = [sys.executable]
    if num_ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--master-port", str(port)]
    command = [*launcher, str(Path(__file__).resolve()), "tree", "train", "--module", "deepseek_v3"]
    command += ["--config", "deepseek_v3_debugmodel", "--training.steps", str(steps)]
    command += ["--training.threads", str(threads)]
    command += ["--metrics.sample_tokens", "0", "--data.path", str(text), "--job.dump_folder", str(out)]
    saves_by_default = (tree / "spurline" / "train" / "checkpoint").is_dir()
    return [*command, "--checkpoint.no-enable"] if saves_by_default else command


def environment(tree: Path, order: str = "", threads: int = 1) -> dict[str, str]:
    own = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": str(threads), "BEFORE_AFTER_ORDER": order}
    return {**os.environ, **own}


def losses_of(tree: Path, layout: str, text: Path, out: Path, order: str) -> list[tuple[float, float]]:
    num_ranks, options = LAYOUTS[layout]
    command = [*command_of(tree, num_ranks, 12, text, out), *options]
    done = subprocess.run(command, env=environment(tree, order), cwd=out.parent, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"before_after: {layout} in {tree} failed:\n{done.stderr[-2000:]}")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(record["loss"], record["grad_norm"]) for record in records if "loss" in record]


def compare_losses(before: Path, after: Path, order: str, folder: Path) -> bool:
    text, all_equal = make_text(folder / "text"), True
    for number, layout in enumerate(LAYOUTS):
        old = losses_of(before, layout, text, folder / f"before{number}", "")
        new = losses_of(after, layout, text, folder / f"after{number}", order)
        equal = sum(pair == other for pair, other in zip(old, new, strict=True))
        numbers = zip(chain(*old), chain(*new), strict=True)
        worst = max(abs(a - b) / abs(a) for a, b in numbers)
        print(f"{layout:22} {equal} of {len(old)} steps equal, largest relative difference {worst:.1e}", flush=True)
        print(f"{'':22} loss of the last step: {old[-1][0].hex()} before, {new[-1][0].hex()} after", flush=True)
        all_equal &= equal == len(old)
    return all_equal


def compare_speed(before: Path, after: Path, steps: int, threads: int, folder: Path) -> None:
    text, ends, processes = make_text(folder / "text"), [], []
    for name, tree in (("before", before), ("after", after)):
        turns_read, turns_write = os.pipe()
        times_read, times_write = os.pipe()
        with open(folder / f"{name}.log", "wb") as log:
            command = command_of(tree, 1, steps, text, folder / name, threads)
            env = {**environment(tree, threads=threads), "BEFORE_AFTER_TURNS": f"{turns_read} {times_write}"}
            process = subprocess.Popen(
                command, env=env, cwd=folder, stdout=log, stderr=log, pass_fds=(turns_read, times_write)
            )
        os.close(turns_read)
        os.close(times_write)
        processes.append(process)
        ends.append((os.fdopen(turns_write, "wb", buffering=0), os.fdopen(times_read, "rb")))
    seconds: list[list[tuple[float, float]]] = [[], []]
    for _, times in ends:  # both stand behind their first step
        times.readline()
    for step in range(1, steps):
        order = (0, 1) if step % 2 else (1, 0)
        for which in order:
            turns, times = ends[which]
            turns.write(b".")
            wall, cpu = times.readline().split()
            if step >= WARM_UP:
                seconds[which].append((float(wall), float(cpu)))
    for (turns, _), process in zip(ends, processes, strict=True):
        turns.write(b".")
        process.wait()
    for column, what in enumerate(("wall", "CPU")):
        old, new = ([pair[column] * 1e3 for pair in of_tree] for of_tree in seconds)
        ratios = sorted(b / a for a, b in zip(old, new, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        print(
            f"{what:4} ms a step: {statistics.median(old):.1f} before, {statistics.median(new):.1f} after; paired ratio"
            f" {statistics.median(ratios):.3f} (quartiles {low:.3f} to {high:.3f}, {len(ratios)} pairs), of all steps"
            f" {sum(new) / sum(old):.3f}"
        )


def main() -> None:
    if sys.argv[1:2] == ["tree"]:
        return run_tree(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["losses", "speed"])
    parser.add_argument("--before", type=Path, required=True, help="a source tree, for example of git worktree")
    parser.add_argument("--after", type=Path, default=THIS_TREE, help="the tree under test (default: this one)")
    parser.add_argument("--order", choices=["first"], default="", help="add in the order of the first edition")
    parser.add_argument("--steps", type=int, default=200, help="steps of each tree for speed")
    parser.add_argument("--threads", type=int, default=1, help="threads of each tree for speed")
    options = parser.parse_args()
    before, after = options.before.resolve(), options.after.resolve()
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "speed":
            return compare_speed(before, after, options.steps, options.threads, Path(folder))
        sys.exit(not compare_losses(before, after, options.order, Path(folder)))


if __name__ == "__main__":
    main()
