"""AdamW on shards changes what torch.optim.AdamW changes on DTensors, bit for bit."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from spurline.testing import RankPool
from spurline.train.optimizer.adamw import ShardedAdamW

OPTIONS = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1, "fused": True}


def parameters() -> list[nn.Parameter]:
    """A sharded matrix, a vector with nothing on the last rank, and a copy on each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    made = [
        distribute_tensor(torch.randn(shape), mesh, [placement])
        for shape, placement in (((5, 3), Shard(0)), ((1,), Shard(0)), ((4,), Replicate()))
    ]
    return [nn.Parameter(tensor) for tensor in made]


def set_gradients(of: list[nn.Parameter], step: int) -> None:
    """The copy's gradient is a sum over ranks that nobody has made yet."""
    torch.manual_seed(step)
    for parameter in of:
        whole = torch.randn(parameter.shape)
        assert isinstance(parameter, DTensor)
        if parameter.placements == (Replicate(),):
            share = whole / dist.get_world_size()
            parameter.grad = DTensor.from_local(share, parameter.device_mesh, [Partial()])
        else:
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def take_steps(rank: int) -> tuple[bool, bool, list[int]]:
    """Whether parameters and state are those of torch, and how often each parameter counts as changed."""
    ours, theirs = parameters(), parameters()
    optimizers = [ShardedAdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)]
    versions = [parameter._version for parameter in ours]
    for step in range(3):
        for of, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_gradients(of, step)
            optimizer.found_inf = torch.tensor(float(step == 1))  # a step that must change nothing
            optimizer.step()
    same = all(torch.equal(local(a), local(b)) for a, b in zip(ours, theirs, strict=True))
    same_state = True
    for a, b in zip(ours, theirs, strict=True):
        mine, other = optimizers[0].state[a], optimizers[1].state[b]
        assert mine.keys() == other.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(type(mine[key]) is type(other[key]) for key in mine)
        same_state &= all(torch.equal(local(mine[key]), local(other[key])) for key in mine)
    return same, same_state, [p._version - before for p, before in zip(ours, versions, strict=True)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def test_parameters_and_state_are_those_of_torch(ranks: RankPool) -> None:
    for same, same_state, changes in ranks.run(take_steps, 2):
        assert same
        assert same_state
        assert min(changes) >= 3, "caches of weights look at the version"
