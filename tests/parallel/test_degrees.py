"""Which degrees work on how many ranks, and what is said of those that don't."""

import re
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.config import Parallelism, Training
from spurline.models.deepseek_v3.configs import deepseek_v3_debugmodel
from spurline.parallel import degrees as parallel_degrees
from spurline.parallel.degrees import Degrees, ParallelFacts, degree_problems, resolve_degrees
from spurline.parallel.stages import SCHEDULES

SHORT = {
    "replicate": "data_parallel_replicate_degree",
    "shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
}
MOE = ParallelFacts(num_heads=8, num_experts=16, expert_hidden_dim=96, num_layers=6)
GROUPED_HEADS = replace(MOE, num_kv_heads=2)
DENSE = ParallelFacts(num_heads=8)


@dataclass(frozen=True)
class Model:
    facts: ParallelFacts

    def parallel_facts(self) -> ParallelFacts:
        return self.facts


def degrees(**short: int) -> Parallelism:
    return Parallelism(**{SHORT[name]: degree for name, degree in short.items()})


def problems(world_size: int, facts: ParallelFacts = MOE, training: Training | None = None, **short: int) -> list[str]:
    return degree_problems(degrees(**short), world_size, model=Model(facts), training=training or Training())


def test_degrees_know_what_follows_from_them() -> None:
    d = Degrees(dp_replicate=2, dp_shard=4, tp=3, ep=2, etp=3)
    assert (d.world, d.dp, d.efsdp) == (24, 8, 2)
    d = Degrees(dp_replicate=2, dp_shard=4, tp=3, ep=2, etp=3, pp=2)
    assert (d.world, d.stage, d.dp, d.efsdp) == (48, 24, 8, 2)
    d = Degrees(dp_replicate=2, dp_shard=4, tp=3, ep=8, etp=3, cp=2)
    assert (d.world, d.dp, d.efsdp) == (48, 8, 1)


@pytest.mark.parametrize(
    ("world_size", "given", "expected"),
    [
        (1, {}, Degrees(1, 1, 1, 1, 1)),
        (8, {}, Degrees(1, 8, 1, 1, 1)),
        (24, {"replicate": 2, "tp": 3, "ep": 4}, Degrees(2, 4, 3, 4, 1)),
        (24, {"replicate": 2, "shard": 4, "tp": 3, "ep": 2, "etp": 6}, Degrees(2, 4, 3, 2, 6)),
        (24, {"replicate": 2, "tp": 3, "cp": 2}, Degrees(2, 2, 3, 1, 1, cp=2)),
        (24, {"replicate": 2, "pp": 3, "cp": 2}, Degrees(2, 2, 1, 1, 1, cp=2, pp=3)),
    ],
)
def test_the_ranks_that_are_left_take_the_place_of_minus_one(
    world_size: int, given: dict[str, int], expected: Degrees
) -> None:
    assert resolve_degrees(degrees(**given), world_size) == expected


@pytest.mark.parametrize(
    ("world_size", "given"),
    [
        (1, {}),
        (8, {}),
        (8, {"tp": 2}),
        (8, {"tp": 8, "ep": 8}),
        (8, {"replicate": 2, "shard": 2, "tp": 2}),
        (8, {"ep": 4, "etp": 2}),
        (8, {"replicate": 2, "ep": 4}),
        (8, {"cp": 8, "ep": 4}),
        (8, {"cp": 2, "tp": 2, "ep": 8}),  # a group of experts may have the ranks of several cp groups
        (6, {"shard": 3, "tp": 2, "ep": 2, "etp": 3}),  # a group of experts need not be made of whole tp groups
    ],
)
def test_degrees_that_work(world_size: int, given: dict[str, int]) -> None:
    assert problems(world_size, **given) == []


def parallelism(**short: int) -> str:
    return " ".join(f"--parallelism.{SHORT[name]} {degree}" for name, degree in short.items())


PRODUCT = "parallelism: data_parallel_replicate_degree {} x data_parallel_shard_degree {} x tensor_parallel_degree {}"


