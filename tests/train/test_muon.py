"""Muon on one process, against torch.optim.Muon and against a reference in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spurline.testing.equivalence import relative_error
from spurline.train.optimizer.muon import Muon, batches_of
from spurline.train.optimizer.newton_schulz import orthogonalize
from spurline.train.optimizer.whole_matrices import chunk_sizes

SHAPES = {"wide": (24, 40), "tall": (40, 24), "square": (32, 32), "row": (1, 16), "column": (16, 1)}
OPTIONS = {
    "defaults": {},
    "match_rms_adamw": {"adjust_lr": "match_rms_adamw", "weight_decay": 0.3},
    "plain momentum": {"nesterov": False, "momentum": 0.8, "ns_steps": 3},
}


def gradients_of_step(step: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + step))


def trained(optimizer_of, shape: tuple[int, ...], num_steps: int = 4) -> Tensor:
    """A parameter after some steps of optimizer_of([parameter]), with gradients that depend on step and shape alone."""
    parameter = nn.Parameter(gradients_of_step(0, shape))
    optimizer = optimizer_of([parameter])
    for step in range(1, num_steps + 1):
        parameter.grad = gradients_of_step(step, shape)
        optimizer.step()
    return parameter.detach()


def reference(shape: tuple[int, int], num_steps: int = 4, lr=0.02, weight_decay=0.1, momentum=0.95, ns_steps=5):
    """Muon with Nesterov momentum by its formulas, in float64, through the singular values of each update."""
    weight = gradients_of_step(0, shape).numpy().astype(np.float64)
    mean = np.zeros_like(weight)
    for step in range(1, num_steps + 1):
        gradient = gradients_of_step(step, shape).numpy().astype(np.float64)
        mean = momentum * mean + (1 - momentum) * gradient
        direction = momentum * mean + (1 - momentum) * gradient
        u, s, vt = np.linalg.svd(direction, full_matrices=False)
        s = s / np.sqrt((s**2).sum())
        for _ in range(ns_steps):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        weight = weight * (1 - lr * weight_decay) - lr * max(1, shape[0] / shape[1]) ** 0.5 * (u * s) @ vt
    return torch.from_numpy(weight)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_matrix_is_updated_exactly_as_by_torch(shape: tuple[int, int], options: dict) -> None:
    theirs = {"adjust_lr_fn" if name == "adjust_lr" else name: value for name, value in options.items()}
    expected = trained(lambda parameters: torch.optim.Muon(parameters, lr=0.02, **theirs), shape)
    actual = trained(lambda parameters: Muon(parameters, lr=0.02, ns_dtype=torch.bfloat16, **options), shape)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_on_a_cpu_the_default_is_exact_to_float32(shape: tuple[int, int]) -> None:
    actual = trained(lambda parameters: Muon(parameters, lr=0.02), shape)
    assert relative_error(actual, reference(shape)) < 2e-6
    rounded = trained(lambda parameters: Muon(parameters, lr=0.02, ns_dtype=torch.bfloat16), shape)
    assert relative_error(rounded, reference(shape)) < 2e-2


@pytest.mark.parametrize("shape", [(6, 24, 40), (6, 40, 24), (1, 8, 8), (0, 8, 4)], ids=str)
@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
def test_stacked_experts_are_updated_like_matrices_one_by_one(shape: tuple[int, int, int], adjust_lr: str) -> None:
    stack = nn.Parameter(gradients_of_step(0, shape))
    singles = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    of_stack = Muon([stack], lr=0.02, ns_dtype=torch.bfloat16, adjust_lr=adjust_lr)
    of_singles = torch.optim.Muon(singles or [nn.Parameter(torch.ones(2, 2))], lr=0.02, adjust_lr_fn=adjust_lr)
    for step in range(1, 5):
        # Experts that differ much in scale: each must be normalized by its own norm.
        stack.grad = gradients_of_step(step, shape) * torch.logspace(-3, 3, shape[0]).view(-1, 1, 1)
        for single, gradient in zip(singles, stack.grad, strict=True):
            single.grad = gradient.clone()
        of_stack.step()
        of_singles.step()
    for matrix, single in zip(stack.detach(), singles, strict=True):
        assert torch.equal(matrix, single.detach())


def test_singular_values_come_close_to_one() -> None:
    x = torch.randn(3, 20, 50) * torch.tensor([1e-4, 1.0, 1e4]).view(3, 1, 1)
    values = torch.linalg.svdvals(orthogonalize(x, steps=5))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_expert_without_gradient_stays_and_is_no_nan() -> None:
    stack = nn.Parameter(torch.ones(2, 3, 4))
    optimizer = Muon([stack], lr=0.1, weight_decay=0.0)
    stack.grad = torch.stack([torch.zeros(3, 4), torch.randn(3, 4)])
    optimizer.step()
    assert torch.equal(stack[0], torch.ones(3, 4))
    assert not torch.equal(stack[1], torch.ones(3, 4))


def test_gradient_is_left_as_it_was_and_a_parameter_without_one_is_not_touched() -> None:
    used, unused = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
    before = unused.detach().clone()
    optimizer = Muon([used, unused], nesterov=False)
    used.grad = torch.ones(3, 4)
    optimizer.step()
    assert torch.equal(used.grad, torch.ones(3, 4))
    assert torch.equal(unused, before)
    assert unused not in optimizer.state


def test_vector_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Muon takes matrices and stacks of matrices, not a parameter of \(3,\)"):
        Muon([nn.Parameter(torch.ones(3))])


def test_closure_is_called_with_gradients() -> None:
    weight = nn.Parameter(torch.randn(3, 4))
    optimizer = Muon([weight])

    def closure() -> Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert optimizer.state[weight]["momentum_buffer"].abs().sum() > 0


def test_whole_matrices_are_updated_one_parameter_at_a_time() -> None:
    parameters = [nn.Parameter(torch.ones(2, 3)) for _ in range(3)]
    assert [[p is parameters[i] for p in batch] for i, (batch, _) in enumerate(batches_of(parameters))] == [[True]] * 3


@pytest.mark.parametrize(("size", "num_chunks"), [(8, 4), (5, 4), (3, 4), (0, 2), (7, 1), (9, 4)])
def test_chunk_sizes_are_those_of_torch(size: int, num_chunks: int) -> None:
    theirs = [len(chunk) for chunk in torch.arange(size).chunk(num_chunks)]
    assert list(chunk_sizes(size, num_chunks)) == (theirs + [0] * num_chunks)[:num_chunks]
