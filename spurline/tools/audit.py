"""`spurline audit`: report what stalls an accelerator during a step, by layer and line of code. Torch-free."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import tyro

from spurline.config import RunConfig
from spurline.simulate.budget import Budget
from spurline.tools.console import gib, human
from spurline.tools.options import resolve_command
from spurline.tools.parsing import described
from spurline.tools.simulation import SimulationCommand, command_problems, config_of, hardware_of, routing_of

if TYPE_CHECKING:
    from spurline.simulate.audit import Audit, LayerRow

PROG = "spurline audit"
EXAMPLES = """\
List what a training step does on an accelerator, without one: where the host waits
for the device (with file:line), collectives with their bytes and dtypes, kernels,
tensors saved for the backward pass and by which module, casts; with --compile, also
graphs, breaks and recompilations as the sequence length changes. The real trainer takes
one step as rank 0 of --ranks, on tensors without data.

examples
  spurline audit --module deepseek_v3 --config deepseek_v3_debugmodel --ranks 8 \\
      --parallelism.expert_parallel_degree 4
  spurline audit --module deepseek_v3 --config deepseek_v3_debugmodel --ranks 8 \\
      --parallelism.expert_parallel_degree 4 --compile --check

With --check, the exit code is 1 if anything exceeds its --budget, with one line for
each. All options of `spurline train` apply."""
R = TypeVar("R", bound=RunConfig[Any])


@dataclass(frozen=True, kw_only=True)
class Command(SimulationCommand[R], Generic[R]):
    """The options of `spurline audit`."""

    check: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Compare with the budgets: exit code 1 and one line for each one exceeded."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Print JSON instead of tables."""
    budget: Budget = field(default_factory=Budget)


def main(argv: list[str]) -> int:
    command = resolve_command(argv, Command, PROG, EXAMPLES, lambda c: command_problems(c) + c.budget.problems())
    return _audit(command)


def _audit(command: Command[Any]) -> int:
    from spurline.simulate.audit import audit_step, violations

    audit = audit_step(config_of(command), command.ranks, hardware_of(command), routing_of(command))
    found = violations(audit, command.budget) if command.check else []
    if command.json:
        print(json.dumps(_as_json(audit) | {"violations": found}))
    else:
        print("\n".join(lines_of(audit)))
    for line in found:
        print(f"{PROG}: {line}", file=sys.stderr)
    return 1 if found else 0


def lines_of(audit: Audit) -> list[str]:
    trace = audit.simulation.trace
    return [
        f"{'part':16} {'host waits':>10} {'kernels':>8} {'backward':>8} {'collectives':>11} {'their bytes':>11}"
        f" {'kept':>10} {'casts':>10}",
        *_layer_lines(audit.layers),
        "",
        *_section("the host waits for the device", Counter(_access(a) for a in trace.host if a.blocking)),
        *_section("copies that nothing waits for", Counter(_access(a) for a in trace.host if not a.blocking)),
        *_collective_lines(audit),
        *_kept_lines(audit),
        *_cast_lines(audit),
        *_graph_lines(audit),
    ]


def _layer_lines(rows: list[LayerRow]) -> list[str]:
    """One line per run of consecutive layers with the same numbers."""
    lines = []
    for numbers, group in groupby(rows, key=lambda row: list(asdict(row).values())[1:]):
        names = [row.name for row in group]
        name = names[0] if len(names) == 1 else f"{names[0]} - {names[-1].rpartition('.')[2]}"
        waits, forward, backward, calls, num_bytes, kept, casts = numbers
        lines.append(
            f"{name:16} {waits:10} {forward:8} {backward:8} {calls:11} {human(num_bytes):>11} {gib(kept):>10}"
            f" {gib(casts):>10}"
        )
    return lines


def _access(access: Any) -> str:
    direction = "device to host" if access.direction == "read" else "host to device"
    return f"{access.phase}: {access.place.line} {access.what} ({direction})"


def _section(title: str, lines: Counter[str]) -> list[str]:
    return [title, *(f"  {number:4} x {line}" for line, number in lines.most_common()), ""] if lines else []


def _collective_lines(audit: Audit) -> list[str]:
    sums: dict[str, list[int]] = {}
    for one in audit.simulation.trace.collectives:
        c = one.collective
        what = f"{one.phase}: {c.kind} over {c.axis} ({c.group_size}), {c.dtype}"
        row = sums.setdefault(what, [0, 0])
        row[0] += 1
        row[1] += c.num_bytes
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])
    lines = [f"  {calls:4} x {what}, {human(size)}B" for what, (calls, size) in ordered]
    return ["collectives", *lines, ""] if lines else []


def _kept_lines(audit: Audit, most: int = 12) -> list[str]:
    from spurline.simulate.memory import KEPT

    sums: Counter[str] = Counter()
    for a in audit.simulation.memory.all:
        if a.holder == KEPT:
            sums[f"{a.op}, {a.dtype}, {a.place.line}"] += a.num_bytes
    lines = [f"  {gib(size):>10}  {what}" for what, size in sums.most_common(most)]
    return [f"kept for backward: {gib(sum(sums.values()))}", *lines, ""] if lines else []


def _cast_lines(audit: Audit, most: int = 8) -> list[str]:
    sums: Counter[str] = Counter()
    for cast in audit.simulation.trace.casts:
        of = " of a weight" if cast.of_weight else ""
        sums[f"{cast.source} to {cast.target}{of}, {cast.place.line}"] += cast.num_bytes
    lines = [f"  {gib(size):>10}  {what}" for what, size in sums.most_common(most)]
    return [f"casts: {gib(sum(sums.values()))} moved", *lines, ""] if lines else []


def _graph_lines(audit: Audit) -> list[str]:
    if not audit.config.compile.enable:
        return []
    graphs, by_length = audit.simulation.graphs, audit.graphs_by_length
    more = ", ".join(f"{number} more for another" for number in by_length[1:])
    return [
        f"compiled graphs: {by_length[0]} for the first sequence length, {more}; {graphs.num_breaks} breaks",
        *(f"  break: {reason.splitlines()[0]}" for reason in graphs.break_reasons),
    ]


def _as_json(audit: Audit) -> dict[str, Any]:
    done = audit.simulation
    kept = [asdict(a) for a in done.memory.all if a.holder == "kept for backward"]
    return {
        "layers": [asdict(row) for row in audit.layers],
        "host": [asdict(access) for access in done.trace.host],
        "collectives": [asdict(one) for one in done.trace.collectives],
        "casts": [asdict(cast) for cast in done.trace.casts],
        "kept": kept,
        "graphs_by_length": audit.graphs_by_length,
        "graph_breaks": done.graphs.num_breaks,
    }
