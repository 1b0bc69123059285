"""Audit a step for what costs an accelerator time or memory, by layer and line of code, against a budget."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from spurline.config import RunConfig
from spurline.data.batch import Batch
from spurline.hardware import Hardware
from spurline.parallel.pipeline import PipelinedModel
from spurline.simulate.budget import Budget
from spurline.simulate.compiled import CompiledGraphs
from spurline.simulate.device import DEVICE
from spurline.simulate.memory import KEPT, Allocation
from spurline.simulate.recorder import HostAccess, Recorder
from spurline.simulate.routing import RoutingModel
from spurline.simulate.run import Simulation, simulate_step
from spurline.train.metrics.step_metrics import StepMetrics
from spurline.train.trainer import Trainer

LOG = "log"
LENGTHS = "lengths"
"""Phases of an audit after the step: log it, and run a compiled model on other sequence lengths."""


@dataclass(frozen=True)
class LayerRow:
    """Totals of one part of the model in a step."""

    name: str
    host_waits: int
    launches_forward: int
    launches_backward: int
    num_collectives: int
    collective_bytes: int
    kept_bytes: int
    cast_bytes: int


@dataclass(frozen=True)
class Audit:
    simulation: Simulation
    layers: list[LayerRow]
    graphs_by_length: list[int]
    """Number of graphs compiled for the first, second and third sequence length."""

    @property
    def config(self) -> RunConfig[Any]:
        return self.simulation.config


def audit_step(
    config: RunConfig[Any], num_ranks: int, hardware: Hardware, routing: RoutingModel | None = None
) -> Audit:
    """Take a step, log it, and run a compiled model on two more sequence lengths, as an accelerator would."""
    by_length: list[int] = []

    def after_step(trainer: Trainer, recorder: Recorder, metrics: StepMetrics) -> None:
        with recorder.in_phase(LOG):
            metrics.read()
        if config.compile.enable:
            with recorder.in_phase(LENGTHS):
                by_length.extend(run_other_lengths(trainer, recorder.graphs))

    done = simulate_step(config, num_ranks, hardware, routing, after_step=after_step, warm_up=True)
    first = done.graphs.num_graphs - sum(by_length)
    return Audit(done, layer_rows(done), [first, *by_length])


def run_other_lengths(trainer: Trainer, graphs: CompiledGraphs) -> Iterator[int]:
    """Run forward and backward at 3/4 and 1/2 of the sequence length; yields the number of new graphs for each.

    The first makes the compiler treat lengths as dynamic, so only the second must need no new graph.
    """
    size, length = trainer.config.training.local_batch_size, trainer.config.training.seq_len
    first_stage = trainer.model.parts[0] if isinstance(trainer.model, PipelinedModel) else None
    for other in (length * 3 // 4, length // 2):
        before = graphs.num_graphs
        tokens_BL = torch.zeros(size, other, dtype=torch.int64)
        trainer.loss_of(Batch(tokens_BL, tokens_BL.clone()).to(DEVICE), first_stage).sum().backward()
        yield graphs.num_graphs - before


def part_of(module: str) -> str:
    """The block that a module belongs to (layers.3), or the part of the model outside of blocks."""
    names = module.split(".")
    if len(names) > 1 and names[1].isdigit():
        return ".".join(names[:2])
    return names[0] or "step"


_COLUMNS = ("waits", "forward", "backward", "collectives", "bytes", "kept", "casts")


def layer_rows(done: Simulation) -> list[LayerRow]:
    trace = done.trace
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for (phase, module), number in trace.launches.items():
        if phase in ("forward", "backward"):
            sums[part_of(module)][phase] += number
    for access in waits(trace.host, "forward"):
        sums[part_of(access.place.module)]["waits"] += 1
    for one in trace.collectives:
        if one.phase in ("forward", "backward"):
            row = sums[part_of(one.place.module)]
            row["collectives"] += 1
            row["bytes"] += one.collective.num_bytes
    for cast in trace.casts:
        if cast.phase in ("forward", "backward"):
            sums[part_of(cast.place.module)]["casts"] += cast.num_bytes
    for allocation in done.memory.all:
        if allocation.holder == KEPT:
            sums[part_of(allocation.place.module)]["kept"] += allocation.num_bytes
    order = sorted(sums, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")])
    return [LayerRow(name, *(sums[name][column] for column in _COLUMNS)) for name in order]


def waits(accesses: Iterable[HostAccess], *phases: str) -> list[HostAccess]:
    """The accesses in these phases in which the host waits for the device."""
    return [access for access in accesses if access.blocking and access.phase in phases]


def kept_weights(done: Simulation) -> list[Allocation]:
    """Weight copies saved for the backward pass: in the shape of a parameter, and cast to the compute dtype."""
    casts = [a for a in done.memory.all if a.holder == KEPT and a.op == "_to_copy"]
    return [a for a in casts if a.shape in done.weights and a.dtype == done.config.training.dtype]


def violations(audit: Audit, budget: Budget) -> list[str]:
    """One line for each budget that is exceeded."""
    done = audit.simulation
    in_layers, outside = waits_by_part(done)
    found = _layer_violations(done, in_layers, budget)
    for what, accesses, most in (
        ("a step", outside, budget.host_waits_per_step),
        ("a log", waits(done.trace.host, LOG), budget.host_waits_per_log),
    ):
        if most is not None and len(accesses) > most:
            found.append(f"{what}: the host waits {len(accesses)} times, {most} allowed: {where(accesses)}")
    found += _gather_violations(done, budget) + _kept_violations(done, budget)
    if audit.config.compile.enable:
        found += _graph_violations(audit, budget)
    return found


def waits_by_part(done: Simulation) -> tuple[dict[str, list[HostAccess]], list[HostAccess]]:
    """Host waits in the forward pass of each MoE layer, and those anywhere else in a step.

    A compiled graph does not record which layer it runs for: all waits of the forward pass are those of "layers".
    """
    forward = waits(done.trace.host, "forward")
    outside = waits(done.trace.host, "data", "step", "backward", "optimizer")
    if done.config.compile.enable:
        return {"layers": forward}, outside
    with_experts = {part_of(path) for path in done.moe_layers}
    in_layers: dict[str, list[HostAccess]] = defaultdict(list)
    for access in forward:
        part = part_of(access.place.module)
        (in_layers[part] if part in with_experts else outside).append(access)
    return in_layers, outside


def _layer_violations(done: Simulation, in_layers: dict[str, list[HostAccess]], budget: Budget) -> list[str]:
    allowed, moe = budget.host_waits_per_layer, getattr(done.config.model, "moe", None)
    if allowed is None:
        allowed = 0 if moe is None else moe.host_reads
    num_layers = len(done.moe_layers) if done.config.compile.enable else 1
    limit = allowed * num_layers
    return [
        f"{layer}: the host waits {len(accesses)} times in forward, {limit} allowed: {where(accesses)}"
        for layer, accesses in sorted(in_layers.items())
        if len(accesses) > limit * done.simulated_micro_batches
    ]


def _gather_violations(done: Simulation, budget: Budget) -> list[str]:
    wanted = done.config.training.dtype
    in_step = [one for one in done.trace.collectives if one.phase in ("forward", "backward") and one.place.in_fsdp]
    gathers = [one for one in in_step if one.collective.kind == "all-gather"]
    wrong = [one for one in gathers if one.collective.dtype != wanted]
    # Parameters that the model keeps in float32 may be gathered once in forward and once in backward.
    by_design = 2 * done.simulated_micro_batches * done.float32_bytes
    num_wrong = max(0, sum(one.collective.num_bytes for one in wrong) - by_design)
    share = num_wrong / max(1, sum(one.collective.num_bytes for one in gathers))
    if budget.gather_dtype_share is None or share <= budget.gather_dtype_share:
        return []
    names = ", ".join(sorted({part_of(one.place.module) for one in wrong})[:4])
    dtypes = ", ".join(sorted({one.collective.dtype for one in wrong}))
    return [
        f"all-gather: {share:.0%} of the bytes of parameters in {dtypes}, {budget.gather_dtype_share:.0%} allowed"
        f" (training.dtype is {wanted}): {names}"
    ]


def _kept_violations(done: Simulation, budget: Budget) -> list[str]:
    kept = kept_weights(done)
    total = sum(allocation.num_bytes for allocation in kept)
    if budget.kept_weight_bytes is None or total <= budget.kept_weight_bytes:
        return []
    lines = Counter(allocation.place.line for allocation in kept)
    places = ", ".join(f"{number} x {line}" for line, number in lines.most_common(3))
    return [f"kept for backward: {total:,} bytes of cast weights, {budget.kept_weight_bytes:,} allowed: {places}"]


def _graph_violations(audit: Audit, budget: Budget) -> list[str]:
    found, graphs = [], audit.simulation.graphs
    if budget.graph_breaks is not None and graphs.num_breaks > budget.graph_breaks:
        reason = f": {graphs.break_reasons[0].splitlines()[0]}" if graphs.break_reasons else ""
        found.append(f"compile: {graphs.num_breaks} graph breaks, {budget.graph_breaks} allowed{reason}")
    last = audit.graphs_by_length[-1]
    if budget.recompiles is not None and len(audit.graphs_by_length) > 2 and last > budget.recompiles:
        found.append(f"compile: {last} graphs anew for a third sequence length, {budget.recompiles} allowed")
    return found


def where(accesses: list[HostAccess]) -> str:
    """The lines of code, most frequent first."""
    lines = Counter((access.place.line, access.what) for access in accesses)
    return ", ".join(f"{line} {what}" + (f" x {n}" if n > 1 else "") for (line, what), n in lines.most_common(4))
