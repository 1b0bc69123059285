import pytest
import torch
from torch import nn

from spurline.models.common.init import BLOCK_ELEMENTS, INIT_STD, initialize, residual_std
from spurline.models.common.linear import Linear
from spurline.models.common.norm import RMSNorm
from spurline.ops.draw import KeyedGenerator, drawn_in_blocks, fill_truncated_normal


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


class Recorder(nn.Module):
    """Keeps what it is asked to fill, and the first number of each generator."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        self.seen = []

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        self.seen.append((name, tuple(tensor.shape), round(torch.rand((), generator=generator).item(), 6)))


class RecorderOfBlocks(Recorder):
    init_parameter = drawn_in_blocks(Recorder.init_parameter)


def test_generators_are_the_same_in_every_process():
    whole, blocks = Recorder(300, 5), RecorderOfBlocks(65, 300)
    initialize(nn.ModuleDict({"a": whole, "b": blocks}), seed=1)
    assert whole.seen == [("weight", (300, 5), 0.175511)]
    assert blocks.seen == [
        ("weight", (64, 256), 0.871364),
        ("weight", (64, 44), 0.659357),
        ("weight", (1, 256), 0.851622),
        ("weight", (1, 44), 0.036247),
    ]


def test_generator_reads_all_of_its_key():
    """Seeds that `manual_seed` can't tell apart: it reads 32 bits of them."""
    keyed = KeyedGenerator()
    first = [torch.rand((), generator=keyed.at(key)).item() for key in ("1 w 0 0", "1 w 0 256", "1 w 64 0", "2 w 0 0")]
    assert len(set(first)) == 4
    assert torch.rand((), generator=keyed.at("1 w 0 0")).item() == first[0]
    numbers = torch.rand(20_000, generator=keyed.at("1 w 0 0"))
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.01)
    assert numbers.std().item() == pytest.approx(12**-0.5, abs=0.01)


def test_every_block_differs():
    table = Linear(256 * 5, 64 * 4)
    initialize(table, 0)
    blocks = table.weight.unfold(0, 64, 64).unfold(1, 256, 256).flatten(0, 1).flatten(1)
    assert blocks.shape == (20, BLOCK_ELEMENTS)
    assert len({tuple(block[:8].tolist()) for block in blocks}) == 20


def test_parameter_that_is_not_contiguous_or_of_another_dtype_gets_the_same_value():
    plain, transposed, rounded = Linear(300, 80), Linear(300, 80), Linear(300, 80).bfloat16()
    transposed.weight = nn.Parameter(torch.zeros(300, 80).t())
    for module in (plain, transposed, rounded):
        initialize(module, 0)
    assert torch.equal(transposed.weight, plain.weight)
    assert torch.equal(rounded.weight, plain.weight.bfloat16())


class ZeroFirstRow(Linear):
    """Its override has to see the whole matrix, and is not marked."""

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator | None) -> None:
        super().init_parameter(name, tensor, generator)
        tensor.data[0] = 0


def test_override_that_is_not_marked_is_given_the_whole_parameter():
    module = ZeroFirstRow(300, 200)
    initialize(module, 0)
    assert module.weight.eq(0).any(1).nonzero().flatten().tolist() == [0]


def test_distribution_is_the_truncated_normal_one():
    """Moments and bounds; and by the Kolmogorov-Smirnov statistic what `nn.init.trunc_normal_` draws from."""
    num = 400_000
    drawn, theirs = torch.empty(num), torch.empty(num)
    fill_truncated_normal(drawn, 0.02, torch.Generator().manual_seed(0))
    nn.init.trunc_normal_(theirs, std=0.02, a=-0.06, b=0.06, generator=torch.Generator().manual_seed(1))
    assert 0.0597 < drawn.abs().max() <= 0.06
    z = drawn.double() / 0.02
    assert abs(z.mean()) < 5 * num**-0.5
    # Truncated at 3, the normal distribution has these second and fourth moments.
    assert z.square().mean().item() == pytest.approx(0.97334, abs=0.01)
    assert z.pow(4).mean().item() == pytest.approx(2.6800, abs=0.05)
    both = torch.cat([drawn, theirs]).sort().values
    share = [torch.searchsorted(one.sort().values, both, right=True) / num for one in (drawn, theirs)]
    # Samples of one distribution differ by more in 1 of 100 cases.
    assert (share[0] - share[1]).abs().max().item() < 1.63 * (2 / num) ** 0.5


def test_bfloat16_is_rounded_from_a_finer_draw():
    low, high = torch.empty(1000, dtype=torch.bfloat16), torch.empty(1000)
    for tensor in (low, high):
        fill_truncated_normal(tensor, 1.0, torch.Generator().manual_seed(3))
    assert torch.equal(low, high.bfloat16())


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
