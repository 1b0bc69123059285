"""Which stages a rank has, how many micro-batches a schedule takes, and where a model is cut."""

import itertools
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from spurline.models.common.costs import Cost, ModelCosts
from spurline.models.deepseek_v3.configs import deepseek_v3_671b
from spurline.models.qwen3_vl.configs import qwen3_vl_debugmodel_moe
from spurline.parallel.stages import (
    SCHEDULES,
    SLACK,
    cut_layers,
    micro_batch_problem,
    num_stages,
    rank_of_stage,
    stages_of_rank,
)


def torch_schedule(schedule: str, pp: int, number: int) -> Any:
    """Torch's own schedule of the first rank, of stages that are not there."""

    def stage(index: int) -> Any:
        return SimpleNamespace(
            stage_index=index, num_stages=num_stages(schedule, pp), group_size=pp, group_rank=0, submod=nn.Module()
        )

    own = [stage(index) for index in stages_of_rank(schedule, pp, 0)]
    several = SCHEDULES[schedule].stages_per_rank > 1
    kind = get_schedule_class(SCHEDULES[schedule].torch_name)
    return kind(own if several else own[0], number)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_stages_are_where_torch_has_them(schedule: str, pp: int) -> None:
    stages = range(num_stages(schedule, pp))
    assert sorted(s for rank in range(pp) for s in stages_of_rank(schedule, pp, rank)) == list(stages)
    if SCHEDULES[schedule].stages_per_rank > 1:
        theirs = torch_schedule(schedule, pp, 4 * pp).stage_index_to_group_rank
        assert theirs == {stage: rank_of_stage(schedule, pp, stage) for stage in stages}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_every_number_of_micro_batches_that_is_accepted_works_in_torch(schedule: str, pp: int) -> None:
    accepted = [number for number in range(1, 4 * pp + 2) if not micro_batch_problem(schedule, pp, number)]
    assert accepted
    assert (1 in accepted) == (schedule == "GPipe")
    for number in accepted:
        torch_schedule(schedule, pp, number)


def test_the_first_rank_of_a_v_has_both_ends() -> None:
    assert [stages_of_rank("ZBV", 3, rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [stages_of_rank("Interleaved1F1B", 3, rank) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]


def costs_of(flops: list[int], params: list[int], ends: tuple[Cost, Cost]) -> ModelCosts:
    layers = tuple(Cost(p, p, f) for f, p in zip(flops, params, strict=True))
    return ModelCosts(ends[0], layers, ends[1])


any_cost = st.integers(1, 30)


@given(st.lists(st.tuples(any_cost, any_cost), min_size=4, max_size=7), st.integers(1, 4), any_cost, st.integers(1, 2))
def test_no_other_cut_is_faster_or_as_fast_and_smaller(
    layers: list[tuple[int, int]], stages: int, end: int, first_at_least: int
) -> None:
    if stages + first_at_least - 1 > len(layers):
        return
    costs = costs_of([f for f, _ in layers], [p for _, p in layers], (Cost(end, end, 0), Cost(end, end, 2 * end)))

    def measured(cut: list[tuple[int, int]]) -> tuple[int, int]:
        parts = [sum(costs.layers[first:stop], Cost(0, 0, 0)) for first, stop in cut]
        parts[0] += costs.embed
        parts[-1] += costs.head
        return max(part.flops_per_token for part in parts), max(part.params for part in parts)

    cut = cut_layers(costs, stages, first_at_least)
    assert [first for first, _ in cut] == [0, *(stop for _, stop in cut[:-1])]
    assert cut[-1][1] == len(layers)
    assert all(first < stop for first, stop in cut)
    assert cut[0][1] >= first_at_least
    borders = itertools.combinations(range(1, len(layers)), stages - 1)
    others = [[*itertools.pairwise((0, *border, len(layers)))] for border in borders]
    all_measured = [measured(other) for other in others if other[0][1] >= first_at_least]
    fastest = min(flops for flops, _ in all_measured)
    flops, params = measured(cut)
    assert flops <= SLACK * fastest
    assert params == min(other for speed, other in all_measured if speed <= SLACK * fastest)


def test_head_and_dense_layers_count_in_a_published_model() -> None:
    costs = deepseek_v3_671b().model.costs(4096)
    cut = cut_layers(costs, 16)
    sizes = [end - first for first, end in cut]
    assert sum(sizes) == 61
    assert sizes[-1] < max(sizes)  # the head and the prediction module are as much work as layers
    flops = [sum(layer.flops_per_token for layer in costs.layers[first:end]) for first, end in cut]
    assert max(flops[:-1]) < 1.1 * (sum(flops) + costs.head.flops_per_token) / 16 * 1.1


def test_pictures_need_the_layers_behind_which_features_are_added_on_the_first_stage() -> None:
    model = qwen3_vl_debugmodel_moe().model
    assert model.parallel_facts().first_stage_layers == len(model.vision.deepstack_layers)
    deep = replace(model, num_layers=4)
    assert cut_layers(deep.costs(64), 2, deep.parallel_facts().first_stage_layers)[0][1] >= 2


def test_stages_load_without_torch() -> None:
    code = "import sys, spurline.parallel.stages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
