"""Summarize a simulated step as plain data: memory, bytes by link, and time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from spurline.config import RunConfig
from spurline.hardware import Hardware
from spurline.parallel.stages import stages_of_rank
from spurline.simulate.memory import HOLDERS
from spurline.simulate.pipeline import SPLIT
from spurline.simulate.routing import RoutingModel
from spurline.simulate.run import Simulation, simulate_step
from spurline.simulate.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    pipeline_times,
    schedule_order,
)
from spurline.simulate.timeline import Efficiency

RESERVE = 0.06
"""Fraction of device memory for the runtime, the collectives library's buffers, and fragmentation."""
LARGEST = 12
"""How many of the largest groups of tensors at the peak are listed."""


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind in a step."""

    kind: str
    axis: str
    group_size: int
    dtype: str
    phase: str
    calls: int
    num_bytes: int
    intra_bytes: float
    inter_bytes: float


@dataclass(frozen=True)
class Plan:
    """One step of the rank with the most work."""

    layout: dict[str, Any]
    device: str
    routing: str
    tokens_per_step: int
    peak_bytes: int
    capacity_bytes: int
    """Device memory that a step may use."""
    peak_phase: str
    peak_module: str
    holders: dict[str, int]
    """Bytes at the peak by holder."""
    largest: list[dict[str, Any]]
    traffic: list[Traffic]
    flops: dict[str, int]
    model_flops: int
    step_seconds: float
    kernel_seconds: float
    collective_seconds: dict[str, float]
    exposed_seconds: dict[str, float]
    """Seconds in which the device computes nothing, by what it waits for."""
    mfu: float
    host_reads: int
    launches: int
    simulation_seconds: float
    stages: list[dict[str, Any]] = field(default_factory=list)
    """For each rank of a pipeline: its layers, memory, and the fraction of time it waits for other stages (bubble)."""
    bubble: float = 0.0
    """The bubble averaged over all ranks of the pipeline."""
    estimated: bool = False
    """Whether it is extrapolated from a few layers."""
    curve: dict[str, Any] = field(default_factory=dict)
    """Memory over the step by holder: moments, bytes, and the start of each phase."""

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.capacity_bytes

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds if self.step_seconds else 0.0


def plan_step(
    config: RunConfig[Any],
    num_ranks: int,
    hardware: Hardware,
    routing: RoutingModel | None = None,
    efficiency: Efficiency | None = None,
    num_points: int = 0,
) -> Plan:
    """Simulate a step of the config and summarize it; num_points is the resolution of the memory curve."""
    eager = replace(config, compile=replace(config.compile, enable=False))
    if config.parallelism.pipeline_parallel_degree > 1:
        done = {
            rank: simulate_step(eager, num_ranks, hardware, routing, efficiency, pipeline_rank=rank)
            for rank in simulated_ranks(config.parallelism.pipeline_parallel_degree)
        }
        return _with_stages(done, efficiency or Efficiency(), num_points)
    return summarize(simulate_step(eager, num_ranks, hardware, routing, efficiency), num_points)


def simulated_ranks(pp: int) -> list[int]:
    """The pipeline ranks to simulate: all up to 4, else the first, the last and two in between."""
    return list(range(pp)) if pp <= 4 else [0, 1, pp // 2, pp - 1]


def _with_stages(done: dict[int, Simulation], efficiency: Efficiency, num_points: int) -> Plan:
    """The plan of the rank that needs the most memory, with the step time of the pipeline schedule."""
    plans = {rank: summarize(one, num_points) for rank, one in done.items()}
    largest = max(plans, key=lambda rank: plans[rank].peak_bytes)
    one, plan = done[largest], plans[largest]
    d, training, schedule = one.degrees, one.config.training, one.config.parallelism.pipeline_parallel_schedule
    measured = {key: seconds for other in done.values() for key, seconds in other.stage_seconds.items()}
    layers = one.layers_of_stages

    def seconds_of(kind: str, stage: int) -> float:
        way = FORWARD if kind == FORWARD else BACKWARD
        if (way, stage) not in measured:  # scaled by layers from the nearest simulated stage
            near = min((s for _, s in measured), key=lambda s: (abs(s - stage), s))
            (first, end), (near_first, near_end) = layers[stage], layers[near]
            measured[way, stage] = measured[way, near] * (end - first) / (near_end - near_first)
        return measured[way, stage] * (SPLIT if kind in (BACKWARD_INPUT, BACKWARD_WEIGHT) else 1.0)

    hidden_bytes = training.local_batch_size * training.seq_len * one.config.model.dim // (d.cp * d.tp)
    hidden_bytes *= 2 if training.dtype == "bfloat16" else 4
    link = one.hardware.inter_node_bandwidth if d.world > one.hardware.gpus_per_node else 0.0
    link = link or one.hardware.intra_node_bandwidth
    transfer = hidden_bytes / (link * efficiency.link) + efficiency.latency_seconds
    order = schedule_order(schedule, d.pp, one.num_micro_batches)
    times = pipeline_times(order, seconds_of, transfer)
    of_micro_batches = sum(seconds_of(*key) * one.simulated_micro_batches for key in one.stage_seconds)
    seconds = times.seconds + max(0.0, one.step_seconds - of_micro_batches)
    stages = [
        {
            "rank": rank,
            "layers": [list(layers[stage]) for stage in stages_of_rank(schedule, d.pp, rank)],
            "peak_bytes": plans[rank].peak_bytes if rank in plans else None,
            "busy_seconds": times.busy[rank],
            "bubble": times.bubbles[rank],
        }
        for rank in range(d.pp)
    ]
    waiting = times.seconds - times.busy[largest]
    return replace(
        plan,
        step_seconds=seconds,
        exposed_seconds={**plan.exposed_seconds, "other pipeline stages": waiting},
        mfu=plan.model_flops / (seconds * one.hardware.bf16_flops),
        stages=stages,
        bubble=times.bubble,
        simulation_seconds=sum(other.simulation_seconds for other in done.values()),
    )


def summarize(done: Simulation, num_points: int = 0) -> Plan:
    training, degrees, hardware = done.config.training, done.degrees, done.hardware
    moment, peak_bytes = done.memory.peak()
    phase, module = _where(done, moment)
    tokens = training.local_batch_size * training.seq_len * done.num_micro_batches * degrees.dp
    model_flops = done.config.model.flops_per_token(training.seq_len) * tokens // degrees.world
    labels = {one.collective.label for one in done.trace.collectives}
    busy, exposed, flops = (_of(done, kind) for kind in ("busy", "exposed", "flops"))
    longest_first = sorted(exposed, key=lambda label: -exposed[label])
    return Plan(
        layout=layout_of(done),
        device=hardware.name,
        routing=done.routing.name,
        tokens_per_step=tokens,
        peak_bytes=peak_bytes,
        capacity_bytes=int(hardware.memory_bytes * (1 - RESERVE)),
        peak_phase=phase,
        peak_module=module,
        holders=done.memory.by_holder(moment),
        largest=_largest(done, moment),
        traffic=_traffic(done),
        flops={kind: int(total) for kind, total in flops.items()},
        model_flops=model_flops,
        step_seconds=done.step_seconds,
        kernel_seconds=sum(seconds for kind, seconds in busy.items() if kind not in labels),
        collective_seconds={label: busy[label] for label in sorted(labels)},
        exposed_seconds={label: exposed[label] for label in longest_first if exposed[label] > 0},
        mfu=model_flops / (done.step_seconds * hardware.bf16_flops),
        host_reads=int(done.totals["reads", ""]),
        launches=int(done.totals["launches", ""]),
        simulation_seconds=done.simulation_seconds,
        curve=_curve(done, num_points) if num_points else {},
    )


def layout_of(done: Simulation) -> dict[str, Any]:
    d, config = done.degrees, done.config
    return {
        "ranks": d.world,
        "pp": d.pp,
        "dp_replicate": d.dp_replicate,
        "dp_shard": d.dp_shard,
        "cp": d.cp,
        "tp": d.tp,
        "ep": d.ep,
        "etp": d.etp,
        "recompute": config.activation_checkpoint.mode,
        "local_batch_size": config.training.local_batch_size,
        "seq_len": config.training.seq_len,
        "micro_batches": done.num_micro_batches,
        "dtype": config.training.dtype,
    }


def _where(done: Simulation, moment: int) -> tuple[str, str]:
    """The phase of a moment, and the module that allocated the last tensor before it."""
    phase = next((name for name, begin, _ in reversed(done.trace.phases) if begin <= moment), "step")
    last = max((a for a in done.memory.all if a.birth <= moment), key=lambda a: a.birth, default=None)
    return phase, last.place.module if last else ""


def _largest(done: Simulation, moment: int) -> list[dict[str, Any]]:
    """The largest groups of tensors at a moment, by holder, line of code, op and dtype."""
    groups: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for allocation in done.memory.held_at(moment):
        key = allocation.holder, allocation.place.line, allocation.op, allocation.dtype
        groups[key].append(allocation.num_bytes)
    ordered = sorted(groups.items(), key=lambda item: -sum(item[1]))[:LARGEST]
    return [
        {"holder": holder, "line": line, "op": op, "dtype": dtype, "tensors": len(sizes), "bytes": sum(sizes)}
        for (holder, line, op, dtype), sizes in ordered
    ]


def _traffic(done: Simulation) -> list[Traffic]:
    groups: dict[tuple[str, str, int, str, str], list[float]] = {}
    for one in done.trace.collectives:
        c = one.collective
        times = 1.0
        if one.phase in ("forward", "backward") and done.degrees.pp > 1:
            times = done.num_micro_batches / done.simulated_micro_batches
        elif one.phase in ("forward", "backward") and one.micro_batch == 2:
            times = done.repeats
        sums = groups.setdefault((c.kind, c.axis, c.group_size, c.dtype, one.phase), [0, 0, 0, 0])
        for index, value in enumerate((1, c.num_bytes, c.intra_bytes, c.inter_bytes)):
            sums[index] += times * value
    rows = [Traffic(*key, int(sums[0]), int(sums[1]), sums[2], sums[3]) for key, sums in groups.items()]
    return sorted(rows, key=lambda row: -row.num_bytes)


def _of(done: Simulation, what: str) -> dict[str, float]:
    return {label: total for (kind, label), total in done.totals.items() if kind == what}


def _curve(done: Simulation, num_points: int) -> dict[str, Any]:
    moments, held = done.memory.curves_by_holder(num_points)
    phases = [(name, moment) for name, moment, _ in done.trace.phases if name not in ("step", "end")]
    return {"moments": moments, "bytes": {holder: held[holder] for holder in HOLDERS}, "phases": phases}
