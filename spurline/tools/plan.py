"""`spurline plan`: predict the memory, bytes and time of a step on a cluster, and which layouts fit."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import tyro

from spurline.config import RunConfig
from spurline.tools.console import gib, human, human_flops
from spurline.tools.options import resolve_command
from spurline.tools.parsing import described
from spurline.tools.simulation import SimulationCommand, command_problems, config_of, hardware_of, routing_of

if TYPE_CHECKING:
    from spurline.simulate.plan import Plan

PROG = "spurline plan"
EXAMPLES = """\
Predict what a training step needs on a cluster: the memory of a rank and what holds
it, bytes of each collective within a node and between nodes, FLOPs, and a lower
bound on the time. No GPU is needed: the real trainer takes one step as rank 0 of
that many ranks, on tensors without data. Exit code 1 if it does not fit.

examples
  spurline plan --module deepseek_v3 --config deepseek_v3_16b --ranks 64
  spurline plan --module deepseek_v3 --config deepseek_v3_671b --ranks 1024 \\
      --parallelism.expert_parallel_degree 64 --html plan.html
  spurline plan --module qwen3 --config qwen3_30b_a3b --ranks 32 --search
  spurline plan --module deepseek_v3 --config deepseek_v3_16b --ranks 64 \\
      --routing outputs/my_run --json

All options of `spurline train` apply. Compiled models are planned as if eager."""
CURVE_POINTS = 240
R = TypeVar("R", bound=RunConfig[Any])


@dataclass(frozen=True, kw_only=True)
class Command(SimulationCommand[R], Generic[R]):
    """The options of `spurline plan`."""

    search: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Try layouts of these ranks, estimated from a few layers, and list the fastest that fit."""
    best: Annotated[int, described("N")] = 5
    """Number of layouts to list with --search."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Print JSON instead of tables."""
    html: Annotated[str, described("FILE")] = ""
    """Also write an HTML page with the memory over the step; not with --search."""


def main(argv: list[str]) -> int:
    command = resolve_command(argv, Command, PROG, EXAMPLES, _problems)
    return _search(command) if command.search else _plan(command)


def _problems(command: Command[Any]) -> list[str]:
    found = command_problems(command)
    if command.best < 1:
        found.append(f"--best must be at least 1, got {command.best}")
    if not command.html:
        return found
    page = Path(command.html).absolute()
    if command.search:
        found.append(f"--html {command.html}: is the page of one layout, so it can't be combined with --search")
    elif page.is_dir():
        found.append(f"--html {command.html} is a folder: give a file name")
    elif not page.parent.is_dir():
        found.append(f"--html {command.html}: there is no folder {page.parent}")
    return found


def _plan(command: Command[Any]) -> int:
    from spurline.simulate.plan import plan_step

    how = command.ranks, hardware_of(command), routing_of(command)
    plan = plan_step(config_of(command), *how, num_points=CURVE_POINTS)
    if command.html:
        from spurline.simulate.page import make_page

        _write(command.html, make_page(plan, f"{command.config} on {command.ranks} x {plan.device}"))
    if command.json:
        print(json.dumps(_as_json(plan)))
    else:
        print("\n".join(lines_of(plan, command.config)))
    if plan.fits:
        return 0
    print(f"{PROG}: {does_not_fit(command, plan)}", file=sys.stderr)
    return 1


def does_not_fit(command: Command[Any], plan: Plan) -> str:
    """One line with how much memory is missing and which options would help."""
    from spurline.simulate.search import what_would_help

    missing = gib(plan.peak_bytes - plan.capacity_bytes)
    helps = what_would_help(config_of(command), command.ranks, hardware_of(command), routing_of(command))
    options = ", ".join(f"{option} ({gib(better.peak_bytes)})" for option, better in helps[:3])
    hint = f"what would: {options}" if options else "no single option would help: try --search or more --ranks"
    return f"does not fit: {gib(plan.peak_bytes)} of {gib(plan.capacity_bytes)}, {missing} too much; {hint}"


def _search(command: Command[Any]) -> int:
    from spurline.simulate.search import search_layouts

    hardware = hardware_of(command)

    def say(line: str) -> None:
        print(f"tried {line}", file=sys.stderr, flush=True)

    found = search_layouts(config_of(command), command.ranks, hardware, routing_of(command), say=say)
    best = [plan for _, plan in found[: command.best]]
    if not best:
        too_large = f"no layout of {command.ranks} ranks fits {hardware.name}: more ranks, or a smaller"
        print(f"{PROG}: {too_large} --training.local_batch_size or --training.seq_len", file=sys.stderr)
        return 1
    if command.json:
        print(json.dumps([_as_json(plan) for plan in best]))
        return 0
    print(f"{command.config} on {command.ranks} x {hardware.name}: estimated from a few layers, fastest first")
    print(f"{'memory':>10}  {'step':>9}  {'exposed':>7}  {'tokens/s':>9}  {'MFU':>6}  options")
    for plan in best:
        print(_row(plan))
    return 0


