"""Chat data on several ranks: the losses, and so the masks, of one process."""

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from spurline.config import Data, Parallelism, RunConfig
from spurline.parallel.world import World, joined_world
from spurline.testing import RankPool
from spurline.testing.tiny import tiny_run
from spurline.train.trainer import make_trainer
from spurline.train.validation import validate


def losses(config: RunConfig[Any], world: World) -> list[float]:
    """Of three steps, and of the held-out conversations."""
    trainer = make_trainer(config, world)
    found = [trainer.step(step).read()["loss"] for step in (1, 2, 3)]
    held_out = validate(trainer)
    assert held_out is not None
    return [*found, held_out.loss]


def run_on_rank(rank: int, config: RunConfig[Any]) -> list[float]:
    environment = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), joined_world(config.parallelism) as world:
        return losses(config, world)


def test_losses_on_ranks_are_those_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    words = random.Random(0)
    lines = [f'{{"prompt": "{words.random()}", "completion": "{"abc" * words.randint(1, 5)}"}}' for _ in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    data = Data(path=str(tmp_path / "pairs.jsonl"), kind="chat", chat_template="plain", validation_fraction=0.2)
    training = {"seq_len": 100, "local_batch_size": 4, "global_batch_size": 4}
    alone = tiny_run(tmp_path, data=data, training=training)
    expected = losses(alone, World.alone())
    assert min(expected) > 1
    for layout in (Parallelism(expert_parallel_degree=2), Parallelism(tensor_parallel_degree=2)):
        size = 4 // (2 // layout.tensor_parallel_degree)
        together = replace(alone, parallelism=layout, training=replace(alone.training, local_batch_size=size))
        for found in ranks.run(run_on_rank, 2, together, timeout=120):
            assert all(abs(a - b) < 1e-5 * b for a, b in zip(found, expected, strict=True)), (found, expected)
