from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spurline import MoE, MoEConfig
from spurline.moe import RowCounts, Rows, telemetry
from spurline.moe.dispatch.combine import combine_rows
from spurline.ops import rows as ops

TOKEN_R = torch.tensor([2, 0, 2, 4, 0, 2])


def test_rows_are_added_in_their_order() -> None:
    rows = torch.randn(500, 3)
    token = torch.randint(0, 7, (500,))
    expected = torch.zeros(7, 3)
    for t, row in zip(token.tolist(), rows, strict=True):
        expected[t] += row
    assert torch.equal(ops.scatter_add_rows(rows, token, 7), expected)
    base = torch.randn(7, 3)
    in_place = base.clone()
    ops.scatter_add_rows_(in_place, token, rows)
    assert torch.equal(ops.scatter_add_rows(rows, token, 7, base), in_place)


def test_the_base_stays_as_it_was_out_of_place() -> None:
    base = torch.randn(5, 2)
    before = base.clone()
    ops.scatter_add_rows(torch.randn(6, 2), TOKEN_R, 5, base)
    assert torch.equal(base, before)


def test_gradients_and_their_gradients() -> None:
    rows = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    base = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda r, b: ops.scatter_add_rows(r, TOKEN_R, 5, b), (rows, base))
        assert check(lambda r: ops.scatter_add_rows(r, TOKEN_R, 5), (rows,))
        assert check(lambda b: ops.gather_rows(b, TOKEN_R), (base,))


def test_ops_are_registered_properly() -> None:
    rows, base = torch.randn(6, 2, requires_grad=True), torch.randn(5, 2, requires_grad=True)
    torch.library.opcheck(ops.gather_rows, (base, TOKEN_R))
    torch.library.opcheck(ops.scatter_add_rows, (rows, TOKEN_R, 5, base))
    torch.library.opcheck(ops.scatter_add_rows, (rows, TOKEN_R, 5))
    torch.library.opcheck(ops.scatter_add_rows_, (base.detach(), TOKEN_R, rows.detach()))


class Calls(TorchDispatchMode):
    """Notes the ops that are called, with those of their arguments that aren't tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[object, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert not torch.are_deterministic_algorithms_enabled()
        self.found.append((func, *(arg for arg in args if isinstance(arg, bool))))
        return func(*args, **(kwargs or {}))


def test_accelerators_sum_by_one_kernel_that_neither_checks_nor_copies() -> None:
    rows, base = torch.randint(-9, 9, (6, 2)).float(), torch.ones(5, 2)
    with Calls() as calls:
        ops._add_in_row_order(base.to("meta"), TOKEN_R.to("meta"), rows.to("meta"))
    # The first three are the copies to the device.
    kernel, accumulates, is_unchecked = calls.found[-1]
    assert len(calls.found) == 4
    assert (accumulates, is_unchecked) == (True, True)
    assert torch.equal(kernel(base.clone(), [TOKEN_R], rows, True, True), base.index_add(0, TOKEN_R, rows))


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_determinism_flags_are_left_as_found(mode: int, fails: bool) -> None:
    base, token, rows = torch.zeros(4, 3), torch.tensor([0, 1]), torch.ones(2, 2 if fails else 3)
    torch.set_deterministic_debug_mode(mode)
    try:
        for add in (
            lambda: ops.scatter_add_rows(rows, token, 4, base),
            lambda: ops.scatter_add_rows_(base, token, rows),
        ):
            with pytest.raises((RuntimeError, IndexError)) if fails else nullcontext():
                add()
            assert torch.get_deterministic_debug_mode() == mode
    finally:
        torch.set_deterministic_debug_mode(0)


class Unchanged(torch.nn.Module):
    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD


class Constant(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.randn(5, 6))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.value[: len(x_TD)]


def layer_with(shared: torch.nn.Module) -> MoE:
    moe = MoE(MoEConfig(dim=6, hidden_dim=8, num_experts=4, top_k=2, num_shared_experts=1), init_std=0.5).eval()
    moe.shared_experts = shared
    return moe


def test_shared_experts_that_return_their_input_leave_it_intact() -> None:
    moe = layer_with(Unchanged())
    x = torch.randn(5, 6)
    before, expected = x.clone(), moe(x.clone()).detach()
    with torch.no_grad():
        y = moe(x)
    assert torch.equal(x, before)
    torch.testing.assert_close(y, expected)


def test_shared_experts_that_return_a_weight_leave_it_intact() -> None:
    moe = layer_with(Constant())
    before = moe.shared_experts.value.detach().clone()
    with torch.no_grad():
        moe(torch.randn(5, 6))
    assert torch.equal(moe.shared_experts.value, before)


class Remembered(torch.nn.Module):
    """Returns a tensor that it holds as a plain attribute."""

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        self.value = x_TD * 2
        return self.value


@pytest.mark.parametrize("backend", ["loop", "stream"])
def test_shared_experts_that_remember_their_output_keep_it_as_it_was(backend: str) -> None:
    moe = layer_with(Remembered())
    moe.experts.backend = backend
    x = torch.randn(5, 6)
    with torch.no_grad():
        y = moe(x)
    assert torch.equal(moe.shared_experts.value, x * 2)
    assert not torch.equal(y, x * 2)


def test_a_hook_that_remembers_the_output_of_shared_experts_keeps_it_as_it_was() -> None:
    moe = MoE(
        MoEConfig(dim=6, hidden_dim=8, num_experts=4, top_k=2, num_shared_experts=1, experts_backend="loop")
    ).eval()
    remembered = []
    moe.shared_experts.register_forward_hook(lambda module, inputs, output: remembered.append(output))
    x = torch.randn(5, 6)
    with torch.no_grad():
        moe(x)
        assert torch.equal(remembered[0], type(moe.shared_experts).forward(moe.shared_experts, x))


@pytest.mark.parametrize(
    ("grad", "may_overwrite", "path"),
    [
        (True, True, "scatter.out_of_place"),
        (False, True, "scatter.in_place"),
        (False, False, "scatter.out_of_place"),
    ],
)
def test_in_place_only_where_nothing_is_hurt(grad: bool, may_overwrite: bool, path: str) -> None:
    base, rows_RD = torch.randn(5, 2), torch.randn(6, 2)
    before = base.clone()
    rows = Rows(rows_RD, RowCounts.on_host([6]), None, torch.ones(6), False, None, base, may_overwrite)
    telemetry.reset()
    telemetry.enable()
    with torch.set_grad_enabled(grad):
        y = combine_rows(rows, rows_RD, TOKEN_R, 5)
    telemetry.enable(False)
    assert telemetry.counters() == {path: 1, "weigh.after_experts": 1}
    assert torch.equal(y, before.index_add(0, TOKEN_R, rows_RD))
    assert torch.equal(base, y if path == "scatter.in_place" else before)
