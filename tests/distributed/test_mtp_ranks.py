"""Multi-token prediction on two ranks against one process: steps of training, and checkpoints between the two."""

import math
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

from spurline.config import ActivationCheckpoint, Compile, Data, Parallelism, RunConfig, Training
from spurline.parallel.world import World, joined_world
from spurline.testing import RankPool
from spurline.testing.equivalence import relative_error
from spurline.testing.tiny import tiny_model
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.trainer import Trainer, make_trainer

MODEL = tiny_model(
    vocab_size=264,
    num_layers=2,
    v_head_dim=6,
    num_mtp_layers=2,
    moe={"hidden_dim": 8, "num_experts": 4, "aux_loss": "sequence", "aux_loss_weight": 0.1},
    q_lora_rank=0,
)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def first_step(trainer: Trainer) -> dict[str, Tensor]:
    """The loss, the rows of every expert, and the whole gradient of every parameter by name."""
    record = trainer.step(1).read()
    results = {"loss": torch.tensor(record["loss"])}
    results |= {f"rows of {name}": torch.tensor(rows) for name, rows in record["expert_load"].items()}
    # AdamW's mean after one step is the gradient, times a constant.
    means = {name: trainer.optimizer.state[p]["exp_avg"] for name, p in trainer.model.named_parameters()}
    return results | {name: whole(mean) for name, mean in means.items()}


def run_on_rank(rank: int, config: RunConfig[Any], folder: str) -> dict[str, Tensor]:
    environment = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), joined_world(config.parallelism) as world:
        trainer = make_trainer(config, world)
        results = first_step(trainer)
        CheckpointManager(Path(folder), 1, 0).save(1, trainer.model, trainer.optimizer, {})
        return results | {f"new {name}": whole(p).detach() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    ("degrees", "compiled", "remat"),
    [
        ({"tensor_parallel_degree": 2}, False, "none"),
        ({"expert_parallel_degree": 2}, False, "selective"),
        ({"context_parallel_degree": 2, "expert_parallel_degree": 2}, False, "none"),
        ({"pipeline_parallel_degree": 2}, False, "selective"),
        pytest.param(
            {"pipeline_parallel_degree": 2, "context_parallel_degree": 2},
            True,
            "none",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"context_parallel_degree": 2, "context_parallel_kind": "ulysses"},
            False,
            "selective",
            marks=pytest.mark.slow,
        ),
        pytest.param({"tensor_parallel_degree": 2, "expert_parallel_degree": 2}, True, "none", marks=pytest.mark.slow),
    ],
    ids=[
        "tp 2",
        "ep 2, remat",
        "cp 2, ep 2",
        "pp 2",
        "pp 2, cp 2, compiled",
        "cp 2, ulysses, remat",
        "tp 2, ep 2, compiled",
    ],
)
def test_first_step_on_two_ranks_is_that_of_one(
    ranks: RankPool, tmp_path: Path, degrees: dict[str, Any], compiled: bool, remat: str
) -> None:
    (tmp_path / "text.txt").write_text("a spur line is a side track that carries some of the traffic\n" * 40)
    alone = RunConfig(
        model=MODEL,
        # 15 positions, of which the modules see 14 and 13: two ranks can't share all of these evenly.
        training=Training(steps=2, seq_len=15, local_batch_size=4, global_batch_size=4, threads=1, max_grad_norm=0),
        data=Data(path=str(tmp_path), pattern="*.txt"),
    )
    together = replace(
        alone,
        training=replace(
            alone.training,
            local_batch_size=2
            if "pipeline_parallel_degree" in degrees
            else 4
            if "context_parallel_degree" in degrees
            else 2,
        ),
        parallelism=Parallelism(**degrees),
        compile=Compile(enable=compiled, backend="aot_eager"),
        activation_checkpoint=ActivationCheckpoint(mode=remat),
    )
    trainer = make_trainer(alone, World.alone())
    expected = first_step(trainer)
    assert {"mtp.0.eh_proj.weight", "mtp.1.block.moe.experts.w2_EDF", "rows of mtp.1.block.moe"} <= expected.keys()
    num_ranks = max(
        2, math.prod(degree for name, degree in degrees.items() if name.startswith(("pipe", "context_parallel_d")))
    )
    new = {}
    for actual in ranks.run(run_on_rank, num_ranks, together, str(tmp_path / "run"), timeout=240):
        shared = actual.keys() & expected.keys()
        assert shared == expected.keys() or "pipeline_parallel_degree" in degrees
        errors = {key: relative_error(actual[key], expected[key]) for key in shared}
        assert max(errors.values()) < 1e-5, max(errors, key=errors.__getitem__)
        new |= {name: value for name, value in actual.items() if name.startswith("new ")}

    CheckpointManager(tmp_path / "run", 1, 0).load(1, trainer.model, None)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, new[f"new {name}"]), name
