"""What parallelize_moe changes in a layer, and what it refuses: on every rank, so that none is left waiting."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.testing import RankPool

CONFIG = MoEConfig(dim=8, hidden_dim=8, num_experts=8, top_k=2, num_shared_experts=1, check_exchange=True)


def describe(rank: int) -> dict[str, object]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    moe = MoE(CONFIG)
    before = {name: p.detach().clone() for name, p in moe.named_parameters()}
    assert parallelize_moe(moe, mesh["ep"]) is moe
    experts = dict(moe.experts.named_parameters())
    assert all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in experts.values())
    assert all(p.to_local().shape[0] == 4 for p in experts.values())
    assert not any(isinstance(p, DTensor) for n, p in moe.named_parameters() if not n.startswith("experts."))
    for name, p in moe.named_parameters():
        assert torch.equal(p.full_tensor() if isinstance(p, DTensor) else p, before[name])
    return {"names": list(before) == [name for name, _ in moe.named_parameters()], "state": sorted(moe.state_dict())}


def test_expert_weights_become_sharded_and_nothing_else_changes(ranks: RankPool) -> None:
    for result in ranks.run(describe, 4):
        assert result["names"]
        assert "experts.w1_EFD" in result["state"]


def layer_alone() -> MoE:
    torch.manual_seed(0)
    return MoE(CONFIG, init_std=0.5)


def parallelized(how: str) -> MoE:
    """The layer of `layer_alone` on two ranks, with other parameters than those that were parallelized."""
    mesh = init_device_mesh("cpu", (2,))
    if how == "materialized":
        moe = parallelize_moe(MoE(CONFIG, init_std=0.5, device="meta"), mesh).to_empty(device="cpu")
        torch.manual_seed(0)
        moe.reset_parameters()
        return moe
    whole = parallelize_moe(layer_alone(), mesh)
    if how == "copied":
        moe = copy.deepcopy(whole)
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.zero_()
        return moe
    moe = parallelize_moe(MoE(CONFIG), mesh)
    moe.load_state_dict(whole.state_dict(), assign=True)
    return moe


def replicated_gradients(rank: int, moe: MoE) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of router and shared experts: on two ranks, each with its own tokens, and of one layer with all tokens."""
    alone = layer_alone()
    assert all(
        torch.equal(p.full_tensor(), alone.get_parameter(f"experts.{n}")) for n, p in moe.experts.named_parameters()
    )
    x_PTD = torch.randn(2, 5, CONFIG.dim)
    moe(x_PTD[rank]).square().sum().backward()
    alone(x_PTD).square().sum().backward()
    own, whole = dict(moe.named_parameters()), dict(alone.named_parameters())
    return [(own[name].grad, whole[name].grad) for name in own if not name.startswith("experts.")]


