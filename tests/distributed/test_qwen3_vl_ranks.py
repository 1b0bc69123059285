"""Qwen3-VL split and sharded over ranks, against the same model on one: a step of training on text and pictures."""

import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from spurline.config import ActivationCheckpoint, Compile, Data, Parallelism, RunConfig, Training
from spurline.data import DataSets
from spurline.data.batch import IGNORE_INDEX, Batch, Images, Spot
from spurline.data.patches import PATCH_DIM
from spurline.data.picture_tokenizer import PictureTokenizer
from spurline.data.tokenizer import ByteTokenizer
from spurline.models.qwen3_vl.configs import Qwen3VLConfig, Qwen3VLMoEConfig, VisionConfig
from spurline.moe.config import MoEConfig
from spurline.parallel.world import World, joined_world
from spurline.testing import RankPool
from spurline.testing.equivalence import relative_error
from spurline.testing.params import slow_but
from spurline.train.trainer import make_trainer

SEQ_LEN = 23  # two ranks can't share so many positions evenly
SIZE: dict[str, Any] = {
    "dim": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "mrope_section": (1, 1, 1),
    "vision": VisionConfig(
        dim=16, num_layers=2, num_heads=2, hidden_dim=20, positions_per_side=3, deepstack_layers=(0,)
    ),
}
DENSE = Qwen3VLConfig(**SIZE, dense_hidden_dim=24, tied_embeddings=True)
SPARSE = Qwen3VLMoEConfig(**SIZE, moe=MoEConfig(hidden_dim=8, num_experts=4, route_norm=True))
# The first sequence's second picture lies across the positions of two ranks; the last two sequences have none.
SPOTS = (Spot(0, 2, 4, 2), Spot(0, 9, 4, 6), Spot(1, 15, 2, 6))


class Sequences:
    """Four sequences in place of a data set."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        tokens_BL = torch.randint(257, (4, SEQ_LEN), generator=generator)
        labels_BL = torch.randint(257, (4, SEQ_LEN), generator=generator)
        for spot in SPOTS:
            labels_BL[spot.row, spot.start : spot.start + spot.num_features] = IGNORE_INDEX
        num_patches = sum(spot.num_patches for spot in SPOTS)
        images = Images(torch.randn(num_patches, PATCH_DIM, generator=generator), SPOTS)
        self.whole = Batch(tokens_BL, labels_BL, images)

    def batch(self, start: int, count: int) -> Batch:
        return self.whole.take([(start + row) % 4 for row in range(count)])


def loss_and_gradients(config: RunConfig[Any], world: World) -> dict[str, Tensor]:
    """Of the first step: the loss, and the whole gradient of every parameter by name."""
    sequences: Any = Sequences()
    data = DataSets(PictureTokenizer(ByteTokenizer()), sequences, validation=None, num_documents=0, num_tokens=0)
    trainer = make_trainer(config, world, data)
    loss = torch.tensor(trainer.step(1).read()["loss"])
    # AdamW's mean after one step is the gradient, times a constant.
    means = {name: trainer.optimizer.state[p]["exp_avg"] for name, p in trainer.model.named_parameters()}
    return {"loss": loss} | {name: m.full_tensor() if isinstance(m, DTensor) else m for name, m in means.items()}


def run_on_rank(rank: int, config: RunConfig[Any]) -> dict[str, Tensor]:
    environment = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), joined_world(config.parallelism) as world:
        return loss_and_gradients(config, world)


COMPILED = {"compile": Compile(enable=True, backend="aot_eager")}
LAYOUTS = {
    # On two data ranks, the second one has no picture.
    "fsdp": (DENSE, 2, Parallelism(), {}),
    "fsdp-full-remat": (DENSE, 2, Parallelism(), {"activation_checkpoint": ActivationCheckpoint("full")}),
    "fsdp-selective-remat": (SPARSE, 2, Parallelism(), {"activation_checkpoint": ActivationCheckpoint("selective")}),
    "ep": (SPARSE, 2, Parallelism(expert_parallel_degree=2), {}),
    "ep-compiled": (SPARSE, 2, Parallelism(expert_parallel_degree=2), COMPILED),
    "tp": (DENSE, 4, Parallelism(tensor_parallel_degree=2), {}),
    "tp-compiled": (DENSE, 4, Parallelism(tensor_parallel_degree=2), COMPILED),
    "cp": (DENSE, 4, Parallelism(context_parallel_degree=2), {}),
    "cp-ep-ulysses": (
        SPARSE,
        4,
        Parallelism(context_parallel_degree=2, context_parallel_kind="ulysses", expert_parallel_degree=2),
        {},
    ),
    "pp": (DENSE, 2, Parallelism(pipeline_parallel_degree=2), {}),
    "tp-ep": (SPARSE, 4, Parallelism(tensor_parallel_degree=2, expert_parallel_degree=2), {}),
}


@pytest.mark.parametrize("layout", slow_but([name for name in LAYOUTS if "compiled" not in name], LAYOUTS))
def test_first_step_on_two_ranks_is_that_of_one(ranks: RankPool, layout: str) -> None:
    model, local_batch_size, parallelism, sections = LAYOUTS[layout]
    alone = RunConfig(
        model=model,
        training=Training(
            steps=2, seq_len=SEQ_LEN, local_batch_size=4, global_batch_size=4, threads=1, max_grad_norm=0
        ),
        data=Data(kind="pictures"),
    )
    training = replace(alone.training, local_batch_size=local_batch_size)
    together = replace(alone, training=training, parallelism=parallelism, **sections)
    expected = loss_and_gradients(alone, World.alone())
    for actual in ranks.run(run_on_rank, 2, together, timeout=240):
        assert actual.keys() == expected.keys() or parallelism.pipeline_parallel_degree > 1
        errors = {key: relative_error(value, expected[key]) for key, value in actual.items()}
        assert max(errors.values()) < 1e-5, max(errors, key=errors.__getitem__)
