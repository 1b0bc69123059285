import pytest
import torch

from spurline.models.common.feed_forward import FeedForward
from spurline.models.common.linear import Embedding, Linear
from spurline.models.common.norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("module", [Linear(8, 8), RMSNorm(8, 1e-5), FeedForward(8, 6)])
def test_output_has_the_dtype_of_the_input_and_gradients_that_of_the_parameter(module, dtype):
    out = module(torch.randn(3, 8, dtype=dtype))
    assert out.dtype == dtype
    for parameter, gradient in zip(
        module.parameters(), torch.autograd.grad(out.sum(), list(module.parameters())), strict=True
    ):
        assert parameter.dtype == gradient.dtype == torch.float32


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    norm = RMSNorm(64, 1e-5)
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x.float()).double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(norm(x), norm(x.float()).bfloat16())


def test_rms_norm_of_tiny_rows_is_held_by_eps():
    assert RMSNorm(4, 1e-2)(torch.full((1, 4), 1e-3)).max() < 1e-2


def test_feed_forward_is_swiglu():
    feed_forward = FeedForward(4, 6)
    x = torch.randn(3, 4)
    gate, up = x @ feed_forward.w1.weight.T, x @ feed_forward.w3.weight.T
    expected = (gate * gate.sigmoid() * up) @ feed_forward.w2.weight.T
    torch.testing.assert_close(feed_forward(x), expected)


@pytest.mark.parametrize("make", [Linear, Embedding])
def test_a_module_is_usable_as_built_with_the_asked_spread_cut_at_three_deviations(make):
    weight = make(200, 300, std=0.5).weight
    assert weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert weight.abs().max() <= 1.5
