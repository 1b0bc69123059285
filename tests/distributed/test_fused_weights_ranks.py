"""Fused weights of experts that are DTensors: after any edit they are rebuilt, with FSDP2 too."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.moe import telemetry
from spurline.parallel.fsdp import apply_fsdp
from spurline.testing import RankPool
from spurline.testing.equivalence import relative_error

CONFIG = MoEConfig(dim=8, hidden_dim=8, num_experts=4, top_k=2, force_load_balance=True)


def load(moe: MoE) -> None:
    moe.load_state_dict({name: value * -1.5 for name, value in moe.state_dict().items()})


@torch.no_grad()
def multiply(moe: MoE) -> None:
    moe.experts.w2_EDF.mul_(2)


@torch.no_grad()
def copy(moe: MoE) -> None:
    moe.experts.w1_EFD.copy_(moe.experts.w3_EFD)


@torch.no_grad()
def edit_local(moe: MoE) -> None:
    moe.experts.w3_EFD.to_local().add_(0.5)


def step(moe: MoE) -> None:
    for parameter in moe.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(moe.parameters(), lr=0.1).step()


def replace(moe: MoE) -> None:
    moe.experts.w1_EFD = nn.Parameter(moe.experts.w1_EFD.detach() * 3)


EDITS = {f.__name__: f for f in (load, multiply, copy, edit_local, step, replace)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({"0": nn.Sequential(MoE(CONFIG, init_std=0.4))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["0"](x)


@torch.no_grad()
def run_edits(rank: int, sharded: bool) -> list[tuple[str, float, int]]:
    """Each edit on the sharded layer and on a whole one: how far apart they are then, and how often copies served."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    model, whole = Model().eval(), Model().eval()
    moe, plain = model.layers["0"][0], whole.layers["0"][0]
    plain.experts.backend = "loop"
    if sharded:
        apply_fsdp(model, mesh, mesh)
    else:
        parallelize_moe(moe, mesh)
    x = torch.randn(6, 8)
    telemetry.enable()
    found = []
    for name, edit in EDITS.items():
        if sharded and name == "replace":  # FSDP2 holds on to its parameters
            continue
        model(x)
        edit(moe)
        if name == "edit_local":
            plain.experts.w3_EFD.add_(0.5)
        else:
            edit(plain)
        telemetry.reset()
        y = model(x)
        counted = telemetry.counters()
        found.append((name, relative_error(y, whole(x)), counted.get("fused_weights.hits", 0)))
    telemetry.enable(False)
    return found


@pytest.mark.parametrize("sharded", [False, True], ids=["expert parallel", "FSDP2"])
def test_every_edit_is_noticed(ranks: RankPool, sharded: bool) -> None:
    for found in ranks.run(run_edits, 2, sharded):
        assert len(found) == len(EDITS) - sharded
        for name, error, hits in found:
            assert error < 1e-5, name
            assert hits == 0, name


@torch.no_grad()
def run_twice(rank: int) -> dict[str, int]:
    moe = parallelize_moe(MoE(CONFIG).eval(), init_device_mesh("cpu", (2,)))
    telemetry.reset()
    telemetry.enable()
    for _ in range(3):
        moe(torch.randn(6, 8))
    telemetry.enable(False)
    return telemetry.counters()


def test_unchanged_weights_are_fused_once(ranks: RankPool) -> None:
    for counted in ranks.run(run_twice, 2):
        assert counted["fused_weights.misses"] == 1
        assert counted["fused_weights.hits"] == 2
