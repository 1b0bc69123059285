"""Models of `transformers`, read by two ranks and trained there: the losses of one process, with all that is special.

Biases, sinks and norms have values of their own here, which those of a fresh model lack.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from spurline.config import Checkpoint, Data, Lora, Parallelism, RunConfig, Training
from spurline.hf.settings import read_folder_model
from spurline.models.common.init import initialize_parameters
from spurline.parallel.world import World, joined_world
from spurline.testing import RankPool
from spurline.testing.equivalence import relative_error
from spurline.testing.params import slow_but
from spurline.train.base_model import load_base
from spurline.train.initial_weights import load_initial_weights
from spurline.train.trainer import make_trainer

NAMES = [
    *("llama-3.1", "qwen3-tied", "qwen2", "mistral"),
    *("qwen3_moe-dense-anywhere", "deepseek_v2-yarn", "deepseek_v3", "mixtral-square-window", "olmoe"),
    *("qwen2_moe", "gpt_oss", "glm4_moe", "glm4_moe-square-tied"),
]


def losses_of(config: RunConfig[Any], world: World) -> list[float]:
    trainer = make_trainer(config, world, draw_weights=False)
    if config.lora.rank:
        load_base(trainer.model, config)
        initialize_parameters(trainer.model, config.training.seed, only_adapters=True)
    else:
        load_initial_weights(trainer)
    return [trainer.step(step).read()["loss"] for step in (1, 2, 3)]


def losses_on_rank(rank: int, config: RunConfig[Any]) -> list[float]:
    environment = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), joined_world(config.parallelism) as world:
        return losses_of(config, world)


@pytest.mark.parametrize(
    ("name", "lora"),
    slow_but(
        [("deepseek_v3", True)],
        [*((name, False) for name in NAMES), ("deepseek_v3", True), ("gpt_oss", True)],
    ),
)
def test_losses_on_two_ranks_are_those_of_one(ranks: RankPool, tmp_path: Path, name: str, lora: bool) -> None:
    from their_models import make, save

    folder = save(make(name), tmp_path / "theirs")
    (tmp_path / "text.txt").write_text("a spur line is a side track that carries some of the traffic\n" * 40)
    alone = RunConfig(
        model=read_folder_model(folder).model,
        training=Training(steps=3, seq_len=15, local_batch_size=4, global_batch_size=4, threads=1),
        checkpoint=Checkpoint(initial_load_path="" if lora else str(folder)),
        lora=Lora(rank=2, alpha=64.0, base=str(folder)) if lora else Lora(),
        data=Data(path=str(tmp_path / "text.txt")),
    )
    expected = torch.tensor(losses_of(alone, World.alone()))
    layouts = {"fsdp 2": (Parallelism(), 2)}
    if alone.model.parallel_facts().num_experts:
        layouts["ep 2"] = (Parallelism(expert_parallel_degree=2), 2)
    if alone.model.num_heads % 2 == 0 and getattr(alone.model, "num_kv_heads", 2) % 2 == 0:
        layouts["tp 2"] = (Parallelism(tensor_parallel_degree=2), 4)
    for layout, (parallelism, size) in layouts.items():
        training = replace(alone.training, local_batch_size=size)
        together = replace(alone, training=training, parallelism=parallelism)
        for found in ranks.run(losses_on_rank, 2, together, timeout=240):
            assert relative_error(torch.tensor(found), expected) < 1e-5, (layout, found, expected)
