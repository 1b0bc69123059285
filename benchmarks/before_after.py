"""Losses, step times and layer times of two source trees: whether a change kept every bit, and what it costs.

    git worktree add ../before 0fe7d88
    python benchmarks/before_after.py losses --before ../before [--order first]
    python benchmarks/before_after.py speed --before ../before [--steps 200] [--threads 1]
    python benchmarks/before_after.py layers --before ../before [--threads 1] [--cases small decode]

For losses and speed, both trees run their own `spurline train` on the debug model with the same text and the same
initial weights, which follow from the parameter names alone: trees may draw their initial weights differently.

losses: 12 steps on one process, with FSDP2+EP on 2 ranks and with FSDP2+EP+TP on 4; losses and gradient norms are
compared bit for bit. `--order first` gives the tree under test a dispatcher that adds in the order of the first
edition (0fe7d88): rows are gathered after the shared experts have run, and routing weights are applied to the rows that
came back. What still differs then has another reason than these two.

speed: one process of each tree. They take turns step by step, so that a slow moment of the machine
hits both. CPU time includes the thread that makes batches; wall time is that of the step's own thread.

layers: the cases of `spurline bench --parts layers memory`, each tree in a process of its own with the weights and
inputs of the first. They take turns call by call; outputs and gradients are compared bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
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
CALLS = ["forward", "forward_and_backward"]


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


def answer_calls(turns: Any, times: Any, folder: Path, threads: int, cases: list[str]) -> None:
    """For each case and kind of call: its bits after the first byte, then the seconds of a call a byte, until an n."""
    import torch

    from spurline.bench.cases import CASES
    from spurline.bench.layers import make_contest

    torch.set_num_threads(threads)
    for case in cases:
        turns.read(1)
        candidate = make_contest(CASES[case], peers=False).candidates["spurline"]
        weights = dict(candidate.layer.named_parameters())
        tensors = {"x": candidate.x, "grad": candidate.grad, **weights}
        drawn = folder / f"{case}.pt"
        if drawn.exists():
            with torch.no_grad():
                for name, tensor in torch.load(drawn).items():
                    tensors[name].copy_(tensor)
        else:
            torch.save({name: tensor.detach() for name, tensor in tensors.items()}, drawn)
        for kind in CALLS:
            call = getattr(candidate, kind)
            call()
            made = [call()] if kind == "forward" else [t.grad for t in (candidate.x, *weights.values())]
            bits = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in made))
            times.write(f"{bits.hexdigest()}\n".encode())
            while turns.read(1) == b".":
                begin = time.perf_counter()
                call()
                times.write(f"{time.perf_counter() - begin}\n".encode())


def run_tree(arguments: list[str]) -> None:
    if "BEFORE_AFTER_TURNS" in os.environ:
        read, write = map(int, os.environ["BEFORE_AFTER_TURNS"].split())
        turns, times = os.fdopen(read, "rb", buffering=0), os.fdopen(write, "wb", buffering=0)
        if arguments[0] == "layers":
            return answer_calls(turns, times, Path(arguments[1]), int(arguments[2]), arguments[3:])
        take_turns(turns, times)
    fill_after_initializing()
    if os.environ.get("BEFORE_AFTER_ORDER") == "first":
        add_in_first_order()
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


class Process:
    """A process of one tree that waits for a byte before each step or call, and answers with a line."""

    def __init__(self, name: str, tree: Path, command: list[str], threads: int, folder: Path) -> None:
        turns_read, turns_write = os.pipe()
        times_read, times_write = os.pipe()
        env = {**environment(tree, threads=threads), "BEFORE_AFTER_TURNS": f"{turns_read} {times_write}"}
        env["OMP_WAIT_POLICY"] = "passive"  # threads of the tree that waits must not spin beside the other
        self.log = folder / f"{name}.log"
        with open(self.log, "wb") as log:
            inherited = (turns_read, times_write)
            self._process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log, pass_fds=inherited)
        os.close(turns_read)
        os.close(times_write)
        self._turns, self._times = os.fdopen(turns_write, "wb", buffering=0), os.fdopen(times_read, "rb")

    def say(self, byte: bytes) -> None:
        self._turns.write(byte)

    def answer(self) -> list[str]:
        line = self._times.readline()
        if not line:
            sys.exit(f"before_after: a process ended early:\n{self.log.read_text()[-2000:]}")
        return line.decode().split()

    def ask(self) -> list[float]:
        self.say(b".")
        return [float(number) for number in self.answer()]

    def wait(self) -> None:
        self._process.wait()


def ratios(old: list[float], new: list[float]) -> str:
    in_order = sorted(b / a for a, b in zip(old, new, strict=True))
    low, high = in_order[len(in_order) // 4], in_order[3 * len(in_order) // 4]
    return f"{statistics.median(in_order):.3f} (quartiles {low:.3f} to {high:.3f}, {len(in_order)} pairs)"


def compare_speed(before: Path, after: Path, steps: int, threads: int, folder: Path) -> None:
    text, processes = make_text(folder / "text"), []
    for name, tree in (("before", before), ("after", after)):
        command = command_of(tree, 1, steps, text, folder / name, threads)
        processes.append(Process(name, tree, command, threads, folder))
    seconds: list[list[list[float]]] = [[], []]
    for process in processes:  # both stand behind their first step
        process.answer()
    for step in range(1, steps):
        for which in (0, 1) if step % 2 else (1, 0):
            pair = processes[which].ask()
            if step >= WARM_UP:
                seconds[which].append(pair)
    for process in processes:
        process.say(b".")
        process.wait()
    for column, what in enumerate(("wall", "CPU")):
        old, new = ([pair[column] * 1e3 for pair in of_tree] for of_tree in seconds)
        print(
            f"{what:4} ms a step: {statistics.median(old):.1f} before, {statistics.median(new):.1f} after; paired ratio"
            f" {ratios(old, new)}, of all steps {sum(new) / sum(old):.3f}"
        )


def footprint_of(tree: Path, kind: str, threads: int, folder: Path) -> float:
    command = [sys.executable, "-m", "spurline.bench.footprint", "medium", "spurline", kind, str(threads)]
    done = subprocess.run(command, env=environment(tree, threads=threads), cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"before_after: the memory of a layer in {tree} failed:\n{done.stderr[-2000:]}")
    return int(done.stdout) / 1e6


def compare_layers(before: Path, after: Path, cases: list[str], threads: int, seconds: float, folder: Path) -> bool:
    trees, all_equal = {"before": before, "after": after}, True
    command = [sys.executable, str(Path(__file__).resolve()), "tree", "layers", str(folder), str(threads), *cases]
    processes = [Process(name, tree, command, threads, folder) for name, tree in trees.items()]
    for case in cases:
        for kind in CALLS:
            bits = []
            for process in processes:  # one after the other: the first writes what the second reads
                if kind == CALLS[0]:
                    process.say(b".")
                bits.append(process.answer())
            times: list[list[float]] = [[], []]
            until = time.monotonic() + seconds
            while len(times[1]) < 10 or time.monotonic() < until:
                for which in (0, 1) if len(times[0]) % 2 else (1, 0):
                    times[which] += processes[which].ask()
            for process in processes:
                process.say(b"n")
            all_equal &= bits[0] == bits[1]
            same = "same bits" if bits[0] == bits[1] else "OTHER BITS"
            print(f"{case:16} {kind:21} {same}, paired ratio {ratios(*times)}", flush=True)
    for process in processes:
        process.wait()
    for kind in ("saved", "forward", "training"):
        old, new = (footprint_of(tree, kind, threads, folder) for tree in (before, after))
        print(f"{'medium':16} {'MB, ' + kind:21} {old:.1f} before, {new:.1f} after", flush=True)
    return all_equal


def main() -> None:
    if sys.argv[1:2] == ["tree"]:
        return run_tree(sys.argv[2:])
    from spurline.bench.cases import CASES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["losses", "speed", "layers"])
    parser.add_argument("--before", type=Path, required=True, help="a source tree, for example of git worktree")
    parser.add_argument("--after", type=Path, default=THIS_TREE, help="the tree under test (default: this one)")
    parser.add_argument("--order", choices=["first"], default="", help="add in the order of the first edition")
    parser.add_argument("--steps", type=int, default=200, help="steps of each tree for speed")
    parser.add_argument("--threads", type=int, default=1, help="threads of each tree for speed and layers")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="cases of layers")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each case of layers")
    options = parser.parse_args()
    before, after = options.before.resolve(), options.after.resolve()
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "speed":
            return compare_speed(before, after, options.steps, options.threads, Path(folder))
        if options.what == "layers":
            given = (options.cases, options.threads, options.seconds)
            sys.exit(not compare_layers(before, after, *given, Path(folder)))
        sys.exit(not compare_losses(before, after, options.order, Path(folder)))


if __name__ == "__main__":
    main()
