"""The two views of one world: on fake ranks, that they agree; on gloo ranks, that they work."""

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from spurline.parallel.degrees import Degrees
from spurline.parallel.mesh import Meshes, build_meshes
from spurline.testing import RankPool


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """This process as one rank of many; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@st.composite
def degrees_and_rank(draw: st.DrawFn) -> tuple[Degrees, int]:
    """Any degrees that make up at most 64 ranks, and one of the ranks."""

    def divisor(number: int) -> int:
        return draw(st.sampled_from([d for d in range(1, number + 1) if number % d == 0]))

    world = draw(st.integers(1, 64))
    pp = divisor(world)
    stage = world // pp
    tp = divisor(stage)
    cp = divisor(stage // tp)
    dp_shard = divisor(stage // (cp * tp))
    ep = divisor(dp_shard * cp * tp)
    etp = divisor(dp_shard * cp * tp // ep)
    return Degrees(stage // (tp * cp * dp_shard), dp_shard, tp, ep, etp, cp, pp), draw(st.integers(0, world - 1))


def ranks_along(axes: set[str], size_by_axis: dict[str, int], rank: int) -> list[int]:
    """The ranks that differ from `rank` in these axes only, by counting coordinates in the order of the ranks."""
    coordinates = list(itertools.product(*(range(size) for size in size_by_axis.values())))
    kept = [i for i, axis in enumerate(size_by_axis) if axis not in axes]
    return [r for r, c in enumerate(coordinates) if all(c[i] == coordinates[rank][i] for i in kept)]


def group_ranks(mesh: DeviceMesh) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group())


@given(degrees_and_rank())
@settings(max_examples=60)
def test_both_views_cover_the_same_ranks_in_the_same_order(drawn: tuple[Degrees, int]) -> None:
    d, rank = drawn
    dense = {"dp_replicate": d.dp_replicate, "dp_shard": d.dp_shard * d.cp, "tp": d.tp}
    sparse = {"dp_replicate": d.dp_replicate, "efsdp": d.efsdp, "ep": d.ep, "etp": d.etp}
    with fake_world(rank, d.world):
        meshes = build_meshes(d, "cpu")
        for mesh, size_by_axis in ((meshes.dense, dense), (meshes.sparse, sparse)):
            assert mesh.mesh_dim_names == tuple(size_by_axis)
            assert mesh.shape == tuple(size_by_axis.values())
            of_stage = range(rank // d.stage * d.stage, (rank // d.stage + 1) * d.stage)
            assert mesh.mesh.flatten().tolist() == list(of_stage)
            for axis in size_by_axis:
                assert group_ranks(mesh[axis]) == ranks_along({axis}, {"pp": d.pp, **size_by_axis}, rank)
        assert dist.get_process_group_ranks(meshes.stage_group) == list(of_stage)
        axes = {"pp": d.pp, "dp_replicate": d.dp_replicate, "dp_shard": d.dp_shard, "cp": d.cp, "tp": d.tp}
        if meshes.pp is not None:
            assert group_ranks(meshes.pp) == ranks_along({"pp"}, axes, rank)
        for group, along in (
            (meshes.batch_group, {"dp_replicate", "dp_shard"}),
            (meshes.loss_group, {"pp", "dp_replicate", "dp_shard", "cp"}),
            (meshes.sequence_group, {"cp", "tp"}),
            (meshes.cp_group, {"cp"}),
        ):
            assert dist.get_process_group_ranks(group) == ranks_along(along, axes, rank)
        assert dist.get_process_group_ranks(meshes.world_group) == list(range(d.world))
        assert (meshes.data_rank, meshes.data_size) == (rank % d.stage // (d.cp * d.tp), d.dp)


@given(degrees_and_rank())
@settings(max_examples=30)
def test_meshes_to_shard_over_have_as_many_axes_as_there_is_to_split(drawn: tuple[Degrees, int]) -> None:
    d, rank = drawn
    copies = ("dp_replicate",) if d.dp_replicate > 1 else ()
    with fake_world(rank, d.world):
        meshes = build_meshes(d, "cpu")
        assert meshes.fsdp_mesh.mesh_dim_names == (*copies, "dp_shard")
        assert meshes.expert_fsdp_mesh.mesh_dim_names == (*copies, "efsdp")
        assert meshes.tp_mesh.mesh_dim_names == ("tp",)
        assert meshes.expert_mesh.mesh_dim_names == (("ep", "etp") if d.etp > 1 else ("ep",))
        # A parameter of the model lives on one mesh of each pair, sharded and spread: together they are the world.
        assert meshes.fsdp_mesh.size() * meshes.tp_mesh.size() == d.stage
        assert meshes.expert_fsdp_mesh.size() * meshes.expert_mesh.size() == d.stage


def test_degrees_of_another_world_are_a_bug() -> None:
    with fake_world(0, 4), pytest.raises(AssertionError, match="is not for 4 ranks"):
        build_meshes(Degrees(1, 8, 1, 1, 1), "cpu")


def sums_over_every_group(rank: int, d: Degrees) -> dict[str, float]:
    """What all-reduces of 2 ** rank give: the bits of a sum say which ranks it is over."""
    meshes = build_meshes(d, "cpu")
    groups = {"world": meshes.world_group, "batch": meshes.batch_group}
    for view in (meshes.dense, meshes.sparse):
        groups |= {f"{view.ndim}-{axis}": view.get_group(axis) for axis in view.mesh_dim_names or ()}
    sums = {}
    for name, group in groups.items():
        x = torch.tensor(2.0**rank)
        dist.all_reduce(x, group=group)
        sums[name] = x.item()
    return sums


def test_all_reduces_add_up_over_the_right_ranks(ranks: RankPool) -> None:
    d = Degrees(dp_replicate=2, dp_shard=2, tp=2, ep=2, etp=2)
    expected = {  # the group of rank 5, which is at (1, 0, 1) of the dense and at (1, 0, 0, 1) of the sparse view
        "world": range(8),
        "batch": [1, 3, 5, 7],
        "3-dp_replicate": [1, 5],
        "3-dp_shard": [5, 7],
        "3-tp": [4, 5],
        "4-dp_replicate": [1, 5],
        "4-efsdp": [5],
        "4-ep": [5, 7],
        "4-etp": [4, 5],
    }
    results = ranks.run(sums_over_every_group, 8, d)
    assert results[5] == {name: sum(2.0**r for r in members) for name, members in expected.items()}
    for name in expected:  # the groups of an axis are the world, each rank once
        assert sum({result[name] for result in results}) == 255


class Layer(nn.Module):
    """A matrix with tensor parallelism, a norm's weight without, and four experts."""

    def __init__(self, meshes: Meshes) -> None:
        super().__init__()
        matrix, expert = torch.arange(32.0).view(8, 4), torch.arange(64.0).view(4, 4, 4)
        expert_placements = [Shard(0), Shard(1)][: meshes.expert_mesh.ndim]
        self.norm = nn.Parameter(torch.arange(8.0))
        self.matrix = nn.Parameter(distribute_tensor(matrix, meshes.tp_mesh, [Shard(0)]))
        self.expert = nn.Parameter(distribute_tensor(expert, meshes.expert_mesh, expert_placements))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.norm.sum() + self.matrix.to_local().sum() + self.expert.to_local().sum())


