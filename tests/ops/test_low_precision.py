"""8-bit matmuls: operands are rounded as torchao rounds them, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from spurline.ops import torchao_products
from spurline.ops.low_precision import BLOCK, DTYPES, LowPrecision, linear, round_groups, round_operand
from spurline.ops.torchao_products import LINEAR_MULTIPLES, native_linear, padded_places
from spurline.testing.equivalence import relative_error

RECIPES = ("float8", "mxfp8")


def spread(rows: int, columns: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> torch.Tensor:
    """Numbers of very different sizes, with a row and a block of zeros."""
    x = (torch.randn(rows, columns) * size * torch.logspace(-3, 3, columns)).to(dtype)
    x[rows // 2] = 0
    x[0, :BLOCK] = 0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("element", DTYPES)
def test_rounding_is_torchaos_bit_for_bit(element: str, dtype: torch.dtype) -> None:
    pytest.importorskip("torchao", reason="needs torchao: pip install 'spurline[lowprecision]'")
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    to = DTYPES[element]
    for size in (1e-30, 1e-6, 1.0, 1e4):
        x = spread(64, 96, dtype, size)
        scale, data = to_mx(x, to, BLOCK, ScaleCalculationMode.RCEIL)
        assert torch.equal(round_operand(x, "mxfp8", element, 1), to_dtype(data, scale, to, BLOCK, dtype))
        for dim in (0, 1):
            scale = tensor_to_scale(
                x,
                to,
                scaling_granularity=ScalingGranularity.AXISWISE,
                axiswise_dim=dim,
                round_scales_to_power_of_2=True,
            )
            expected = (to_fp8_saturated(x.float() * scale, to).float() / scale).to(dtype)
            assert torch.equal(round_operand(x, "float8", element, dim), expected)
        turned = round_operand(x.t().contiguous(), "mxfp8", element, 0).t()
        assert torch.equal(turned, round_operand(x, "mxfp8", element, 1))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_products_operands_are_rounded_along_the_dim_it_sums_over(recipe: str) -> None:
    x, w, grad = spread(40, 64).requires_grad_(), torch.randn(48, 64, requires_grad=True), spread(40, 48)
    y = linear(x, w, LowPrecision(recipe, "e5m2"))
    dx, dw = torch.autograd.grad(y, (x, w), grad)
    x, w = x.detach(), w.detach()

    def rounded(tensor: torch.Tensor, dim: int, element: str = "e4m3") -> torch.Tensor:
        return round_operand(tensor, recipe, element, dim)

    assert torch.equal(y, rounded(x, 1) @ rounded(w, 1).t())
    assert torch.equal(dx, rounded(grad, 1, "e5m2") @ rounded(w, 0))
    assert torch.equal(dw, rounded(grad, 0, "e5m2").t() @ rounded(x, 0))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_products_are_those_of_torchaos_own_emulation(recipe: str) -> None:
    pytest.importorskip("torchao", reason="needs torchao: pip install 'spurline[lowprecision]'")
    x, w, grad = spread(64, 96).bfloat16(), torch.randn(32, 96).bfloat16(), torch.randn(64, 32).bfloat16()
    if recipe == "float8":
        from dataclasses import replace

        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

        emulated = ScaledMMConfig(emulate=True)
        config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)

        def theirs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return matmul_with_hp_or_float8_args.apply(x, w.t(), LinearMMConfig(*[emulated] * 3), config)
    else:
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        from torchao.prototype.mx_formats.config import (
            MXFP8Dim0CastKernelChoice,
            MXFP8Dim1CastKernelChoice,
            ScaleCalculationMode,
        )
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        e4m3 = DTYPES["e4m3"]
        how = (MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH, ScaleCalculationMode.RCEIL, False)

        def theirs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return mx_mm.apply(x, w, e4m3, e4m3, e4m3, BLOCK, KernelPreference.EMULATED, *how)

    results = []
    for product in (theirs, lambda x, w: linear(x, w, LowPrecision(recipe))):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, w)]
        y = product(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, grad)])
    for expected, found in zip(*results, strict=True):
        assert relative_error(found, expected) < 3e-3  # sums in another order, rounded to bfloat16


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("counts", [[3, 0, 40, 33, 64], [0, 0], [70], [1, 1, 1]], ids=str)
def test_rows_of_an_expert_are_rounded_apart_from_others(counts: list[int], recipe: str) -> None:
    x = torch.randn(sum(counts), 20) * torch.logspace(-4, 4, sum(counts)).unsqueeze(1)
    found = round_groups(x, torch.tensor(counts), recipe, "e4m3")
    for part, expected in zip(found.split(counts), x.split(counts), strict=True):
        assert torch.equal(part, round_operand(expected, recipe, "e4m3", 0))


@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=9), multiple=st.sampled_from([1, 16, 128]))
def test_padded_rows_keep_their_order_and_each_expert_begins_at_a_multiple(counts: list[int], multiple: int) -> None:
    place_R, end_e, size = padded_places(torch.tensor(counts), sum(counts), multiple)
    expected, ends, start = [], [], 0
    for count in counts:
        expected += range(start, start + count)
        start += max(-(-count // multiple), 1) * multiple  # never an empty sum
        ends.append(start)
    assert place_R.tolist() == expected
    assert end_e.tolist() == ends
    assert ends[-1] <= size
    assert size % multiple == 0


@pytest.mark.parametrize("num_rows", [0, 5, 64, 70])
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_of_a_native_matmul_are_padded_to_a_multiple(recipe: str, num_rows: int, monkeypatch) -> None:
    """The native function is replaced by the emulation, with what torchao asserts of its operands."""

    def theirs(x: torch.Tensor, w: torch.Tensor, recipe: str) -> torch.Tensor:
        assert x.shape[0] > 0
        assert x.shape[0] % LINEAR_MULTIPLES[recipe] == 0
        assert x.is_contiguous()
        assert w.is_contiguous()
        return linear(x, w, LowPrecision(recipe))

    monkeypatch.setattr(torchao_products, "_linear", theirs)
    x, w, grad = torch.randn(32, num_rows).t(), torch.randn(32, 16).t(), torch.randn(num_rows, 16)
    leaves, results = [x.requires_grad_(), w.requires_grad_()], []
    for product in (native_linear, linear):
        y = product(*leaves, LowPrecision(recipe))
        results.append([y, *torch.autograd.grad(y, leaves, grad)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_error_of_a_product_against_float64(recipe: str) -> None:
    x, w = torch.randn(256, 256), torch.randn(128, 256)
    exact = F.linear(x.double(), w.double())
    error = relative_error(linear(x, w, LowPrecision(recipe)), exact)
    of_bf16 = relative_error(F.linear(x.bfloat16(), w.bfloat16()), exact)
    # A number of e4m3 has 3 bits behind the leading one, of bfloat16 7: about 16 times the error.
    assert of_bf16 < error < 20 * of_bf16, (error, of_bf16)
    assert 0.01 < error < 0.05, error


@pytest.mark.parametrize("recipe", RECIPES)
def test_traced_as_one_graph(recipe: str) -> None:
    x, w = torch.randn(2, 9, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return linear(x, w, LowPrecision(recipe))

    results = []
    for run in (product, torch.compile(product, backend="aot_eager", fullgraph=True)):
        y = run(x, w)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, w))])
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)