def gradients_of_replaced_parameters(rank: int, how: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return replicated_gradients(rank, parallelized(how))


@pytest.mark.parametrize("how", ["materialized", "assigned", "copied"])
def test_parameters_that_replace_others_get_the_gradient_of_all_ranks(ranks: RankPool, how: str) -> None:
    for gradients in ranks.run(gradients_of_replaced_parameters, 2, how):
        assert len(gradients) == 4
        for own, whole in gradients:
            torch.testing.assert_close(own, whole)


def outputs_of_copies(rank: int, changes: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a layer across ranks and its copy, which is made after a forward and then changed."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    config, x = dataclasses.replace(CONFIG, **changes), torch.randn(2, 4, CONFIG.dim)
    model = torch.nn.Sequential(parallelize_moe(MoE(config), mesh, sequence=mesh, reduce_gradients=False))
    y = model(x)
    copied = copy.deepcopy(model)
    assert copied[0].dispatcher is not model[0].dispatcher
    assert torch.equal(copied(x), y)
    copied[0].router.expert_bias_E.fill_(9.0)
    return model(x), y


@pytest.mark.parametrize(
    "changes",
    [{"force_load_balance": True}, {"dispatcher": "capacity", "aux_loss": "batch"}, {"aux_loss": "sequence"}],
    ids=str,
)
def test_a_copy_across_ranks_shares_nothing_but_groups(ranks: RankPool, changes: dict[str, object]) -> None:
    for again, before in ranks.run(outputs_of_copies, 2, changes):
        assert torch.equal(again, before)


def gradients_after_unfreezing(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    moe = parallelize_moe(layer_alone().requires_grad_(False), init_device_mesh("cpu", (2,)))
    moe(torch.randn(5, CONFIG.dim, requires_grad=True)).square().sum().backward()
    assert all(p.grad is None for p in moe.parameters())
    return replicated_gradients(rank, moe.requires_grad_(True))


def test_router_that_is_unfrozen_later_gets_the_gradient_of_all_ranks(ranks: RankPool) -> None:
    for gradients in ranks.run(gradients_after_unfreezing, 2):
        assert len(gradients) == 4
        for own, whole in gradients:
            torch.testing.assert_close(own, whole)


def attempt(rank: int, what: str) -> str:
    world = dist.get_world_size()
    config, mesh, sequence, dtype = CONFIG, None, None, torch.float32
    if what == "experts not divisible":
        config = dataclasses.replace(CONFIG, num_experts=6)
    elif what == "two axes":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    elif what == "world not divisible":
        group_of_three = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1, 2])
        mesh, config = group_of_three, dataclasses.replace(CONFIG, num_experts=6)
    elif what == "not a mesh":
        mesh = dist.group.WORLD
    elif what == "sequence outside":
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "ep"))
        mesh, sequence = both["ep"], both["sp"]
    elif what == "other config":
        config = dataclasses.replace(CONFIG, route_scale=2.0 if rank == 2 else 1.0)
    elif what == "other dtype":
        dtype = torch.float64 if rank == 3 else torch.float32
    elif what == "other shape":
        config = dataclasses.replace(CONFIG, hidden_dim=16 if rank == 1 else 8)
    elif what == "dtype of grouped_mm":
        config, dtype = dataclasses.replace(CONFIG, experts_backend="grouped_mm"), torch.float64
    elif what == "unequal counts for bmm":
        config = dataclasses.replace(CONFIG, experts_backend="bmm")
    mesh = init_device_mesh("cpu", (world,)) if mesh is None else mesh
    torch.manual_seed(0)
    try:
        moe = parallelize_moe(MoE(config).to(dtype), mesh, sequence, layer="layers.1.moe")
        moe(torch.randn(5, 8, dtype=dtype, generator=torch.Generator().manual_seed(rank)))
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("experts not divisible", "degree 4 does not divide num_experts 6; with 4 ranks, degrees that do: 1, 2"),
        ("two axes", "ep_mesh must have one axis, got 2 (axes dp, ep): pick one, as in mesh['ep']"),
        ("not a mesh", "ep_mesh must be a DeviceMesh, got ProcessGroup"),
        ("sequence outside", "share this rank's sequence but are not in ep_mesh"),
        ("other config", "layers.1.moe: ranks disagree on config.route_scale: it is 1.0 on rank 0, 2.0 on rank 2"),
        ("other dtype", "ranks disagree on experts.w1_EFD: it is '(8, 8, 8) torch.float32' on rank 0,"),
        ("other shape", "ranks disagree on config.hidden_dim: it is 8 on rank 0, 16 on rank 1"),
        ("dtype of grouped_mm", "not torch.float64 with dim 8 and hidden_dim 8: choose 'loop' or 'auto'"),
        ("unequal counts for bmm", "needs the same number of rows for every expert, known on the host"),
    ],
)  # fmt: skip
def test_impossible_layers_are_refused_on_every_rank(ranks: RankPool, what: str, words: str) -> None:
    for message in ranks.run(attempt, 4, what, timeout=30):
        assert words in message


def test_a_degree_that_does_not_divide_the_world(ranks: RankPool) -> None:
    *inside, outside = ranks.run(attempt, 4, "world not divisible", timeout=30)
    for message in inside:
        assert message == "expert parallel degree 3 does not divide the 4 ranks there are"
    assert outside == "ep_mesh covers ranks [0, 1, 2], but not this one, rank 3"
