"""A simulated step against what is known of it: formulas, the model's own counts, and a second way to count."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.tensor.debug

from spurline.config import ActivationCheckpoint, Parallelism, RunConfig, Training
from spurline.hardware import hardware_named
from spurline.simulate.memory import GRADIENTS, KEPT, OPTIMIZER, PARAMETERS, rounded
from spurline.simulate.plan import summarize
from spurline.simulate.routing import zipf
from spurline.simulate.run import Simulation, simulate_step
from spurline.testing.tiny import tiny_model

H100 = hardware_named("h100")
MODEL = tiny_model(dim=64, num_heads=4, dense_hidden_dim=128, moe={"hidden_dim": 64})
CONFIG: RunConfig[Any] = RunConfig(
    model=MODEL, training=Training(seq_len=32, local_batch_size=2, dtype="bfloat16"), parallelism=Parallelism()
)


def simulate(num_ranks: int, config: RunConfig[Any] = CONFIG, routing: Any = None, **degrees: int) -> Simulation:
    options = {f"{name}_degree": degree for name, degree in degrees.items()}
    return simulate_step(replace(config, parallelism=Parallelism(**options)), num_ranks, H100, routing)


@pytest.fixture(scope="module")
def ep4() -> Simulation:
    return simulate(8, expert_parallel=4)


def test_sharded_state_is_what_the_parameter_count_says(ep4: Simulation) -> None:
    """fp32 parameters over 8 ranks, twice as much for AdamW, and as much for gradients; rounding apart."""
    end_of_backward = next(begin for name, begin, _ in ep4.trace.phases if name == "optimizer")
    held = ep4.memory.by_holder(end_of_backward)
    share = 4 * MODEL.num_params() / 8
    granules = 512 * 2 * sum(a.holder == PARAMETERS for a in ep4.memory.held_at(end_of_backward))
    assert share <= held[PARAMETERS] <= share + granules
    assert 2 * share <= held[OPTIMIZER] <= 2 * share + 2 * granules
    assert share <= held[GRADIENTS] <= share + granules


def test_flops_are_those_of_the_model(ep4: Simulation) -> None:
    """The model's own formula counts matmuls, three times the forward pass; attention without its recomputation."""
    plan = summarize(ep4)
    matmuls = plan.flops["matmul"] + plan.flops["experts"]
    tokens = 2 * 32
    attention = 12 * MODEL.num_layers * tokens * 32 * MODEL.num_heads * 6 // 2
    assert matmuls + attention == pytest.approx(plan.model_flops, rel=0.02)


def test_rows_cross_the_network_in_the_compute_dtype(ep4: Simulation) -> None:
    """K rows a token of width D in bfloat16, there (with 16 bytes for the weight) and back, in both passes."""
    exchanges = [one.collective for one in ep4.trace.collectives if one.collective.kind == "all-to-all"]
    rows = [c for c in exchanges if c.dtype == "bfloat16"]
    assert len(rows) == 2 * 2 * 2
    num_rows = 2 * 32 * 2
    sizes = [num_rows * 64 * 2] * 4 + [num_rows * (64 * 2 + 16)] * 4
    assert sorted(c.num_bytes for c in rows) == pytest.approx(sizes, rel=0.05)
    for c in rows:
        assert (c.axis, c.group_size) == ("ep", 4)
        assert c.inter_bytes == 0
        assert c.intra_bytes == pytest.approx(c.num_bytes * 3 / 4, rel=0.1)


def test_a_group_across_nodes_uses_the_links_between_them() -> None:
    node_of_two = replace(H100, gpus_per_node=2)
    done = simulate_step(replace(CONFIG, parallelism=Parallelism(expert_parallel_degree=4)), 8, node_of_two)
    rows = next(one.collective for one in done.trace.collectives if one.collective.kind == "all-to-all")
    assert rows.inter_bytes == pytest.approx(rows.num_bytes / 2, rel=0.1)
    gathers = [one.collective for one in done.trace.collectives if one.collective.axis == "dp_shard"]
    large = max(gathers, key=lambda c: c.num_bytes)
    # 8 ranks on 4 nodes: three quarters of the bytes come from outside, by two adapters.
    assert large.inter_bytes == pytest.approx(large.num_bytes * 3 / 4 / 2)
    assert large.intra_bytes == pytest.approx(large.num_bytes / 2)


