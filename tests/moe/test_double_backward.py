"""Gradients that are themselves differentiated: equal to those of a plain backward pass, and to finite differences."""

import pytest
import torch
from torch import Tensor

from spurline import MoE, MoEConfig

CONFIG = {"dim": 8, "hidden_dim": 8, "num_experts": 4, "top_k": 2, "num_shared_experts": 1}
BACKENDS = ["stream", "loop", "grouped_mm", "bmm"]
NORMALIZED = {"route_norm": True, "score_func": "sigmoid", "route_scale": 2.0}
CHANGES = [{}, {"score_before_experts": True}, NORMALIZED]
BALANCED = {"aux_loss": "batch", "aux_loss_weight": 0.5, "z_loss_weight": 0.1}


def make(backend: str, dtype: torch.dtype, **changes: object) -> MoE:
    forced = backend == "bmm"
    config = MoEConfig(**(CONFIG | changes), experts_backend=backend, force_load_balance=forced)
    return MoE(config, init_std=0.5, dtype=dtype)


def gradients(moe: MoE, x: Tensor, create_graph: bool) -> list[Tensor]:
    y = moe(x)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return list(torch.autograd.grad((y * direction).sum(), [x, *moe.parameters()], create_graph=create_graph))


@pytest.mark.parametrize("changes", [*CHANGES, BALANCED], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_recording_a_backward_pass_changes_no_gradient(backend: str, changes: dict[str, object]) -> None:
    moe = make(backend, torch.float32, **changes)
    x = torch.randn(6, 8, requires_grad=True)
    for plain, recorded in zip(gradients(moe, x, False), gradients(moe, x, True), strict=True):
        torch.testing.assert_close(recorded, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "grouped_mm"])
def test_second_derivatives_equal_finite_differences(backend: str, changes: dict[str, object]) -> None:
    """The derivative of the squared norm of all gradients along one direction of x, in double precision.

    Without balance losses: their gradient is added in each backward pass through the layer, so in the second one too.
    """
    moe = make(backend, torch.float64, **changes)
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    along = torch.randn(6, 8, dtype=torch.float64)

    def penalty(x: Tensor, create_graph: bool) -> Tensor:
        return torch.stack([gradient.square().sum() for gradient in gradients(moe, x, create_graph)]).sum()

    (exact,) = torch.autograd.grad(penalty(x, True), x)
    step = 1e-5
    high, low = (penalty((x + sign * step * along).detach().requires_grad_(), False) for sign in (1, -1))
    torch.testing.assert_close((exact * along).sum(), (high - low) / (2 * step), rtol=1e-5, atol=1e-6)
