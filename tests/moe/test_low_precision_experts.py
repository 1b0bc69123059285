"""Experts with 8-bit matmuls: each expert equals a linear layer, on any kernel, compiled or not."""

import pytest
import torch

from spurline import MoE, MoEConfig
from spurline.moe.kernels.low_precision import low_precision_matmul
from spurline.ops.low_precision import LowPrecision, linear
from spurline.testing.equivalence import errors_between, layer_results, reference_results, relative_error

RECIPES = ("float8", "mxfp8")


def make(recipe: str | None, **changes: object) -> MoE:
    torch.manual_seed(0)
    config = MoEConfig(dim=64, hidden_dim=48, num_experts=4, top_k=2, num_shared_experts=1)
    moe = MoE(MoEConfig(**(vars(config) | changes)), init_std=0.2)
    if recipe is not None:
        moe.experts.precision = moe.shared_experts.precision = LowPrecision(recipe)
    return moe


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kernel", ["loop", "grouped_mm"])
def test_a_grouped_product_is_a_product_for_each_expert(kernel: str, recipe: str) -> None:
    counts, precision = [3, 0, 40, 33], LowPrecision(recipe, "e5m2")
    rows, w, grad = torch.randn(76, 32), torch.randn(4, 16, 32), torch.randn(76, 16)
    leaves = [rows.requires_grad_(), w.requires_grad_()]
    y = low_precision_matmul(*leaves, torch.tensor(counts), kernel, precision)
    found = [y, *torch.autograd.grad(y, leaves, grad)]
    expected = torch.cat([linear(part, w[e], precision) for e, part in enumerate(rows.split(counts)) if part.numel()])
    for one, other in zip(found, [expected, *torch.autograd.grad(expected, leaves, grad)], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_grouped_products_are_those_of_torchaos_own_emulation() -> None:
    pytest.importorskip("torchao", reason="needs torchao: pip install 'spurline[lowprecision]'")
    from torchao.prototype.moe_training import _to_mxfp8_then_scaled_grouped_mm
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    counts = torch.tensor([32, 96, 64])  # theirs takes multiples of 32 only
    rows, w, grad = torch.randn(192, 64).bfloat16(), torch.randn(3, 32, 64).bfloat16(), torch.randn(192, 32).bfloat16()

    def theirs(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        emulated = KernelPreference.EMULATED
        return _to_mxfp8_then_scaled_grouped_mm(rows, w.transpose(-2, -1), offs=ends, kernel_preference=emulated)

    results = []
    for product in (theirs, lambda rows, w: low_precision_matmul(rows, w, counts, "loop", LowPrecision("mxfp8"))):
        leaves = [tensor.clone().requires_grad_() for tensor in (rows, w)]
        y = product(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, grad)])
    for expected, found in zip(*results, strict=True):
        assert relative_error(found, expected) < 3e-3


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_is_as_far_from_float64_as_8_bits_are(recipe: str) -> None:
    x = torch.randn(2, 40, 64)
    moe = make(recipe)
    exact = reference_results(moe, x, torch.float64)
    errors = errors_between(layer_results(moe, x), exact)
    plain = make(None).bfloat16()
    # The same experts for each token: its choice is made in float32 from the same numbers.
    of_bf16 = errors_between(layer_results(plain, x.bfloat16()), reference_results(plain, x.bfloat16(), torch.float64))
    for name in ("y", "x", "experts.w1_EFD", "experts.w2_EDF", "shared_experts.w1_FD"):
        assert 2 * of_bf16[name] < errors[name] < 0.12, (name, errors, of_bf16)


def test_kernels_that_round_no_operands_are_left_out() -> None:
    moe, x = make("float8"), torch.randn(5, 64)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert relative_error(moe(x), make(None)(x)) > 1e-3
    named = make("float8", experts_backend="stream")
    with pytest.raises(ValueError, match="'stream' does not round operands, as float8 does"):
        named(x)
    with pytest.raises(ValueError, match="does not round operands"):
        named.experts.check_backend("cpu", torch.float32)


@pytest.mark.parametrize("recipe", RECIPES)
def test_equal_rows_without_gradients_are_rounded_too(recipe: str) -> None:
    moe, x = make(recipe, force_load_balance=True), torch.randn(8, 64)
    with torch.no_grad():
        without = moe(x)
    assert relative_error(without, moe(x)) < 1e-6


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_is_traced_as_one_graph(recipe: str) -> None:
    moe, x = make(recipe), torch.randn(6, 64)
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    grads = []
    for run in (moe, compiled):
        moe.zero_grad()
        run(x).square().sum().backward()
        grads.append([p.grad.clone() for p in moe.parameters() if p.grad is not None])
    for eager, traced in zip(*grads, strict=True):
        torch.testing.assert_close(traced, eager)