def test_recomputation_keeps_less() -> None:
    kept = {}
    for mode in ("none", "selective", "full"):
        config = replace(CONFIG, activation_checkpoint=ActivationCheckpoint(mode=mode))  # type: ignore[arg-type]
        done = simulate(2, config)
        backward = next(begin for name, begin, _ in done.trace.phases if name == "backward")
        kept[mode] = done.memory.by_holder(backward)[KEPT]
    assert kept["full"] < 0.5 * kept["selective"] < 0.5 * kept["none"]
    # A block keeps its input; besides there is what the head and the loss keep.
    block_input = rounded(2 * 32 * 64 * 2)
    assert kept["full"] >= MODEL.num_layers * block_input


def test_the_hottest_rank_holds_more_and_takes_longer(ep4: Simulation) -> None:
    hot = simulate(8, routing=zipf(1.2, 8), expert_parallel=4)
    rows = {
        name: sum(one.collective.num_bytes for one in done.trace.collectives if one.collective.kind == "all-to-all")
        for name, done in (("even", ep4), ("hot", hot))
    }
    assert rows["hot"] > 1.2 * rows["even"]
    assert hot.memory.peak()[1] > ep4.memory.peak()[1]


def test_micro_batches_beyond_three_are_counted_by_the_second() -> None:
    def with_batches(number: int) -> Simulation:
        return simulate(2, replace(CONFIG, training=replace(CONFIG.training, global_batch_size=4 * number)))

    three, five = with_batches(3), with_batches(5)
    assert five.num_micro_batches == 5
    per_batch = (five.step_seconds - three.step_seconds) / 2
    assert 0.2 * three.step_seconds < per_batch < 0.5 * three.step_seconds
    assert five.memory.peak() == three.memory.peak()
    calls = {n: Counter() for n in (3, 5)}  # type: ignore[var-annotated]
    for number, done in ((3, three), (5, five)):
        for row in summarize(done).traffic:
            calls[number][row.phase] += row.calls
    assert calls[5]["optimizer"] == calls[3]["optimizer"]
    assert calls[5]["forward"] > calls[3]["forward"]


@pytest.mark.parametrize("degrees", [{"expert_parallel": 2}, {"pipeline_parallel": 2}])
def test_times_and_host_waits_add_up_for_many_micro_batches(degrees: dict[str, int]) -> None:
    def with_batches(number: int) -> Simulation:
        ranks = 2 * degrees.get("pipeline_parallel", 1)
        return simulate(
            ranks, replace(CONFIG, training=replace(CONFIG.training, global_batch_size=4 * number)), **degrees
        )

    some, many = with_batches(16), with_batches(64)
    first, plan = summarize(some), summarize(many)
    batches = [one.num_micro_batches - one.simulated_micro_batches for one in (some, many)]
    assert batches[0] < batches[1]
    if many.degrees.pp == 1:  # else the schedule decides when stages wait
        assert plan.kernel_seconds + sum(plan.exposed_seconds.values()) == pytest.approx(plan.step_seconds, rel=1e-9)
    reads = [one.totals["reads", ""] for one in (some, many)]
    reads_per_batch = len(many.moe_layers) if many.degrees.ep > 1 else 0
    # The first step of a process also copies a constant to the device.
    assert reads[1] - reads[0] == pytest.approx(reads_per_batch * (batches[1] - batches[0]), abs=1)
    for label in plan.collective_seconds:
        if label.startswith("reduce-scatter"):  # once a step
            assert plan.collective_seconds[label] == pytest.approx(first.collective_seconds[label])


def test_a_layout_does_not_depend_on_those_simulated_before() -> None:
    def traffic(**degrees: int) -> list[Any]:
        return summarize(simulate(8, tensor_parallel=2, **degrees)).traffic

    layouts: list[dict[str, int]] = [{}, {"context_parallel": 2}, {"data_parallel_replicate": 2}]
    alone = []
    for layout in layouts:
        torch.distributed.tensor.debug._clear_sharding_prop_cache()  # as in a process of its own
        alone.append(traffic(**layout))
    assert [traffic(**layout) for layout in (*layouts, *reversed(layouts))] == [*alone, *reversed(alone)]


def test_forced_balance_and_tensor_parallelism_run() -> None:
    config = replace(CONFIG, model=MODEL.with_forced_balance())
    done = simulate(8, config, tensor_parallel=2, expert_parallel=4)
    assert {"tp", "ep"} <= {one.collective.axis for one in done.trace.collectives}
    one_rank = simulate(1, config)
    assert not one_rank.trace.collectives


def test_nothing_of_the_simulation_is_left_behind() -> None:
    import torch.distributed as dist

    before = torch.Event, torch.is_autocast_enabled, torch.as_tensor, torch.Tensor.new_tensor
    simulate(2)
    assert not dist.is_initialized()
    assert (torch.Event, torch.is_autocast_enabled, torch.as_tensor, torch.Tensor.new_tensor) == before
    assert not hasattr(torch, "meta")
