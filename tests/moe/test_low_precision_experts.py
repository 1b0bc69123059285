"""Experts with 8-bit matmuls: each expert equals a linear layer, on any kernel, compiled or not."""

import inspect
from importlib.util import find_spec

import pytest
import torch

from spurline import MoE, MoEConfig
from spurline.moe.kernels.low_precision import low_precision_matmul
from spurline.ops import torchao_products
from spurline.ops.low_precision import LowPrecision, linear
from spurline.ops.torchao_products import EXPERT_MULTIPLES
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


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("counts", [[3, 0, 140, 33], [0, 0, 0], [128, 256]], ids=str)
def test_groups_of_a_native_matmul_are_multiples_and_not_empty(counts: list[int], recipe: str, monkeypatch) -> None:
    """The native function is replaced by the emulation, with what torchao asserts; rows past the last end are lost."""

    def theirs(rows: torch.Tensor, w_eIO: torch.Tensor, end_e: torch.Tensor, recipe: str) -> torch.Tensor:
        sizes, multiple = torch.diff(end_e, prepend=end_e.new_zeros(1)), EXPERT_MULTIPLES[recipe]
        assert rows.shape[0] % multiple == 0
        assert not (sizes % multiple).any()
        assert sizes.min() > 0
        assert end_e.dtype == torch.int32
        assert w_eIO.stride(1) == 1
        used = rows[: end_e[-1]]
        y = low_precision_matmul(used, w_eIO.transpose(1, 2), sizes.long(), "loop", LowPrecision(recipe))
        return torch.cat([y, y.new_full((rows.shape[0] - len(y), y.shape[1]), torch.nan)])

    monkeypatch.setattr(torchao_products, "_grouped_matmul", theirs)
    rows, w, grad = torch.randn(sum(counts), 32), torch.randn(len(counts), 16, 32), torch.randn(sum(counts), 16)
    leaves, results = [rows.requires_grad_(), w.requires_grad_()], []
    for native in (True, False):
        precision = LowPrecision(recipe, native=native)
        y = low_precision_matmul(*leaves, torch.tensor(counts), "loop", precision)
        results.append([y, *torch.autograd.grad(y, leaves, grad)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_torchaos_grouped_matmul_is_called_as_it_is_declared(recipe: str, monkeypatch) -> None:
    pytest.importorskip("torchao", reason="needs torchao: pip install 'spurline[lowprecision]'")
    from torchao.float8 import config
    from torchao.prototype import moe_training

    name = {"float8": "_to_fp8_rowwise_then_scaled_grouped_mm", "mxfp8": "_to_mxfp8_then_scaled_grouped_mm"}[recipe]
    declared, calls = inspect.signature(getattr(moe_training, name)), []
    monkeypatch.setattr(
        moe_training, name, lambda *args, **named: calls.append(declared.bind(*args, **named)) or args[0]
    )
    monkeypatch.setattr(config, "e4m3_dtype", torch.float8_e4m3fnuz)  # as on MI300
    rows, w, counts = torch.randn(4, 16).bfloat16(), torch.randn(1, 16, 16).bfloat16(), torch.tensor([4])
    torchao_products.native_grouped_matmul(rows, w, counts, LowPrecision(recipe, native=True))
    (call,) = calls
    assert call.arguments["out_dtype"] == torch.bfloat16
    if recipe == "float8":
        assert call.arguments["float8_dtype"] == torch.float8_e4m3fnuz
        assert call.arguments["pad_token_groups_for_grouped_mm"] is False


def test_missing_packages_are_those_that_torchao_imports() -> None:
    pytest.importorskip("torchao", reason="needs torchao: pip install 'spurline[lowprecision]'")
    modules = {"cuda-python": "cuda", "nvidia-cutlass-dsl": "cutlass", "apache-tvm-ffi": "tvm_ffi"}
    missing = {package for package, module in modules.items() if find_spec(module) is None}
    assert missing <= set(torchao_products.missing_packages()) <= modules.keys()


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