@pytest.mark.parametrize(
    ("world_size", "given", "facts", "expected"),
    [
        (
            6,
            {"shard": 4, "tp": 2},
            MOE,
            f"{PRODUCT.format(1, 4, 2)} = 8, but there are 6 ranks; nearest that works: {parallelism(shard=3)},"
            " or the same degrees on 8 ranks",
        ),
        (
            1,
            {"replicate": 2, "shard": 1},
            MOE,
            f"{PRODUCT.format(2, 1, 1)} = 2, but there is 1 rank; nearest that works: {parallelism(replicate=1)},"
            " or the same degrees on 2 ranks (torchrun starts them)",
        ),
        (
            7,
            {"replicate": 2, "tp": 2},
            MOE,
            "parallelism: data_parallel_replicate_degree 2 x tensor_parallel_degree 2 = 4 must divide the number of"
            f" ranks, but there are 7 ranks; nearest that works: {parallelism(tp=1, replicate=1)},"
            " or the same degrees on 8 ranks",
        ),
        (
            8,
            {"replicate": 2, "ep": 4, "etp": 2},
            MOE,
            "parallelism: expert_parallel_degree 4 x expert_tensor_parallel_degree 2 = 8 does not divide"
            " data_parallel_shard_degree 4 x tensor_parallel_degree 1 = 4;"
            f" nearest that works: {parallelism(replicate=1)}, or the same degrees on 16 ranks",
        ),
        (
            8,
            {"etp": 2},
            MOE,
            "parallelism.expert_tensor_parallel_degree 2 needs an expert_parallel_degree above 1;"
            f" nearest that works: {parallelism(etp=1)}",
        ),
        (
            12,
            {"ep": 3},
            MOE,
            "parallelism.expert_parallel_degree 3 does not divide the model's 16 experts;"
            f" nearest that works: {parallelism(ep=4)}",
        ),
        (
            32,
            {"ep": 32},
            MOE,
            "parallelism.expert_parallel_degree 32 is more than the model's 16 experts;"
            f" nearest that works: {parallelism(ep=16)}",
        ),
        (
            8,
            {"ep": 8},
            DENSE,
            "parallelism.expert_parallel_degree 8 needs a model with experts, and this one has none;"
            f" nearest that works: {parallelism(ep=1)}",
        ),
        (
            10,
            {"ep": 2, "etp": 5},
            MOE,
            "parallelism.expert_tensor_parallel_degree 5 does not divide the experts' hidden width 96;"
            f" nearest that works: {parallelism(etp=1)}",
        ),
        (
            6,
            {"tp": 3},
            MOE,
            "parallelism.tensor_parallel_degree 3 does not divide the model's 8 attention heads;"
            f" nearest that works: {parallelism(tp=2)}",
        ),
        (
            8,
            {"tp": 4},
            GROUPED_HEADS,
            "parallelism.tensor_parallel_degree 4 does not divide the model's 2 key and value heads;"
            f" nearest that works: {parallelism(tp=2)}",
        ),
    ],
)
def test_each_problem_is_spelled_out_with_the_nearest_that_works(
    world_size: int, given: dict[str, int], facts: ParallelFacts, expected: str
) -> None:
    assert problems(world_size, facts, **given) == [expected]


def test_sequence_shorter_than_the_ranks_that_share_it() -> None:
    assert problems(8, training=Training(seq_len=4), tp=4) == []
    assert problems(8, training=Training(seq_len=3), tp=4) == [
        "training.seq_len 3 is shorter than parallelism.tensor_parallel_degree 4, whose ranks share the positions of a"
        f" sequence; nearest that works: {parallelism(tp=2)}"
    ]


def test_context_parallelism_takes_its_part_of_the_ranks_and_of_the_positions() -> None:
    assert problems(8, cp=4, tp=2, shard=1) == []
    assert problems(8, cp=3) == [
        "parallelism: data_parallel_replicate_degree 1 x context_parallel_degree 3 x tensor_parallel_degree 1 = 3 must"
        f" divide the number of ranks, but there are 8 ranks; nearest that works: {parallelism(cp=2)},"
        " or the same degrees on 9 ranks"
    ]
    assert problems(8, training=Training(seq_len=3), cp=4) == [
        "training.seq_len 3 is shorter than parallelism.context_parallel_degree 4, whose ranks share the positions of a"
        f" sequence; nearest that works: {parallelism(cp=2)}"
    ]
    (told,) = problems(8, training=Training(seq_len=7), cp=4, tp=2)
    assert told.startswith(
        "training.seq_len 7 is shorter than parallelism.context_parallel_degree 4 x tensor_parallel_degree 2 = 8, whose"
    )


MICRO_BATCHES = Training(local_batch_size=2, global_batch_size=48)


def pipelined(world_size: int, schedule: Any = "1F1B", training: Training = MICRO_BATCHES, **short: int) -> list[str]:
    asked = replace(degrees(**short), pipeline_parallel_schedule=schedule)
    return degree_problems(asked, world_size, model=Model(MOE), training=training)


