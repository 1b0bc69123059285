"""Frozen parameters under FSDP2, expert and tensor parallelism: the steps of one process with the reference's loops."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spurline.config import Parallelism, RunConfig
from spurline.testing import RankPool
from spurline.testing.tiny import tiny_model, tiny_run
from spurline.testing.verification.measure import Errors, measure_cell, save_reference

MODEL = tiny_model(moe={"score_func": "sigmoid", "bias_update_rate": 1e-2, "aux_loss": "sequence"})
FROZEN = {
    "part": ("layers.0.*", "*.experts.w1_EFD", "layers.1.moe.router.*", "norm.*"),
    "first-layers": ("embedding.*", "layers.[01].*"),
    "first-stage": ("embedding.*", "layers.[012].*"),
    "all-but-experts": ("*", "!*.experts.*"),
    "last-layers": ("layers.[23].*", "norm.*", "embedding.*", "output.*"),
}


def run_config(parallelism: Parallelism, frozen: str, num_parts: int, **changes: Any) -> RunConfig[Any]:
    training = {"steps": 3, "global_batch_size": 8, "local_batch_size": 8 // num_parts, "freeze": FROZEN[frozen]}
    return replace(tiny_run("unused", replace(MODEL, **changes), training=training), parallelism=parallelism)


def measure(rank: int, config: RunConfig[Any], path: str) -> list[Errors]:
    return measure_cell(config, path)


@pytest.mark.parametrize(
    ("frozen", "ranks_of", "compiled"),
    [
        ("part", {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}, False),
        ("first-layers", {"data_parallel_shard_degree": 2}, False),
        ("all-but-experts", {"tensor_parallel_degree": 2, "expert_parallel_degree": 2}, False),
        pytest.param("part", {"data_parallel_shard_degree": 2}, True, marks=pytest.mark.slow),
        pytest.param("first-layers", {"tensor_parallel_degree": 2}, False, marks=pytest.mark.slow),
    ],
)
def test_frozen_run_on_ranks_is_that_of_the_reference(
    ranks: RankPool, tmp_path: Path, frozen: str, ranks_of: dict[str, int], compiled: bool
) -> None:
    path = str(tmp_path / "expected.pt")
    save_reference(run_config(Parallelism(), frozen, 1), path)
    compile_options = {"enable": compiled, "components": "model", "backend": "aot_eager"}
    config = run_config(Parallelism(**ranks_of), frozen, 2 // ranks_of.get("tensor_parallel_degree", 1))
    config = replace(config, compile=replace(config.compile, **compile_options))
    for of_rank in ranks.run(measure, 2, config, path):
        for errors in of_rank:
            worst = {kind: max(by_name.values(), default=0.0) for kind, by_name in errors.items()}
            assert worst["rows"] == 0
            assert {kind: error for kind, error in worst.items() if error > 1e-4} == {}
            assert 0 < len(errors["gradient"]) < len(errors["weight"])


@pytest.mark.parametrize(
    ("frozen", "schedule", "tied", "num_ranks"),
    [
        ("first-stage", "1F1B", False, 4),  # all of the first stage, whose output then needs no gradient
        pytest.param("last-layers", "1F1B", False, 2, marks=pytest.mark.slow),  # all of the last stage
        pytest.param("part", "ZBV", True, 2, marks=pytest.mark.slow),
        ("all-but-experts", "ZBV", True, 2),  # and with them both copies of the embedding
        pytest.param("first-layers", "ZBV", False, 4, marks=pytest.mark.slow),
        pytest.param("last-layers", "ZBV", False, 4, marks=pytest.mark.slow),
        pytest.param("all-but-experts", "1F1B", True, 4, marks=pytest.mark.slow),
    ],
)
def test_frozen_run_in_pipeline_stages_is_that_of_the_reference(
    ranks: RankPool, tmp_path: Path, frozen: str, schedule: Any, tied: bool, num_ranks: int
) -> None:
    path = str(tmp_path / "expected.pt")
    changes = {"num_layers": 4, "tied_embeddings": tied}
    save_reference(run_config(Parallelism(), frozen, 1, **changes), path)
    stages = Parallelism(
        pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule, expert_parallel_degree=num_ranks // 2
    )
    for of_rank in ranks.run(measure, num_ranks, run_config(stages, frozen, 4, **changes), path):
        for errors in of_rank:
            worst = {kind: max(by_name.values(), default=0.0) for kind, by_name in errors.items()}
            assert worst["rows"] == 0
            assert {kind: error for kind, error in worst.items() if error > 1e-4} == {}
