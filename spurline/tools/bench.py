"""`spurline bench`: benchmark the MoE layer and the training step. Torch-free until the benchmarks start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from spurline.bench.cases import CASES
from spurline.bench.figures import Figure, missed_targets
from spurline.tools.console import complain
from spurline.tools.parsing import described, parse

if TYPE_CHECKING:
    import torch
    from rich.console import Console

PROG = "spurline bench"
SUITE_NAMES = ("layers", "bf16", "memory", "sweep", "dispatchers", "ranks", "step")
ON_ANY_DEVICE = ("layers", "bf16")
DESCRIPTION = """\
Benchmark Spurline against installed peers (torchtitan, transformers). Candidates
run interleaved; results are medians, and ratios to the best peer and to a floor:
the expert matmuls and activations alone, on rows already sorted by expert.

examples
  spurline bench                                        all suites, many minutes
  spurline bench --parts layers --cases small decode --threads 1
  spurline bench --check                                exit code 1 if a target is missed
  spurline bench --device auto                          layers on the accelerator of this machine

suites (--parts)
  layers   MoE layer, forward and forward+backward, float32
  bf16     the same in bfloat16, and its error against float64
  memory   bytes saved for backward, and growth of the process
  sweep    our layer with growing token, top-k and expert counts
  dispatchers  padding, dropped rows and memory of each, by routing
  ranks    expert-parallel forward+backward on 2 and 4 local ranks
  step     training step of the debug models

To install the peers: pip install 'spurline[peers]'."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """The options of `spurline bench`."""

    parts: Annotated[tuple[str, ...], described("NAME ...")] = ()
    """Benchmark suites to run (default: all, or layers and bf16 on an accelerator)."""
    device: Annotated[str, described("TYPE")] = "cpu"
    """Device to measure on: cpu, auto, or an accelerator type, on which every experts kernel is timed."""
    cases: Annotated[tuple[str, ...], described("NAME ...")] = tuple(CASES)
    """Layer shapes and routings to run in the suites layers, bf16, memory and dispatchers (default: all).
    One or more of small, medium, medium_zipf, medium_one_hot, medium_uniform, decode."""
    threads: Annotated[tuple[int, ...], described("N ...")] = (1, 2)
    """Thread counts; every suite runs once with each of them (default: 1 2)."""
    seconds: Annotated[float, tyro.conf.arg(metavar="S")] = 20.0
    """Measuring time per result, shared by all candidates; raise it on a noisy machine."""
    check: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Compare the results with the targets in bench/figures.py; exit code 1 if one is missed."""
    json: Annotated[str, described("FILE")] = ""
    """Also write all results to this JSON file."""

    def problems(self) -> list[str]:
        found = [
            f"--parts {name} runs on CPUs only: with --device {self.device} choose from {', '.join(ON_ANY_DEVICE)}"
            for name in self.parts
            if self.device != "cpu" and name in SUITE_NAMES and name not in ON_ANY_DEVICE
        ]
        found += [
            f"--parts: there is no {name!r}. Choose from: {', '.join(SUITE_NAMES)}"
            for name in self.parts
            if name not in SUITE_NAMES
        ]
        found += [
            f"--cases: there is no {name!r}. Choose from: {', '.join(CASES)}"
            for name in self.cases
            if name not in CASES
        ]
        found += [f"--threads must be at least 1, got {number}" for number in self.threads if number < 1]
        if self.seconds <= 0:
            found.append(f"--seconds must be positive, got {self.seconds}")
        return found


def main(argv: list[str]) -> int:
    command, problems = parse(Command, Command(), argv, PROG, DESCRIPTION)
    if problems := problems + command.problems():
        return complain(PROG, problems)
    return _bench(command)


def _bench(command: Command) -> int:
    from rich.console import Console

    from spurline.device import pick_device, use_device

    device = pick_device(command.device, "device")
    use_device(device)
    console = Console(soft_wrap=True)
    figures: list[Figure] = []
    for group in _measure(command, device):
        _show(console, group)
        figures += group
        if command.json:
            Path(command.json).write_text(json.dumps([figure.as_json() for figure in figures], indent=1) + "\n")
    if not command.check:
        return 0
    missed = missed_targets(figures)
    for line in missed:
        console.print(f"[red]missed[/red] {line}", highlight=False)
    console.print(f"{len(missed)} targets missed" if missed else "all targets met", highlight=False)
    return 1 if missed else 0


def _measure(command: Command, device: torch.device) -> Iterator[list[Figure]]:
    """Yield the results in groups that share suite, case and quantity."""
    import torch

    from spurline.bench.suites import SUITES
    from spurline.device import is_accelerator

    on_accelerator = is_accelerator(device)
    for threads in command.threads[:1] if on_accelerator else command.threads:
        torch.set_num_threads(threads)
        for name in command.parts or (ON_ANY_DEVICE if on_accelerator else SUITE_NAMES):
            where = (device,) if name in ON_ANY_DEVICE else ()
            group: list[Figure] = []
            for figure in SUITES[name](threads, command.seconds, list(command.cases), *where):
                if group and (figure.case, figure.what) != (group[0].case, group[0].what):
                    yield group
                    group = []
                group.append(figure)
            if group:
                yield group


def _show(console: Console, figures: list[Figure]) -> None:
    first = figures[0]
    console.print(first.place, style="bold", highlight=False)
    for figure in figures:
        cells = [f"  {figure.candidate:<26}{figure.value:>10.4g} {figure.unit:<4}"]
        cells.append(f"±{figure.spread:>4.0%}" if figure.spread is not None else " " * 5)
        cells.append(f"{figure.to_floor:>7.3f} x floor" if figure.to_floor is not None else "")
        cells.append(f"{figure.to_best_peer:>7.3f} x best peer" if figure.to_best_peer is not None else "")
        style = "bold" if figure.candidate == "spurline" else ""
        console.print("  ".join(cells).rstrip(), highlight=False, style=style)
