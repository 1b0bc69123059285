"""Rows that carry their routing weight: how exactly weights and their gradients arrive."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from spurline.ops.functional import swiglu
from spurline.ops.rows import gather_rows
from spurline.ops.weighted_rows import COLUMN_BYTES, gather_weighted_rows, split_weighted_rows

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_weights_arrive_as_they_left(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x_TD, token_S = torch.randn(9, 7).to(dtype), torch.randint(9, (4000,))
    weight_S = torch.rand(4000, dtype=torch.promote_types(dtype, torch.float32)) * 3
    rows_SX = gather_weighted_rows(x_TD, token_S, weight_S)
    assert rows_SX.shape[1] * dtype.itemsize == 7 * dtype.itemsize + 16
    rows_SD, arrived_S = split_weighted_rows(rows_SX, 7, weight_S.dtype)
    assert torch.equal(rows_SD, gather_rows(x_TD, token_S))
    assert torch.equal(arrived_S, weight_S)
    # Through a sum with zeros too, as padding on the way is.
    assert torch.equal(split_weighted_rows(rows_SX + torch.zeros_like(rows_SX), 7, weight_S.dtype)[1], weight_S)


def test_softmax_weights_are_exact_except_in_float16() -> None:
    """The smallest number of float16 is 2**-24; weights above 2**-2 are multiples of it in float32, most others not."""
    weight_S = (4 * torch.randn(500, 64)).softmax(-1).flatten()
    assert weight_S.min() < 1e-7
    errors = {}
    for dtype in DTYPES[:3]:
        rows_SX = gather_weighted_rows(torch.zeros(1, 3, dtype=dtype), torch.zeros_like(weight_S).long(), weight_S)
        errors[dtype] = (split_weighted_rows(rows_SX, 3, torch.float32)[1] - weight_S).abs().max().item()
    assert errors[torch.bfloat16] == errors[torch.float32] == 0
    assert 0 < errors[torch.float16] <= 2**-25


@pytest.mark.parametrize("bits", [1.0 + 2**-23, 2.0 - 2**-23, 1 / 3, 2**-30 / 3, 1 - 2**-24, 0.0, 255.99998])
def test_the_last_bit_of_a_weight_crosses_in_bfloat16(bits: float) -> None:
    weight_S = torch.tensor([bits, -bits])
    rows_SX = gather_weighted_rows(torch.zeros(1, 3, dtype=torch.bfloat16), torch.tensor([0, 0]), weight_S)
    assert torch.equal(split_weighted_rows(rows_SX, 3, torch.float32)[1], weight_S)


@pytest.mark.parametrize("dtype", DTYPES[2:])
def test_gradients_are_those_of_rows_and_weights_apart(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    token_S, scale_SD = torch.randint(5, (12,)), torch.randn(12, 3, dtype=dtype)
    x_TD, weight_S = torch.randn(5, 3, dtype=dtype, requires_grad=True), torch.rand(12, dtype=dtype, requires_grad=True)

    def together(x_TD: torch.Tensor, weight_S: torch.Tensor) -> torch.Tensor:
        rows_SD, arrived_S = split_weighted_rows(gather_weighted_rows(x_TD, token_S, weight_S), 3, dtype)
        return (rows_SD.sin() * arrived_S.unsqueeze(1) * scale_SD).sum()

    def apart(x_TD: torch.Tensor, weight_S: torch.Tensor) -> torch.Tensor:
        return (x_TD[token_S].sin() * weight_S.unsqueeze(1) * scale_SD).sum()

    found = torch.autograd.grad(together(x_TD, weight_S), (x_TD, weight_S), create_graph=True)
    expected = torch.autograd.grad(apart(x_TD, weight_S), (x_TD, weight_S), create_graph=True)
    torch.testing.assert_close(found, expected)
    twice = [torch.autograd.grad(sum(g.square().sum() for g in grads), (x_TD, weight_S)) for grads in (found, expected)]
    torch.testing.assert_close(*twice)


def test_the_backward_pass_asks_for_no_number_that_a_trace_cannot_know() -> None:
    """Rows that other ranks send are a symbol without a value: on fake tensors a read of it raises."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        num_rows = torch.zeros(9).nonzero().shape[0]
        rows_RX = torch.empty(num_rows, 8 + COLUMN_BYTES // 2, dtype=torch.bfloat16, requires_grad=True)
        rows_RD, weight_R = split_weighted_rows(rows_RX, 8, torch.float32)
        grads = torch.empty(num_rows, 8, dtype=torch.bfloat16), torch.empty(num_rows)
        (grad_RX,) = torch.autograd.grad([rows_RD, weight_R], [rows_RX], grads)
        assert grad_RX.shape[1] == rows_RX.shape[1]


@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_keeps_its_arguments_alone_and_computes_what_the_formula_does(weighted: bool) -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = [torch.rand(6, dtype=torch.float64, requires_grad=True)] if weighted else []
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        hidden = swiglu(gate, up, *weights)
    assert set(kept) == {t.data_ptr() for t in (gate, up, *weights)}
    expected = torch.nn.functional.silu(gate) * up * (weights[0].unsqueeze(1) if weighted else 1)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-15)
    assert torch.autograd.gradcheck(swiglu, (gate, up, *weights))
    assert torch.autograd.gradgradcheck(swiglu, (gate, up, *weights))
