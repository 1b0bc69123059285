"""Simulated pipelines: bubbles against formulas, and a plan of stages against what is known of them."""

from dataclasses import replace
from typing import Any

import pytest

from spurline.config import Parallelism, RunConfig, Training
from spurline.hardware import hardware_named
from spurline.parallel.stages import SCHEDULES, micro_batch_problem
from spurline.simulate.pipeline import few_micro_batches
from spurline.simulate.plan import plan_step
from spurline.simulate.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    pipeline_times,
    schedule_order,
)
from spurline.testing.tiny import tiny_model

SECONDS = {FORWARD: 1.0, BACKWARD: 2.0, BACKWARD_INPUT: 1.0, BACKWARD_WEIGHT: 1.0}


def bubble(schedule: str, pp: int, number: int) -> float:
    layers = 2 // SCHEDULES[schedule].stages_per_rank
    order = schedule_order(schedule, pp, number)
    return pipeline_times(order, lambda kind, stage: layers * SECONDS[kind]).bubble


@pytest.mark.parametrize(("pp", "number"), [(2, 2), (2, 8), (4, 8), (4, 16)])
def test_bubbles_are_those_of_the_literature(pp: int, number: int) -> None:
    """(pp - 1) / (m + pp - 1); with v stages a rank, a v-th of the numerator."""
    of_one = (pp - 1) / (number + pp - 1)
    assert bubble("GPipe", pp, number) == pytest.approx(of_one)
    assert bubble("1F1B", pp, number) == pytest.approx(of_one)
    of_two = (pp - 1) / 2 / (number + (pp - 1) / 2)
    assert bubble("Interleaved1F1B", pp, number) == pytest.approx(of_two)
    for schedule in ("InterleavedZeroBubble", "ZBV", "DualPipeV"):
        if not micro_batch_problem(schedule, pp, number):
            assert bubble(schedule, pp, number) <= of_two + 1e-9


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_micro_batch_goes_through_every_stage_once_in_each_direction(schedule: str) -> None:
    order = schedule_order(schedule, 2, 4)
    actions = [action for rank in order for action in rank]
    assert len(set(actions)) == len(actions)
    stages = range(2 * SCHEDULES[schedule].stages_per_rank)
    for kinds in ({FORWARD}, {BACKWARD, BACKWARD_INPUT}):
        done = sorted((a.stage, a.micro_batch) for a in actions if a.kind in kinds)
        assert done == [(stage, number) for stage in stages for number in range(4)]


def test_a_transfer_delays_the_next_stage() -> None:
    order = schedule_order("1F1B", 2, 2)
    without, with_it = (pipeline_times(order, lambda kind, stage: 1.0, seconds).seconds for seconds in (0.0, 0.25))
    assert with_it == without + 2 * 0.25  # there with the first micro-batch, back with the last


def test_few_micro_batches_fill_the_pipeline() -> None:
    assert few_micro_batches("1F1B", 4, 100) == 6
    assert few_micro_batches("1F1B", 4, 4) == 4
    assert micro_batch_problem("Interleaved1F1B", 4, few_micro_batches("Interleaved1F1B", 4, 64)) == ""


def test_a_plan_has_the_memory_of_each_stage_and_the_bubble() -> None:
    config: RunConfig[Any] = RunConfig(
        model=tiny_model(dim=64, dense_hidden_dim=128, num_layers=4, num_dense_layers=0, moe={"hidden_dim": 64}),
        training=Training(seq_len=32, local_batch_size=2, global_batch_size=32, dtype="bfloat16"),
        parallelism=Parallelism(pipeline_parallel_degree=2, expert_parallel_degree=2),
    )
    hardware = hardware_named("h100")
    plan = plan_step(config, 4, hardware)
    assert (plan.layout["pp"], plan.layout["micro_batches"], plan.tokens_per_step) == (2, 8, 32 * 32)
    assert [stage["layers"] for stage in plan.stages] == [[[0, 2]], [[2, 4]]]
    assert plan.bubble == pytest.approx(1 / 9, rel=0.35)  # stages are not quite alike: the last has the head
    assert plan.peak_bytes == max(stage["peak_bytes"] for stage in plan.stages)
    assert plan.exposed_seconds["other pipeline stages"] > 0
    interleaved = replace(config.parallelism, pipeline_parallel_schedule="Interleaved1F1B")
    shorter = plan_step(replace(config, parallelism=interleaved), 4, hardware)
    assert [stage["layers"] for stage in shorter.stages] == [[[0, 1], [2, 3]], [[1, 2], [3, 4]]]
    assert shorter.bubble < plan.bubble
