import pytest
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from spurline.models.common.init import INIT_STD, initialize, residual_std
from spurline.models.common.linear import Linear
from spurline.models.common.norm import RMSNorm


def built(config, seed=0):
    model = config.build()
    initialize(model, seed)
    return model


def assert_same_state(left: nn.Module, right: nn.Module) -> None:
    left_state, right_state = left.state_dict(), right.state_dict()
    assert left_state.keys() == right_state.keys()
    for name, value in left_state.items():
        assert torch.equal(value, right_state[name]), name


def test_meta_build_gives_the_same_state_bit_for_bit_and_a_working_model(small_config):
    config = small_config()
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:  # to_empty may hand out zeros by luck
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else 99)
    initialize(model, seed=0)
    assert_same_state(model, built(config))
    tokens_BL = torch.arange(12).view(2, 6)
    assert torch.equal(model(tokens_BL), built(config)(tokens_BL))


def test_values_depend_on_seed_and_name_but_on_no_other_module():
    def value(seed: int, **modules: nn.Module) -> torch.Tensor:
        model = nn.ModuleDict(modules)
        initialize(model, seed)
        return model["a"].weight

    base = value(0, a=Linear(4, 5))
    torch.manual_seed(123)
    assert torch.equal(base, value(0, b=Linear(3, 3), norm=RMSNorm(2, 1e-5), a=Linear(4, 5)))
    assert not torch.equal(base, value(1, a=Linear(4, 5)))
    both = nn.ModuleDict({"a": Linear(4, 5), "b": Linear(4, 5)})
    initialize(both, 0)
    assert not torch.equal(both["a"].weight, both["b"].weight)


def test_generator_of_a_parameter_is_the_same_in_every_process():
    class Recorder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
            self.seen = (name, tensor.shape, generator.initial_seed())

    recorder = Recorder()
    initialize(recorder, seed=1)
    assert recorder.seen == ("weight", (1,), 14670958072092436758)


def test_every_matrix_of_two_seeds_differs(small_config):
    left, right = built(small_config(), seed=0), built(small_config(), seed=1)
    for (name, one), other in zip(left.named_parameters(), right.parameters(), strict=True):
        assert one.ndim < 2 or not torch.equal(one, other), name


def test_matrices_that_write_into_the_residual_stream_start_smaller(small_config):
    model = built(small_config(dim=128, num_layers=8, num_dense_layers=7))
    dense, sparse = model.layers["3"], model.layers["7"]
    writers = [dense.attention.wo.weight, dense.feed_forward.w2.weight]
    writers += [sparse.moe.experts.w2_EDF, sparse.moe.shared_experts.w2_DF]
    others = [
        dense.attention.wkv_a.weight,
        dense.feed_forward.w1.weight,
        sparse.moe.experts.w1_EFD,
        model.output.weight,
    ]
    for weight in writers:
        assert weight.std().item() == pytest.approx(residual_std(8), rel=0.1)
    for weight in others:
        assert weight.std().item() == pytest.approx(INIT_STD, rel=0.1)
    assert residual_std(8) == pytest.approx(INIT_STD / 4)


def test_module_that_can_not_initialize_what_it_owns_is_named():
    model = nn.ModuleDict({"plain": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"plain \(Linear\) owns weight .* method init_parameter\("):
        initialize(model, 0)
    with pytest.raises(ValueError, match=r"the model \(BatchNorm1d\) owns running_mean .* method init_buffers\("):
        initialize(nn.BatchNorm1d(2, affine=False), 0)


@pytest.fixture
def rank_2_of_4():
    init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield
    destroy_process_group()


def test_sharded_parameter_gets_its_part_of_the_full_value(rank_2_of_4):
    mesh = init_device_mesh("cpu", (2, 2))
    full = Linear(6, 8)
    initialize(full, 0)
    # Rank 2 is at (1, 0) in the mesh: the second half along the first axis, the first half along the second.
    for placements, rows, columns in [
        ((Shard(0), Shard(0)), slice(4, 6), slice(None)),
        ((Shard(0), Shard(1)), slice(4, 8), slice(0, 3)),
        ((Replicate(), Shard(1)), slice(None), slice(0, 3)),
    ]:
        sharded = Linear(6, 8)
        empty = torch.zeros_like(full.weight)
        sharded.weight = nn.Parameter(distribute_tensor(empty, mesh, placements, src_data_rank=None))
        initialize(sharded, 0)
        assert torch.equal(sharded.weight.to_local(), full.weight[rows, columns]), placements


def test_fsdp_model_built_on_meta_gets_the_values_of_the_plain_one(rank_2_of_4, small_config):
    config = small_config()
    with torch.device("meta"):
        model = config.build()
    mesh = init_device_mesh("cpu", (4,))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    initialize(model, 0)
    for (name, sharded), full in zip(model.named_parameters(), built(config).parameters(), strict=True):
        assert isinstance(sharded, DTensor)
        rows = -(-full.shape[0] // 4)
        assert torch.equal(sharded.to_local(), full[2 * rows : 3 * rows]), name
