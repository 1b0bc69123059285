"""The initial weights of a rank are its part of the whole model's, in every layout, and it draws little else."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from spurline.config import Compile, Parallelism
from spurline.models.common.init import initialize
from spurline.models.common.linear import Linear
from spurline.parallel.degrees import resolve_degrees
from spurline.parallel.mesh import build_meshes
from spurline.parallel.model import parallelize_model
from spurline.testing import RankPool
from spurline.testing.draws import CountDraws
from spurline.testing.tiny import tiny_model


class Stack(nn.Module):
    """One parameter of any shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.std = 1.0
        self.weight = nn.Parameter(torch.empty(shape))

    init_parameter = Linear.init_parameter


class Orthogonal(Stack):
    """Has to see the whole matrix."""

    def init_parameter(self, name, tensor, generator):
        nn.init.orthogonal_(tensor, generator=generator)


def shard(module: Stack, mesh, placements) -> DTensor:
    """The module's weight, sharded and then initialized."""
    empty = torch.full_like(module.weight.data, torch.nan)
    module.weight = nn.Parameter(distribute_tensor(empty, mesh, placements, src_data_rank=None))
    initialize(module, 0)
    return module.weight


# Blocks are 64 rows of 256 columns; of the third, which has 5 columns, 3276 rows; of the vector 16384.
SHAPES = [(150, 600), (6, 50, 300), (4000, 5), (20000,), (3, 2), ()]
PLACEMENTS = [
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Replicate()),
    (Replicate(), Shard(1)),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (_StridedShard(1, split_factor=2), Shard(1)),
    (Shard(2), Shard(1)),
    (Replicate(), Replicate()),
]


def wrong_parts(rank: int) -> tuple[list[object], int]:
    """The cases in which the parts of all ranks are not the whole value, and the number of cases."""
    mesh, wrong, num_cases = init_device_mesh("cpu", (2, 2)), [], 0
    for make, shape in [*((Stack, shape) for shape in SHAPES), (Orthogonal, (150, 6))]:
        whole = make(*shape)
        initialize(whole, 0)
        assert whole.weight.isfinite().all()
        for placements in PLACEMENTS:
            if all(getattr(placement, "dim", -1) < len(shape) for placement in placements):
                num_cases += 1
                if not torch.equal(shard(make(*shape), mesh, placements).full_tensor(), whole.weight):
                    wrong.append((make, shape, placements))
    return wrong, num_cases


def test_parts_of_a_parameter_make_up_its_whole_value(ranks: RankPool) -> None:
    assert ranks.run(wrong_parts, 4) == [([], 40)] * 4


def drawn_by_placement(rank: int, placements) -> int:
    with CountDraws() as draws:
        shard(Stack(4096, 2048), init_device_mesh("cpu", (2, 2)), placements)
    return draws.num_drawn


@pytest.mark.parametrize(
    ("placements", "num_drawn"),
    [
        ((Shard(0), Shard(0)), 1024 * 2048),
        ((Shard(1), Shard(1)), 4096 * 512),
        ((Shard(0), Shard(1)), 2048 * 1024),
        ((Replicate(), Replicate()), 4096 * 2048),
    ],
)
def test_rank_draws_what_it_holds(ranks: RankPool, placements, num_drawn: int) -> None:
    assert ranks.run(drawn_by_placement, 4, placements) == [num_drawn] * 4


LAYOUTS = {
    "fsdp": Parallelism(),
    "hsdp": Parallelism(data_parallel_replicate_degree=2),
    "tp": Parallelism(tensor_parallel_degree=2),
    "ep 2": Parallelism(expert_parallel_degree=2),
    "ep 4, tp 2": Parallelism(tensor_parallel_degree=2, expert_parallel_degree=4),
    "etp": Parallelism(tensor_parallel_degree=2, expert_tensor_parallel_degree=2),
}


def wrong_parameters(rank: int, parallelism: Parallelism, num_experts: int, per_param_mesh: bool) -> list[str]:
    # Widths that four ranks can't share evenly, and more columns than a block has.
    moe = {"num_experts": num_experts, "hidden_dim": 70}
    config = tiny_model(moe, dim=96, vocab_size=604, dense_hidden_dim=310, num_layers=2)
    whole = config.build()
    initialize(whole, 0)
    with torch.device("meta"):
        model = config.build()
    meshes = build_meshes(resolve_degrees(parallelism, 4), "cpu")
    parallelize_model(model, meshes, "none", Compile(), per_param_mesh)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:  # to_empty may hand out zeros by luck
        tensor.detach().fill_(torch.nan if tensor.is_floating_point() else 99)
    initialize(model, 0)
    wrong = []
    for (name, parameter), full in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(parameter, DTensor), name
        if not torch.equal(parameter.full_tensor(), full):
            wrong.append(f"{name} {parameter.placements}")
    return wrong


@pytest.mark.parametrize("parallelism", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_model_of_any_layout_begins_with_the_weights_of_one_process(ranks: RankPool, parallelism) -> None:
    # With 6 experts and ep 2, two ranks can't share the three of a rank evenly: those are sharded by width.
    num_experts = 8 if parallelism.expert_parallel_degree == 4 else 6
    assert ranks.run(wrong_parameters, 4, parallelism, num_experts, True) == [[]] * 4


def test_experts_as_units_of_their_own_begin_with_the_same_weights(ranks: RankPool) -> None:
    assert ranks.run(wrong_parameters, 4, LAYOUTS["ep 2"], 6, False) == [[]] * 4
