"""Checkpoints that several ranks have written are exported as those of one; imported ones are read by any layout."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from spurline import config_io
from spurline.config import Compile, Parallelism
from spurline.parallel.model import parallelize_model
from spurline.parallel.world import joined_world
from spurline.testing import RankPool
from spurline.train.checkpoint.manager import CheckpointManager

LAYOUTS = {
    "fsdp": Parallelism(data_parallel_shard_degree=2),
    "ep": Parallelism(expert_parallel_degree=2),
    "tp": Parallelism(tensor_parallel_degree=2),
    "tp-etp": Parallelism(tensor_parallel_degree=2, expert_tensor_parallel_degree=2),
}


def save_again(rank: int, run: Path, parallelism: Parallelism, step: int) -> list[str]:
    """Load the checkpoint of step 0 into a model that is spread over the ranks, and save it as another."""
    world_size = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, world_size), joined_world(parallelism) as world:
        with torch.device("meta"):
            model = config_io.load(run / "config.json")[2].model.build()
        parallelize_model(model, world.meshes, "none", Compile(), None)
        model.to_empty(device=world.device)
        checkpoints = CheckpointManager(run, interval=1, keep_latest_k=0)
        checkpoints.load(0, model, None)
        checkpoints.save(step, model, torch.optim.SGD(model.parameters()), {"tokens_seen": 0})
        return [str(parameter.placements) for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_export_from_many_ranks_equals_that_from_one(ranks: RankPool, tmp_path, name):
    from their_models import make, save

    from spurline.hf.exporting import export_run
    from spurline.hf.importing import import_folder

    run = tmp_path / "run"
    import_folder(save(make(name), tmp_path / "theirs"), run)
    export_run(run, tmp_path / "alone")
    expected = (tmp_path / "alone" / "model.safetensors").read_bytes()
    for step, (layout, parallelism) in enumerate(LAYOUTS.items(), start=1):
        placements = ranks.run(save_again, 2, run, parallelism, step)[0]
        assert any("Shard(" in placement for placement in placements)
        export_run(run, tmp_path / layout)
        assert (tmp_path / layout / "model.safetensors").read_bytes() == expected, layout
