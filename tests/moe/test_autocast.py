"""Under torch.autocast a bare layer acts as nn.Linear does: low-precision output, gradients in the weights dtype."""

import pytest
import torch
from torch import nn

from spurline import MoE, MoEConfig
from spurline.testing.equivalence import relative_error

BACKENDS = ["auto", "stream", "loop", "grouped_mm", "bmm"]


def make(backend: str, shared: int) -> MoE:
    forced = backend == "bmm"
    config = MoEConfig(
        dim=16,
        hidden_dim=16,
        num_experts=4,
        top_k=2,
        num_shared_experts=shared,
        experts_backend=backend,
        force_load_balance=forced,
        aux_loss="batch",
    )
    return MoE(config, init_std=0.3)


@pytest.mark.parametrize("in_backward", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_backward_in_the_dtype_of_autocast(backend: str, shared: int, in_backward: bool) -> None:
    moe, x = make(backend, shared), torch.randn(3, 6, 16, requires_grad=True)
    expected = moe(x)
    expected.square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in moe.named_parameters()} | {"x": x.grad.clone()}
    moe.zero_grad()
    x.grad = None

    linear = nn.Linear(16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16
        y = moe(x)
        loss = y.float().square().sum()
        if in_backward:
            loss.backward()
    if not in_backward:
        loss.backward()
    assert y.dtype == torch.bfloat16
    assert relative_error(y, expected) < 1e-2
    for name, p in [("x", x), *moe.named_parameters()]:
        assert p.grad.dtype == torch.float32
        assert relative_error(p.grad, wanted[name]) < 3e-2, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_gradients(backend: str) -> None:
    moe, x = make(backend, 1).eval(), torch.randn(6, 16)
    with torch.no_grad():
        expected = moe(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = moe(x)
    assert y.dtype == torch.bfloat16
    assert relative_error(y, expected) < 1e-2


def test_the_router_keeps_its_precision() -> None:
    """Two experts whose scores differ by less than bfloat16 can tell."""
    moe = MoE(MoEConfig(dim=4, hidden_dim=8, num_experts=2, top_k=1))
    with torch.no_grad():
        moe.router.gate_ED[0] = 1.0
        moe.router.gate_ED[1] = 1.0 + 1e-4
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moe(torch.ones(1, 4))
    assert moe.router.row_count_E.tolist() == [0, 1]


def test_double_precision_is_left_alone() -> None:
    moe, x = make("auto", 1).double(), torch.randn(6, 16, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert moe(x).dtype == torch.float64


class Other(nn.Module):
    """Shared experts of a user's own, that rely on autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).float()


def test_shared_experts_of_ones_own_see_autocast() -> None:
    moe, x = make("loop", 1), torch.randn(6, 16)
    moe.shared_experts = Other()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = moe(x)
    assert y.dtype == torch.bfloat16
    assert relative_error(y, moe(x)) < 1e-2


def test_a_compiled_layer_under_autocast() -> None:
    moe, x = make("auto", 1), torch.randn(6, 16)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compiled(x), moe(x), rtol=1e-2, atol=1e-3)
