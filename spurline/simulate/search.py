"""Estimates from a few layers, and a search for the layouts that fit and are fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from spurline.config import Parallelism, RunConfig
from spurline.hardware import Hardware
from spurline.parallel.degrees import degree_problems
from spurline.simulate.plan import Plan, Traffic, plan_step
from spurline.simulate.routing import RoutingModel
from spurline.simulate.timeline import Efficiency

FEW_LAYERS = 4
"""Models with up to this many MoE layers are simulated in full; deeper ones are estimated from two and four."""


RECOMPUTE = ("none", "selective", "selective_resend", "full")
"""Activation checkpointing modes, from most to least memory."""


def estimate_step(
    config: RunConfig[Any],
    num_ranks: int,
    hardware: Hardware,
    routing: RoutingModel | None = None,
    efficiency: Efficiency | None = None,
) -> Plan:
    """Estimate plan_step within seconds at any depth: blocks are alike, so two depths determine the cost of all."""
    model = config.model
    others = getattr(model, "num_dense_layers", 0)
    others = 0 if others >= model.num_layers else others
    how = num_ranks, hardware, routing, efficiency
    is_cut = config.parallelism.pipeline_parallel_degree > 1  # then a rank has few layers anyway
    if is_cut or model.num_layers - others <= FEW_LAYERS:
        return plan_step(config, *how)
    low, high = (
        plan_step(replace(config, model=replace(model, num_layers=others + layers)), *how)
        for layers in (FEW_LAYERS // 2, FEW_LAYERS)
    )
    return extrapolate(low, high, (model.num_layers - others - FEW_LAYERS) / (FEW_LAYERS // 2), config)


def extrapolate(low: Plan, high: Plan, steps: float, config: RunConfig[Any]) -> Plan:
    """Extrapolate linearly: add `steps` times the difference between the two plans to the second."""

    def more(before: float, after: float) -> float:
        return after + steps * (after - before)

    def more_of(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        return {key: type(value)(more(before.get(key, 0), value)) for key, value in after.items()}

    def key_of(row: Traffic) -> tuple[str, ...]:
        return row.kind, row.axis, row.dtype, row.phase

    rows = {key_of(row): row for row in low.traffic}
    traffic = []
    for row in high.traffic:
        first = rows.get(key_of(row), replace(row, calls=0, num_bytes=0, intra_bytes=0.0, inter_bytes=0.0))
        names = ("calls", "num_bytes", "intra_bytes", "inter_bytes")
        values = {name: type(getattr(row, name))(more(getattr(first, name), getattr(row, name))) for name in names}
        traffic.append(replace(row, **values))
    seconds = more(low.step_seconds, high.step_seconds)
    model_flops = config.model.flops_per_token(config.training.seq_len) * high.tokens_per_step // high.layout["ranks"]
    peak_flops = high.model_flops / (high.mfu * high.step_seconds)
    return replace(
        high,
        peak_bytes=int(more(low.peak_bytes, high.peak_bytes)),
        holders=more_of(low.holders, high.holders),
        largest=[],
        traffic=traffic,
        flops=more_of(low.flops, high.flops),
        model_flops=model_flops,
        step_seconds=seconds,
        kernel_seconds=more(low.kernel_seconds, high.kernel_seconds),
        collective_seconds=more_of(low.collective_seconds, high.collective_seconds),
        exposed_seconds=more_of(low.exposed_seconds, high.exposed_seconds),
        mfu=model_flops / (seconds * peak_flops),
        host_reads=int(more(low.host_reads, high.host_reads)),
        launches=int(more(low.launches, high.launches)),
        simulation_seconds=low.simulation_seconds + high.simulation_seconds,
        estimated=True,
    )


def search_layouts(
    config: RunConfig[Any],
    num_ranks: int,
    hardware: Hardware,
    routing: RoutingModel | None = None,
    efficiency: Efficiency | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[tuple[RunConfig[Any], Plan]]:
    """The layouts of these ranks that fit, fastest first, each with the least recomputation that fits."""
    found = []
    for parallelism in layouts(config, num_ranks, hardware):
        for mode in RECOMPUTE:
            changed = replace(
                config,
                parallelism=parallelism,
                activation_checkpoint=replace(config.activation_checkpoint, mode=mode),  # type: ignore[arg-type]
            )
            plan = estimate_step(changed, num_ranks, hardware, routing, efficiency)
            say(f"{describe_layout(plan)}: {plan.peak_bytes / 2**30:.1f} GiB, {plan.step_seconds:.3g} s")
            if plan.fits:
                found.append((changed, plan))
                break
    return sorted(found, key=lambda one: -one[1].tokens_per_second)


def layouts(config: RunConfig[Any], num_ranks: int, hardware: Hardware) -> Iterator[Parallelism]:
    """Candidates: TP within a node, EP of 1, within a node or over a few nodes, and FSDP over the rest."""
    given = config.parallelism
    node = hardware.gpus_per_node
    num_experts = config.model.parallel_facts().num_experts
    tensor = sorted({given.tensor_parallel_degree, 1, 2, 4, 8} & set(range(1, node + 1)))
    expert = {1, *(node * 2**i // 2 for i in range(6))} - {0} if num_experts else {1}
    for tp in tensor:
        for ep in sorted({given.expert_parallel_degree, *expert}):
            changed = replace(
                given,
                tensor_parallel_degree=tp,
                expert_parallel_degree=ep,
                expert_tensor_parallel_degree=1,
                data_parallel_shard_degree=-1,
            )
            if not degree_problems(changed, num_ranks, model=config.model, training=config.training):
                yield changed


def what_would_help(
    config: RunConfig[Any],
    num_ranks: int,
    hardware: Hardware,
    routing: RoutingModel | None = None,
    efficiency: Efficiency | None = None,
) -> list[tuple[str, Plan]]:
    """Single option changes that make a step fit, with the plan of each; fastest first."""
    changes: list[tuple[str, RunConfig[Any]]] = []
    for mode in RECOMPUTE[RECOMPUTE.index(config.activation_checkpoint.mode) + 1 :]:
        section = replace(config.activation_checkpoint, mode=mode)  # type: ignore[arg-type]
        changes.append((f"--activation_checkpoint.mode {mode}", replace(config, activation_checkpoint=section)))
    given = config.parallelism
    for name in ("expert_parallel_degree", "tensor_parallel_degree", "context_parallel_degree"):
        for factor in (2, 8):
            changed = replace(given, **{name: getattr(given, name) * factor, "data_parallel_shard_degree": -1})
            if not degree_problems(changed, num_ranks, model=config.model, training=config.training):
                option = f"--parallelism.{name} {getattr(changed, name)}"
                changes.append((option, replace(config, parallelism=changed)))
    if config.training.local_batch_size > 1:
        smaller = replace(config.training, local_batch_size=config.training.local_batch_size // 2)
        option = f"--training.local_batch_size {smaller.local_batch_size}"
        changes.append((option, replace(config, training=smaller)))
    tried = [(option, estimate_step(changed, num_ranks, hardware, routing, efficiency)) for option, changed in changes]
    return sorted(((option, plan) for option, plan in tried if plan.fits), key=lambda one: one[1].step_seconds)


def describe_layout(plan: Plan) -> str:
    layout = plan.layout
    axes = ", ".join(
        f"{name} {layout[name]}" for name in ("pp", "dp_replicate", "cp", "tp", "ep", "etp") if layout[name] > 1
    )
    return f"{axes or 'dp_shard only'}, recompute {layout['recompute']}"