def test_pipeline_stages_take_their_part_of_the_ranks_and_of_the_layers() -> None:
    assert pipelined(8, pp=2, ep=4) == pipelined(8, "DualPipeV", pp=2) == pipelined(6, "Interleaved1F1B", pp=3) == []
    (told,) = pipelined(8, pp=3)
    assert told.startswith(
        "parallelism: pipeline_parallel_degree 3 x data_parallel_replicate_degree 1 x tensor_parallel_degree 1 = 3 must"
    )
    (told,) = pipelined(8, pp=2, ep=8)
    assert told.startswith(
        "parallelism: expert_parallel_degree 8 x expert_tensor_parallel_degree 1 = 8 does not divide"
    )
    assert pipelined(8, "ZBV", pp=4) == [
        "parallelism.pipeline_parallel_degree 4 makes 8 stages with pipeline_parallel_schedule ZBV, more than the"
        f" model's 6 layers; nearest that works: {parallelism(pp=2)}"
    ]
    (told,) = degree_problems(degrees(pp=2), 2, model=Model(DENSE), training=MICRO_BATCHES)
    assert told.startswith("parallelism.pipeline_parallel_degree 2 needs a model that can be cut into stages")
    pictures = Model(replace(MOE, first_stage_layers=3))
    (told,) = degree_problems(degrees(pp=5), 5, model=pictures, training=MICRO_BATCHES)
    assert "more than the model's 6 layers can be cut into, of which the first stage needs 3" in told


@pytest.mark.parametrize(
    ("schedule", "training", "needed", "option"),
    [
        ("1F1B", Training(local_batch_size=2), "at least 4 micro-batches", "--training.global_batch_size 8"),
        (
            "1F1B",
            Training(local_batch_size=8, global_batch_size=16),
            "at least 4 micro-batches",
            "--training.local_batch_size 4",
        ),
        (
            "Interleaved1F1B",
            Training(local_batch_size=1, global_batch_size=9),
            "a multiple of 2 micro-batches",
            "--training.global_batch_size 8",
        ),
    ],
)
def test_schedules_say_how_many_micro_batches_they_need(
    schedule: str, training: Training, needed: str, option: str
) -> None:
    facts = replace(MOE, num_layers=8)
    asked = replace(degrees(pp=4), pipeline_parallel_schedule=schedule)  # type: ignore[arg-type]
    (told,) = degree_problems(asked, 4, model=Model(facts), training=training)
    assert told.startswith(
        f"parallelism.pipeline_parallel_schedule {schedule} of pipeline_parallel_degree 4 needs {needed}"
    )
    assert told.endswith(f"; nearest that works: {option}")


def test_ulysses_needs_as_many_heads_as_ranks() -> None:
    def told(facts: ParallelFacts, kind: Any = "ulysses", **short: int) -> list[str]:
        asked = replace(degrees(**short), context_parallel_kind=kind)
        return degree_problems(asked, 16, model=Model(facts), training=Training())

    assert told(MOE, cp=8) == told(MOE, cp=4, tp=2) == told(GROUPED_HEADS, "all_gather", cp=16) == []
    assert told(MOE, cp=16) == [
        "parallelism.context_parallel_degree 16 is more than the model's 8 attention heads, which"
        f" context_parallel_kind ulysses shares: all_gather has no such limit; nearest that works: {parallelism(cp=8)}"
    ]
    (line,) = told(GROUPED_HEADS, cp=4)
    assert line.startswith("parallelism.context_parallel_degree 4 is more than the model's 2 key and value heads")
    (line,) = told(MOE, cp=4, tp=4)
    assert line.startswith("parallelism.context_parallel_degree 4 is more than a rank's 2 attention heads")


def test_what_is_wrong_with_stages_schedule_heads_and_positions_is_told_at_once() -> None:
    asked = replace(
        degrees(pp=8, cp=16), context_parallel_kind="ulysses", pipeline_parallel_schedule="InterleavedZeroBubble"
    )
    training = Training(seq_len=12, local_batch_size=1, global_batch_size=2)
    told = degree_problems(asked, 128, model=Model(MOE), training=training)
    assert [line.partition("; nearest")[0] for line in told] == [
        "training.seq_len 12 is shorter than parallelism.context_parallel_degree 16, whose ranks share the positions of"
        " a sequence",
        "parallelism.context_parallel_degree 16 is more than the model's 8 attention heads, which context_parallel_kind"
        " ulysses shares: all_gather has no such limit",
        "parallelism.pipeline_parallel_degree 8 makes 16 stages with pipeline_parallel_schedule InterleavedZeroBubble,"
        " more than the model's 6 layers",
        "parallelism.pipeline_parallel_schedule InterleavedZeroBubble of pipeline_parallel_degree 8 needs at least 8"
        " micro-batches, as many as ranks of the pipeline; a step has 2, of training.local_batch_size 1 each",
    ]
    assert "; nearest that works for all of these: " in told[-1]


