"""What is special in a family, split and sharded over ranks, against the same model on one: a step of training."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from spurline.config import Compile, Data, Parallelism, RunConfig, Training
from spurline.models.agpt.configs import AGPTConfig
from spurline.models.common.decoder_config import YarnConfig
from spurline.models.deepseek_v3.configs import DeepSeekV3Config
from spurline.models.glm4_moe.configs import Glm4MoEConfig
from spurline.models.gpt_oss.configs import GptOssConfig
from spurline.models.mixtral.configs import MixtralConfig
from spurline.models.olmoe.configs import OLMoEConfig
from spurline.models.qwen2_moe.configs import Qwen2MoEConfig
from spurline.models.qwen3.configs import Qwen3Config, Qwen3MoEConfig
from spurline.moe.config import MoEConfig
from spurline.parallel.world import World, joined_world
from spurline.testing import RankPool
from spurline.testing.equivalence import relative_error
from spurline.testing.params import slow_but
from spurline.train.trainer import make_trainer

SIZE = {"vocab_size": 264, "dim": 16, "num_layers": 2, "num_heads": 4}
MODELS = {
    "agpt": AGPTConfig(**SIZE, dense_hidden_dim=24, num_kv_heads=2, head_dim=4),
    "qwen3-tied": Qwen3Config(**SIZE, dense_hidden_dim=24, num_kv_heads=2, head_dim=6, tied_embeddings=True),
    "qwen3-moe": Qwen3MoEConfig(
        **SIZE, num_kv_heads=2, head_dim=6, moe=MoEConfig(hidden_dim=8, num_experts=4, route_norm=True)
    ),
    "mixtral-window-dense-between": MixtralConfig(
        **SIZE,
        dense_hidden_dim=24,
        dense_layers=(1,),
        num_kv_heads=2,
        head_dim=6,
        sliding_window=5,
        moe=MoEConfig(hidden_dim=8, num_experts=4, route_norm=True),
    ),
    "olmoe": OLMoEConfig(**SIZE, num_kv_heads=2, head_dim=4, moe=MoEConfig(hidden_dim=8, num_experts=4)),
    "qwen2_moe": Qwen2MoEConfig(
        **SIZE,
        num_kv_heads=2,
        head_dim=4,
        moe=MoEConfig(hidden_dim=8, num_experts=4, num_shared_experts=2, shared_gate=True),
    ),
    "gpt_oss": GptOssConfig(
        **SIZE,
        num_kv_heads=2,
        head_dim=4,
        sliding_window=5,
        moe=MoEConfig(hidden_dim=8, num_experts=4, route_norm=True, gate_bias=True, experts="clamped_swiglu"),
    ),
    "glm4_moe": Glm4MoEConfig(
        **SIZE,
        dense_hidden_dim=24,
        num_kv_heads=2,
        head_dim=8,
        qk_norm=True,
        moe=MoEConfig(hidden_dim=8, num_experts=4, num_shared_experts=1, score_func="sigmoid", route_norm=True),
    ),
    "deepseek_v3-yarn-tied": DeepSeekV3Config(
        **SIZE,
        dense_hidden_dim=24,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=6,
        yarn=YarnConfig(factor=4.0, original_seq_len=16, mscale_all_dim=1.0),
        tied_embeddings=True,
        moe=MoEConfig(hidden_dim=8, num_experts=4, num_shared_experts=1),
    ),
}


def loss_and_gradients(config: RunConfig[Any], world: World) -> dict[str, Tensor]:
    """Of the first step: the loss, and the whole gradient of every parameter by name."""
    trainer = make_trainer(config, world)
    loss = torch.tensor(trainer.step(1).read()["loss"])
    # AdamW's mean after one step is the gradient, times a constant.
    means = {name: trainer.optimizer.state[p]["exp_avg"] for name, p in trainer.model.named_parameters()}
    return {"loss": loss} | {name: m.full_tensor() if isinstance(m, DTensor) else m for name, m in means.items()}


def run_on_rank(rank: int, config: RunConfig[Any]) -> dict[str, Tensor]:
    environment = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), joined_world(config.parallelism) as world:
        return loss_and_gradients(config, world)


def check_first_step(
    ranks: RankPool, folder: Path, name: str, num_ranks: int, local_batch_size: int, **sections: Any
) -> None:
    """That the first step of so many ranks has the loss and the gradients of one."""
    for file in "abc":  # documents of different lengths, which masks tell apart
        text = f"{file}: a spur line is a side track that carries some of the traffic\n"
        (folder / f"{file}.txt").write_text(text * (20 + ord(file) % 3))
    data = sections.pop("data", {})
    alone = RunConfig(
        model=MODELS[name],
        # 15 positions: two ranks can't share them evenly.
        training=Training(steps=2, seq_len=15, local_batch_size=4, global_batch_size=4, threads=1, max_grad_norm=0),
        data=Data(path=str(folder), pattern="*.txt", **data),
    )
    together = replace(alone, training=replace(alone.training, local_batch_size=local_batch_size), **sections)
    expected = loss_and_gradients(alone, World.alone())
    of_ranks = ranks.run(run_on_rank, num_ranks, together, timeout=240)
    stages = together.parallelism.pipeline_parallel_degree
    assert {key for actual in of_ranks for key in actual} == expected.keys()
    for actual in of_ranks:
        assert actual.keys() == expected.keys() or stages > 1
        errors = {key: relative_error(value, expected[key]) for key, value in actual.items()}
        assert max(errors.values()) < 1e-5, max(errors, key=errors.__getitem__)


OFTEN = MODELS.keys() - {"qwen3-tied", "qwen3-moe", "olmoe"}  # whose parts others have too


@pytest.mark.parametrize(
    ("name", "compiled"),
    slow_but([(name, False) for name in OFTEN], [*((name, False) for name in MODELS), ("qwen3-tied", True)]),
)
def test_first_step_on_four_ranks_is_that_of_one(ranks: RankPool, tmp_path: Path, name: str, compiled: bool) -> None:
    experts = 2 if MODELS[name].parallel_facts().num_experts else 1
    parallelism = Parallelism(tensor_parallel_degree=2, expert_parallel_degree=experts)
    compiling = Compile(enable=compiled, backend="aot_eager")
    check_first_step(ranks, tmp_path, name, 4, 2, parallelism=parallelism, compile=compiling)


@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("kind", ["all_gather", "ulysses"])
@pytest.mark.parametrize(
    "name",
    [
        *(name if name in ("gpt_oss", "qwen3-tied") else pytest.param(name, marks=pytest.mark.slow) for name in MODELS),
    ],
)
def test_first_step_with_shared_positions_is_that_of_one(
    ranks: RankPool, tmp_path: Path, name: str, kind: Any, documents: bool
) -> None:
    parallelism = Parallelism(context_parallel_degree=2, context_parallel_kind=kind)
    check_first_step(ranks, tmp_path, name, 2, 4, parallelism=parallelism, data={"mask_documents": documents})


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("gpt_oss", "deepseek_v3-yarn-tied") else pytest.param(name, marks=pytest.mark.slow)
        for name in MODELS
    ],
)
def test_first_step_in_pipeline_stages_is_that_of_one(ranks: RankPool, tmp_path: Path, name: str) -> None:
    parallelism = Parallelism(pipeline_parallel_degree=2)
    check_first_step(ranks, tmp_path, name, 2, 2, parallelism=parallelism, data={"mask_documents": True})


def losses_of(config: RunConfig[Any], world: World) -> list[float]:
    trainer = make_trainer(config, world)
    return [trainer.step(step).read()["loss"] for step in (1, 2, 3)]


def losses_on_rank(rank: int, config: RunConfig[Any]) -> list[float]:
    environment = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), joined_world(config.parallelism) as world:
        return losses_of(config, world)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_losses_with_fsdp_2_and_with_ep_2_are_those_of_one(ranks: RankPool, tmp_path: Path, name: str) -> None:
    (tmp_path / "text.txt").write_text("a spur line is a side track that carries some of the traffic\n" * 40)
    alone = RunConfig(
        model=MODELS[name],
        training=Training(steps=3, seq_len=15, local_batch_size=4, global_batch_size=4, threads=1),
        data=Data(path=str(tmp_path)),
    )
    expected = torch.tensor(losses_of(alone, World.alone()))
    degrees = [1, 2] if MODELS[name].parallel_facts().num_experts else [1]
    for degree in degrees:
        layout = Parallelism(expert_parallel_degree=degree)
        together = replace(alone, training=replace(alone.training, local_batch_size=2), parallelism=layout)
        for found in ranks.run(losses_on_rank, 2, together, timeout=240):
            assert relative_error(torch.tensor(found), expected) < 1e-5, (degree, found, expected)
