"""Adapters under FSDP2, expert, tensor and expert tensor parallelism: the steps of one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spurline.config import Parallelism, RunConfig
from spurline.lora.adapters import is_adapter
from spurline.models.qwen2_moe.configs import Qwen2MoEConfig
from spurline.moe.config import MoEConfig
from spurline.parallel.degrees import resolve_degrees
from spurline.parallel.mesh import build_meshes
from spurline.parallel.world import World
from spurline.testing import RankPool
from spurline.testing.tiny import tiny_model, tiny_run
from spurline.testing.verification.measure import Errors, _data, measure_cell, take_steps
from spurline.train.checkpoint.fingerprint import fingerprint
from spurline.train.checkpoint.state import model_tensors
from spurline.train.trainer import Trainer, make_trainer

LATENT = tiny_model(moe={"score_func": "sigmoid", "aux_loss": "sequence", "check_exchange": True})
GROUPED = Qwen2MoEConfig(
    vocab_size=60,
    dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    moe=MoEConfig(hidden_dim=12, num_experts=6, num_shared_experts=1, shared_gate=True),
)
LAYOUTS: dict[str, tuple[int, Parallelism]] = {
    "fsdp2": (2, Parallelism()),
    "ep2": (2, Parallelism(expert_parallel_degree=2)),
    "tp2": (2, Parallelism(tensor_parallel_degree=2)),
    "hsdp-ep": (4, Parallelism(data_parallel_replicate_degree=2, expert_parallel_degree=2)),
    "ep-etp": (4, Parallelism(expert_parallel_degree=2, expert_tensor_parallel_degree=2)),
    "tp-ep-etp": (
        4,
        Parallelism(tensor_parallel_degree=2, expert_parallel_degree=2, expert_tensor_parallel_degree=2),
    ),
    "fsdp4": (4, Parallelism()),
    "pp-ep": (4, Parallelism(pipeline_parallel_degree=2, expert_parallel_degree=2)),
}


def run_config(model: Any, parallelism: Parallelism, num_ranks: int, **sections: Any) -> RunConfig[Any]:
    # Pipeline stages have as many micro-batches as there are stages.
    parts = num_ranks // parallelism.tensor_parallel_degree
    training = {"steps": 3, "global_batch_size": 8, "local_batch_size": 8 // parts}
    lora = {"rank": 3, "alpha": 24.0}
    return replace(tiny_run("unused", model, training=training, lora=lora, **sections), parallelism=parallelism)


def measure(rank: int, config: RunConfig[Any], path: str) -> list[Errors]:
    return measure_cell(config, path)


def save_alone(config: RunConfig[Any], path: str) -> None:
    trainer = make_trainer(config, World(torch.device("cpu"), resolve_degrees(config.parallelism, 1)), _data(config))
    torch.save(list(take_steps(trainer)), path)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (LATENT, "ep2"),
        (LATENT, "tp-ep-etp"),
        (replace(LATENT, tied_embeddings=True), "pp-ep"),
        *(
            pytest.param(model, layout, marks=pytest.mark.slow)
            for model, layout in [
                (LATENT, "tp2"),
                (GROUPED, "tp2"),
                (LATENT, "fsdp2"),
                (LATENT, "hsdp-ep"),
                (LATENT, "ep-etp"),
                (GROUPED, "fsdp4"),
            ]
        ),
    ],
)
def test_adapters_on_ranks_train_as_on_one(ranks: RankPool, tmp_path: Path, model: Any, layout: str) -> None:
    num_ranks, parallelism = LAYOUTS[layout]
    path = str(tmp_path / "expected.pt")
    save_alone(run_config(model, Parallelism(), 1), path)
    for of_rank in ranks.run(measure, num_ranks, run_config(model, parallelism, num_ranks), path):
        assert_same(of_rank)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_compiled_and_recomputed_adapters_train_as_eager_ones(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    num_ranks, parallelism = LAYOUTS[layout]
    path = str(tmp_path / "expected.pt")
    model = replace(LATENT, moe=replace(LATENT.moe, check_exchange=False))
    save_alone(run_config(model, Parallelism(), 1), path)
    config = run_config(model, parallelism, num_ranks, activation_checkpoint={"mode": "selective"})
    config = replace(config, compile=replace(config.compile, enable=True, components="model", backend="aot_eager"))
    for of_rank in ranks.run(measure, num_ranks, config, path):
        assert_same(of_rank)


def assert_same(steps: list[Errors]) -> None:
    for errors in steps:
        assert errors["gradient"]
        assert all(map(is_adapter, errors["gradient"]))
        worst = {kind: max(by_name.values()) for kind, by_name in errors.items()}
        assert worst["rows"] == 0
        assert {kind: error for kind, error in worst.items() if error > 1e-4} == {}


def trainer_on_rank(config: RunConfig[Any], num_ranks: int) -> Trainer:
    degrees = resolve_degrees(config.parallelism, num_ranks)
    return make_trainer(config, World(torch.device("cpu"), degrees, build_meshes(degrees, "cpu")), _data(config))


def fingerprint_on_rank(rank: int, config: RunConfig[Any]) -> str:
    return fingerprint(trainer_on_rank(config, 4).model.state_dict())


def saved_on_rank(rank: int, config: RunConfig[Any]) -> list[str]:
    return sorted(model_tensors(trainer_on_rank(config, 2).model))


def test_stage_without_adapters_saves_nothing_of_the_base_model(ranks: RankPool) -> None:
    config = run_config(LATENT, Parallelism(pipeline_parallel_degree=2), 2)
    config = replace(config, lora=replace(config.lora, targets=("layers.0.attention.*",)))
    first, second = ranks.run(saved_on_rank, 2, config)
    assert first
    assert all(name.startswith("model.layers.0.attention.") and "_lora_" in name for name in first)
    assert second == []


def test_fingerprint_does_not_depend_on_the_layout(ranks: RankPool) -> None:
    tied = replace(LATENT, tied_embeddings=True)  # pipeline stages have two copies of it
    config = run_config(tied, Parallelism(), 1)
    alone = make_trainer(config, World.alone("cpu"), _data(config)).model.state_dict()
    for layout in ("tp-ep-etp", "pp-ep"):
        num_ranks, parallelism = LAYOUTS[layout]
        found = ranks.run(fingerprint_on_rank, num_ranks, run_config(tied, parallelism, num_ranks))
        assert set(found) == {fingerprint(alone)}, layout
    changed = {name: tensor.clone() for name, tensor in alone.items()}
    changed["layers.1.moe.experts.w1_EFD"][3, 5, 7] += 1e-6
    assert fingerprint(changed) != fingerprint(alone)