@pytest.mark.parametrize(
    ("local", "total", "option"),
    [
        (4, 24, "--training.local_batch_size 3"),  # 6 sequences a rank: the micro-batch gives way, not the batch
        (4, 30, "--training.global_batch_size 32"),
        (4, 2, "--training.global_batch_size 16"),
    ],
)
def test_batch_that_the_ranks_can_not_share_evenly(local: int, total: int, option: str) -> None:
    training = Training(local_batch_size=local, global_batch_size=total)
    assert problems(8, training=training, replicate=2, tp=2) == [
        f"training.global_batch_size {total} is not a multiple of training.local_batch_size {local}"
        f" x data_parallel_replicate_degree 2 x data_parallel_shard_degree 2 = 16; nearest that works: {option}"
    ]
    assert problems(8, training=replace(training, global_batch_size=-1), replicate=2, tp=2) == []
    assert problems(8, training=replace(training, global_batch_size=32), replicate=2, tp=2) == []


def test_all_problems_are_told_at_once_and_the_last_line_solves_them_all() -> None:
    training = Training(seq_len=4, local_batch_size=4, global_batch_size=36)
    told = problems(8, MOE, training, shard=2, tp=5, ep=32, etp=7)
    lines = [
        f"{PRODUCT.format(1, 2, 5)} = 10, but there are 8 ranks",
        "parallelism: expert_parallel_degree 32 x expert_tensor_parallel_degree 7 = 224 does not divide"
        " data_parallel_shard_degree 2 x tensor_parallel_degree 5 = 10",
        "training.seq_len 4 is shorter than parallelism.tensor_parallel_degree 5, whose ranks share the positions of a"
        " sequence",
        "parallelism.tensor_parallel_degree 5 does not divide the model's 8 attention heads",
        "parallelism.expert_parallel_degree 32 is more than the model's 16 experts",
        "parallelism.expert_tensor_parallel_degree 7 does not divide the experts' hidden width 96",
        "training.global_batch_size 36 is not a multiple of training.local_batch_size 4"
        " x data_parallel_replicate_degree 1 x data_parallel_shard_degree 2 = 8",
    ]
    options = f"{parallelism(tp=4, ep=8, etp=1)} --training.local_batch_size 3"
    assert told == [*lines[:-1], f"{lines[-1]}; nearest that works for all of these: {options}"]


def test_what_depends_on_a_shard_degree_that_can_not_be_filled_in_is_not_guessed() -> None:
    told = problems(8, training=Training(local_batch_size=5, global_batch_size=5), replicate=3, ep=7)
    assert [line.split(" ")[:2] for line in told] == [
        ["parallelism:", "data_parallel_replicate_degree"],
        ["parallelism.expert_parallel_degree", "7"],
    ]


@pytest.mark.parametrize(
    ("world_size", "given", "nearest"),
    [
        (16, {"shard": 4, "tp": 2}, f"{parallelism(shard=8)}, or the same degrees on 8 ranks"),  # rather than tp
        (4, {"shard": 2, "tp": 4}, f"{parallelism(shard=1)}, or the same degrees on 8 ranks"),
        (2, {"tp": 4, "ep": 4}, f"{parallelism(tp=2, ep=2)}, or the same degrees on 4 ranks"),
        (6, {"tp": 4, "ep": 8}, f"{parallelism(tp=2, ep=2)}, or the same degrees on 8 ranks"),
    ],
)
def test_nearest_changes_little_and_what_matters_least(world_size: int, given: dict[str, int], nearest: str) -> None:
    (told,) = problems(world_size, **given)
    assert told.endswith(f"; nearest that works: {nearest}")


def test_model_that_tells_nothing_about_itself_is_not_judged() -> None:
    told = degree_problems(degrees(tp=3, ep=7), 6, model=object(), training=Training())
    assert len(told) == 1
    assert told[0].startswith("parallelism: expert_parallel_degree 7")
    assert len(degree_problems(degrees(etp=2), 6, model=object(), training=Training())) == 1
    assert degree_problems(degrees(tp=3, ep=2), 6, model=object(), training=Training()) == []


def test_sections_that_are_wrong_by_themselves_are_left_to_their_own_checks() -> None:
    training = Training(seq_len=0, local_batch_size=0, global_batch_size=7)
    assert problems(4, ParallelFacts(num_heads=0), training, tp=2) == []


