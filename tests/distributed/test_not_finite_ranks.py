"""A value that is not finite in the shard of one rank is known to all of them."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from spurline.testing import RankPool
from spurline.train.checkpoint.folder import CheckpointFolder
from spurline.train.checkpoint.manager import CheckpointManager


def save_good_and_bad(rank: int, folder: str, bad_rank: int) -> str:
    """Save step 1, and then step 2 with a NaN in the shard of one rank; returns the error of the second."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = CheckpointManager(folder, 1, 0)
    checkpoints.save(1, model, optimizer, {})
    if rank == bad_rank:
        model[1].weight.to_local().data[0, 3] = float("nan")
    try:
        checkpoints.save(2, model, optimizer, {})
    except ValueError as error:
        return str(error)
    return "saved"


def test_the_rank_is_named_on_all_ranks_and_nothing_is_published(ranks: RankPool, tmp_path: Path) -> None:
    for bad_rank in (0, 1):
        folder = tmp_path / f"{bad_rank}"
        told = ranks.run(save_good_and_bad, 2, str(folder), bad_rank)
        assert told[0] == told[1]
        assert f"checkpoint of step 2: model.1.weight is not finite (rank {bad_rank})" in told[0]
        assert CheckpointFolder(folder).named_steps() == [1]