def gradients_under_fsdp(rank: int, d: Degrees) -> dict[str, Tensor]:
    """The whole gradient of each parameter when the loss of a rank is 2 ** rank times the sum of what it holds."""
    meshes = build_meshes(d, "cpu")
    layer = Layer(meshes)
    mesh = meshes.expert_fsdp_mesh
    info = FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    on_experts_mesh = ShardPlacementResult(placement=None, mesh_info=info)
    fully_shard(
        layer, mesh=meshes.fsdp_mesh, shard_placement_fn=lambda p: on_experts_mesh if p is layer.expert else None
    )
    whole = {name: p.full_tensor() for name, p in layer.named_parameters()}
    assert torch.equal(whole["matrix"], torch.arange(32.0).view(8, 4))
    assert torch.equal(whole["expert"], torch.arange(64.0).view(4, 4, 4))
    layer(torch.tensor(2.0**rank)).backward()
    return {name: p.grad.full_tensor() for name, p in layer.named_parameters()}


@pytest.mark.parametrize(
    "d",
    [
        Degrees(dp_replicate=1, dp_shard=4, tp=2, ep=4, etp=1),
        Degrees(dp_replicate=1, dp_shard=4, tp=2, ep=2, etp=2),
        Degrees(dp_replicate=2, dp_shard=2, tp=2, ep=2, etp=2),
        Degrees(dp_replicate=4, dp_shard=1, tp=2, ep=2, etp=1),
    ],
    ids=str,
)
def test_fsdp_takes_both_views_and_averages_over_the_ranks_that_hold_the_same(ranks: RankPool, d: Degrees) -> None:
    results = ranks.run(gradients_under_fsdp, 8, d)
    loss_R = 2.0 ** torch.arange(8)
    # The ranks along the first dim hold the same part.
    matrix_T = loss_R.view(d.dp, d.tp).mean(0)
    expert_PQ = loss_R.view(d.dp_replicate * d.efsdp, d.ep, d.etp).mean(0)
    for rank, gradient in enumerate(results):
        assert torch.equal(gradient["norm"], matrix_T[rank % d.tp].expand(8))
        assert torch.equal(gradient["matrix"], matrix_T.repeat_interleave(8 // d.tp)[:, None].expand(8, 4))
        expected = expert_PQ.repeat_interleave(4 // d.ep, 0).repeat_interleave(4 // d.etp, 1)
        assert torch.equal(gradient["expert"], expected[:, :, None].expand(4, 4, 4))