def _row(plan: Plan) -> str:
    layout = plan.layout
    exposed = sum(plan.exposed_seconds.values()) / plan.step_seconds
    options = [
        f"--parallelism.{name}_parallel_degree {layout[key]}"
        for name, key in (("pipeline", "pp"), ("context", "cp"), ("tensor", "tp"), ("expert", "ep"))
        if layout[key] > 1
    ]
    options.append(f"--activation_checkpoint.mode {layout['recompute']}")
    return (
        f"{gib(plan.peak_bytes):>10}  {plan.step_seconds:7.3f} s  {exposed:7.0%}  {human(plan.tokens_per_second):>9}"
        f"  {plan.mfu:6.1%}  {' '.join(options)}"
    )


def lines_of(plan: Plan, name: str) -> list[str]:
    """The plan as text."""
    layout = plan.layout
    axes = ", ".join(
        f"{key} {layout[key]}" for key in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp") if layout[key] > 1
    )
    batch = f"{layout['local_batch_size']} x {layout['seq_len']:,} tokens"
    micro = f" x {layout['micro_batches']} micro-batches" if layout["micro_batches"] > 1 else ""
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines = [
        f"{name} on {layout['ranks']} x {plan.device} ({axes or 'one rank'}), {layout['dtype']},"
        f" recompute {layout['recompute']}, {batch}{micro} a rank, routing {plan.routing}",
        "",
        f"memory    {gib(plan.peak_bytes)} at the peak, of {gib(plan.capacity_bytes)} that a step may use: {verdict}",
        f"          in {plan.peak_phase}{f' of {plan.peak_module}' if plan.peak_module else ''}",
        *(f"  {gib(size):>10}  {holder}" for holder, size in plan.holders.items() if size),
        "",
    ]
    if plan.stages:
        lines += [
            f"pipeline  ranks wait for other stages in {plan.bubble:.1%} of the time of all micro-batches (bubble)",
            *map(_stage_line, plan.stages),
            "",
        ]
    if plan.largest:
        lines += ["largest at the peak", *map(_largest_line, plan.largest), ""]
    lines += [
        f"{'collectives of a step':56} calls      bytes    in node  to others",
        *map(_traffic_line, plan.traffic),
        "",
        f"compute   {human_flops(sum(plan.flops.values()))} a rank, the model's share {human_flops(plan.model_flops)};"
        f" {plan.launches:,} kernels, {plan.host_reads} host waits",
        f"time      {plan.step_seconds:.3f} s a step at best: {plan.kernel_seconds:.3f} s of kernels,"
        f" {sum(plan.exposed_seconds.values()):.3f} s of waiting; {human(plan.tokens_per_second)} tokens/s,"
        f" MFU at most {plan.mfu:.1%}",
        *_time_lines(plan),
    ]
    return lines


def _stage_line(stage: dict[str, Any]) -> str:
    layers = " and ".join(f"{first} to {end - 1}" for first, end in stage["layers"])
    memory = "" if stage["peak_bytes"] is None else gib(stage["peak_bytes"])
    times = f"{stage['busy_seconds']:.3f} s, bubble {stage['bubble']:.1%}"
    return f"  {memory:>10}  rank {stage['rank']}, layers {layers}: {times}"


def _largest_line(row: dict[str, Any]) -> str:
    what = f"{row['op']} {row['line']}".strip() or "all"
    return f"  {gib(row['bytes']):>10}  {row['holder']}: {row['tensors']} x {row['dtype']}, {what}"


def _traffic_line(row: Any) -> str:
    what = f"{row.kind} over {row.axis} ({row.group_size}), {row.dtype}, {row.phase}"
    sizes = f"{gb(row.num_bytes):>10} {gb(row.intra_bytes):>10} {gb(row.inter_bytes):>10}"
    return f"  {what:54} {row.calls:5} {sizes}"


def _time_lines(plan: Plan) -> list[str]:
    """Each collective's time, overlapped and exposed."""
    lines = []
    for label, seconds in sorted(plan.collective_seconds.items(), key=lambda item: -item[1]):
        exposed = plan.exposed_seconds.get(label, 0.0)
        if seconds > 0.001 * plan.step_seconds:
            lines.append(
                f"  {seconds:8.3f} s  {label}: {max(0.0, seconds - exposed):.3f} overlapped, {exposed:.3f} exposed"
            )
    others = {label: s for label, s in plan.exposed_seconds.items() if label not in plan.collective_seconds}
    return lines + [
        f"  {s:8.3f} s  waiting for {label}" for label, s in others.items() if s > 0.001 * plan.step_seconds
    ]


def _as_json(plan: Plan) -> dict[str, Any]:
    derived = {"fits": plan.fits, "tokens_per_second": plan.tokens_per_second}
    return asdict(plan) | derived


def _write(path: str, page: str) -> None:
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--html {path}: {error.strerror}") from None


def gb(num_bytes: float) -> str:
    return human(num_bytes, [" B", " KB", " MB", " GB", " TB"])