any_degree = st.sampled_from([1, 1, 2, 3, 4, 5, 6, 8, 16])
any_facts = st.builds(
    ParallelFacts,
    num_heads=st.integers(1, 24),
    num_kv_heads=st.none() | st.integers(1, 8),
    num_experts=st.integers(0, 24),
    expert_hidden_dim=st.integers(1, 48),
    num_layers=st.integers(0, 9),
)
any_training = st.builds(
    Training,
    seq_len=st.integers(1, 12),
    local_batch_size=st.integers(1, 8),
    global_batch_size=st.just(-1) | st.integers(1, 200),
)


@given(
    parallelism=st.builds(
        Parallelism,
        any_degree,
        st.just(-1) | any_degree,
        any_degree,
        any_degree,
        any_degree,
        context_parallel_degree=any_degree,
        context_parallel_kind=st.sampled_from(["all_gather", "ulysses"]),
        pipeline_parallel_degree=any_degree,
        pipeline_parallel_schedule=st.sampled_from(list(SCHEDULES)),
    ),
    world_size=st.integers(1, 64),
    facts=any_facts,
    training=any_training,
)
@settings(max_examples=300)
def test_what_is_said_to_work_works(
    parallelism: Parallelism, world_size: int, facts: ParallelFacts, training: Training
) -> None:
    told = degree_problems(parallelism, world_size, model=Model(facts), training=training)
    if not told:
        d = resolve_degrees(parallelism, world_size)
        assert d.world == world_size
        assert d.pp * d.dp_replicate * d.efsdp * d.ep * d.etp == world_size
        return
    advice = told[-1].split("nearest that works")[1]
    assert not any("nearest that works" in line for line in told[:-1])

    changes: dict[str, dict[str, int]] = {"parallelism": {}, "training": {}}
    for section, name, value in re.findall(r"--(\w+)\.(\w+) (\d+)", advice):
        changes[section][name] = int(value)
    assert changes["parallelism"] or changes["training"]
    changed, its_training = replace(parallelism, **changes["parallelism"]), replace(training, **changes["training"])
    assert degree_problems(changed, world_size, model=Model(facts), training=its_training) == []
    sequences = its_training.local_batch_size * resolve_degrees(changed, world_size).dp
    assert its_training.global_batch_size == -1 or its_training.global_batch_size % sequences == 0

    if match := re.search(r"the same degrees on (\d+) rank", advice):
        assert degree_problems(parallelism, int(match[1]), model=Model(facts), training=training) == []


def test_large_worlds_are_answered_at_once() -> None:
    assert len(problems(16384, replicate=3, shard=5, tp=7, ep=9, etp=11)) > 3


@pytest.mark.parametrize(
    ("world_size", "given", "nearest"),
    [
        (5040, {"tp": 3, "ep": 64}, parallelism(tp=4, ep=16)),
        (10080, {"tp": 3, "ep": 64, "pp": 5, "cp": 7}, parallelism(tp=4, ep=32) + " --training.global_batch_size 2880"),
    ],
)
def test_few_of_the_layouts_of_many_ranks_are_tried(
    monkeypatch: pytest.MonkeyPatch, world_size: int, given: dict[str, int], nearest: str
) -> None:
    """There are 170,000 ways to arrange 5,040 ranks, and 3 million for 10,080 with 5 stages and cp 7."""
    tried: list[Parallelism] = []
    check = parallel_degrees._split_problems
    monkeypatch.setattr(parallel_degrees, "_split_problems", lambda other, *a: tried.append(other) or check(other, *a))
    facts = ParallelFacts(num_heads=128, num_experts=256, expert_hidden_dim=2048, num_layers=61)
    assert problems(world_size, facts, **given)[-1].endswith(f"; nearest that works for all of these: {nearest}")
    assert len(tried) < 100


def test_debug_model_tells_what_can_be_split() -> None:
    model = deepseek_v3_debugmodel().model
    assert model.parallel_facts() == ParallelFacts(
        num_heads=4,
        num_layers=model.num_layers,
        num_experts=8,
        expert_hidden_dim=128,
        split_widths=(("vocab_size", 264), ("dense_hidden_dim", 512)),
    )
    assert replace(model, num_dense_layers=model.num_layers).parallel_facts().num_experts == 0
    assert replace(model, num_dense_layers=0).parallel_facts().split_widths == (("vocab_size", 264),)


def test_tensor_parallelism_has_to_divide_what_it_splits() -> None:
    model = replace(deepseek_v3_debugmodel().model, vocab_size=257)
    found = degree_problems(Parallelism(tensor_parallel_degree=2), 2, model=model, training=Training())
    assert "parallelism.tensor_parallel_degree 2 does not divide model.vocab_size 257" in found[0]


def test_degrees_load_without_torch() -> None:
    code = "import sys, spurline.parallel.degrees; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
